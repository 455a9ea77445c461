"""Names, dtypes and shapes of all tensors of a folder, from the headers of its safetensors files.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the tensors'
bytes; the header gives each tensor's dtype, shape and [begin, end) within those bytes.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from compressor.checkpoint.layout import INDEX_FILE, WeightLayout, listed, weight_layout
from compressor.errors import RequestError, RunError
from compressor.json_text import parse_json

# safetensors itself takes no longer header.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_LFS_START = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. `dtype` is safetensors' name, such as `BF16`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.dtype]


@dataclass(frozen=True)
class TensorIndex:
    """All tensors of a checkpoint.

    `entries` are in the order of the bytes: by file, then by position in it. `metadata` is what stands
    in the files' `__metadata__` (the first file's value where they differ). `notes` say in plain words
    what the folder holds that is not read, or not as one would expect.
    """

    entries: Mapping[str, TensorEntry]
    files: tuple[Path, ...]
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _FileHeader:
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_headers(folder: Path) -> TensorIndex:
    """What stock transformers would read from `folder`, without reading a tensor.

    A tensor that stands in two files with the same bytes is taken once; only for that comparison are
    tensors read.

    Raises:
        RequestError: no safetensors weights, a broken file, or files and index that contradict each other.
    """
    layout = weight_layout(folder)
    headers = {path: _read_file_header(path) for path in layout.files}
    _refuse_wrong_index(folder, layout, headers)
    entries: dict[str, TensorEntry] = {}
    notes = list(layout.notes)
    metadata: dict[str, str] = {}
    for header in headers.values():
        metadata = header.metadata | metadata
        for name, entry in header.entries.items():
            if name in entries:
                _refuse_different_copies(entries[name], entry, layout)
                notes.append(f"{name} stands in {entries[name].file.name} and {entry.file.name}: taken once")
            else:
                entries[name] = entry
    if not entries:
        raise RequestError(f"the weight files of {folder} hold no tensor; download them again.")
    unlisted = [name for name in entries if layout.weight_map and name not in layout.weight_map]
    if unlisted:
        notes.append(f"{INDEX_FILE} does not name {listed(unlisted)}; stock transformers reads what the files hold")
    return TensorIndex(entries, layout.files, metadata, tuple(notes))


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """The tensor on the CPU, in the dtype of the file.

    Raises:
        RunError: the file cannot be read, or no longer holds what its header said.
    """
    try:
        with safe_open(entry.file, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(entry.name)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{entry.name} cannot be read from {entry.file} ({error}); check the disk.") from error
    if tuple(tensor.shape) != entry.shape:
        raise RunError(
            f"{entry.name} in {entry.file} now has shape {tuple(tensor.shape)} instead of {entry.shape}: "
            "the file changed during the run; start again."
        )
    return tensor


def _read_file_header(path: Path) -> _FileHeader:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES + len(_LFS_START))
            header_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
            _refuse_wrong_start(path, size, start, header_bytes)
            file.seek(_LENGTH_BYTES)
            text = file.read(header_bytes)
    except OSError as error:
        raise RequestError(f"{path} cannot be read ({error.strerror}); check the file and its permissions.") from error
    header = _parsed(path, text)
    promised = _LENGTH_BYTES + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < promised:
        raise RequestError(_ends_early(path, promised, size))
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            metadata = dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} has a corrupt header ({error}); download it again.") from error
    ordered = sorted(header.items(), key=lambda item: (*item[1]["data_offsets"], item[0]))
    return _FileHeader({name: _entry(name, path, fields) for name, fields in ordered}, metadata)


def _refuse_wrong_start(path: Path, size: int, start: bytes, header_bytes: int) -> None:
    if size == 0:
        raise RequestError(f"{path} is empty (0 bytes); download it again.")
    if start.startswith(_LFS_START):
        raise RequestError(f"{path} is a Git LFS pointer ({size} bytes), not weights; run git lfs pull.")
    if size >= _LENGTH_BYTES and header_bytes > _MAX_HEADER_BYTES:
        raise RequestError(
            f"{path} is not a safetensors file: its first {_LENGTH_BYTES} bytes promise a header of {header_bytes} "
            f"bytes, {_MAX_HEADER_BYTES} is the most; download it again."
        )
    if size < _LENGTH_BYTES + header_bytes:
        raise RequestError(_ends_early(path, _LENGTH_BYTES + header_bytes, size))


def _ends_early(path: Path, promised: int, size: int) -> str:
    return f"{path} ends early: header promises {promised} bytes, file has {size}; download it again."


def _parsed(path: Path, text: bytes) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}; whether the values fit each other is left to safetensors."""
    try:
        header = parse_json(text)
    except ValueError as error:
        raise RequestError(f"{path} has a corrupt header ({error}); download it again.") from error
    if isinstance(header, dict):
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        if all(_describes_tensor(value) for value in tensors.values()):
            return tensors
    raise RequestError(f"{path} has a corrupt header (a field of a tensor is missing or wrong); download it again.")


def _describes_tensor(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        return False
    shape, offsets = value.get("shape"), value.get("data_offsets")
    return _are_counts(shape) and _are_counts(offsets) and len(value["data_offsets"]) == 2


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _entry(name: str, path: Path, fields: dict[str, Any]) -> TensorEntry:
    begin, end = fields["data_offsets"]
    return TensorEntry(name, path, fields["dtype"], tuple(fields["shape"]), end - begin)


def _refuse_wrong_index(folder: Path, layout: WeightLayout, headers: Mapping[Path, _FileHeader]) -> None:
    lacking = [
        f"{name} in {file}" for name, file in layout.weight_map.items() if name not in headers[folder / file].entries
    ]
    if lacking:
        raise RequestError(
            f"{folder / INDEX_FILE} names tensors that their files lack: {listed(lacking)}; "
            "download the index and the files of one revision."
        )


def _refuse_different_copies(first: TensorEntry, second: TensorEntry, layout: WeightLayout) -> None:
    """`second` stands in the later file, so that the stock loader, which reads file by file, keeps it."""
    if (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(_bytes(first), _bytes(second)):
        return
    indexed = layout.weight_map.get(first.name, "neither")
    raise RequestError(
        f"{first.name} stands in both {first.file.name} and {second.file.name} with different bytes; the index names "
        f"{indexed}, stock loaders read {second.file.name}; remove the stale copy."
    )


def _bytes(entry: TensorEntry) -> torch.Tensor:
    return read_tensor(entry).reshape(-1).view(torch.uint8)
