"""New values for tensors of a finished checkpoint, in place: same names, shapes and dtypes, so no other byte moves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.headers import TensorEntry, read_headers
from compressor.errors import RunError

_LENGTH_BYTES = 8


def replace_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite `tensors` in the safetensors files of `folder`, which no one else may be reading.

    A file that has another name too, as --link leaves them, is copied first: the bytes under that name stay.

    Raises:
        RunError: the folder has no tensor of that name, or has it in another shape or dtype; nothing was written.
    """
    entries = read_headers(folder).entries
    for name, tensor in tensors.items():
        _require_same_kind(folder, name, entries.get(name), tensor)
    for file in sorted({entries[name].file for name in tensors}):
        _take_from_other_names(file)
        starts = _starts(file)
        with file.open("r+b") as stream:
            for name, tensor in tensors.items():
                if entries[name].file == file:
                    stream.seek(starts[name])
                    stream.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _take_from_other_names(file: Path) -> None:
    if file.stat().st_nlink > 1:
        copy = file.with_name(f".{file.name}.copy")
        shutil.copyfile(file, copy)
        copy.replace(file)


def _require_same_kind(folder: Path, name: str, entry: TensorEntry | None, tensor: Tensor) -> None:
    if entry is None:
        raise RunError(f"{folder} has no tensor {name} to replace; it is not the checkpoint that was trained.")
    shape, dtype = entry.shape, entry.torch_dtype
    if shape != tuple(tensor.shape) or dtype != tensor.dtype:
        raise RunError(
            f"{folder} has {name} as {list(shape)} of {dtype}, and its new value is {list(tensor.shape)} of "
            f"{tensor.dtype}; it is not the checkpoint that was trained."
        )


def _starts(file: Path) -> dict[str, int]:
    """Where in `file` the bytes of each tensor begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    first = _LENGTH_BYTES + length
    return {name: first + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
