"""The header of a file of saved statistics: read before any tensor is, and what is said of files without one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from compressor.abbreviation import cut_word
from compressor.errors import RequestError
from compressor.file_kinds import absence, kind_of
from compressor.home_folders import expanded

STATISTICS_SCHEMA = "2"
ANEW = "leave --statistics out to calibrate anew"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The longest that safetensors takes."""


@dataclass(frozen=True, slots=True)
class StatisticsHeader:
    """`tensors` has the dtype, as safetensors calls it, and the shape of each."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def read_header(path: Path) -> StatisticsHeader:
    """Of a file that `--statistics` names, which is of this schema.

    Raises:
        RequestError: there is no file, or one that --save-statistics of this version has not written.
    """
    file_path = expanded(path)
    kind = kind_of(file_path)
    if kind is not None or not os.path.isfile(file_path):  # noqa: PTH113, says no to a name that is too long
        found = "there is no such file" if kind is None else f"that is {kind}, not a file"
        if kind is None and os.path.islink(file_path):  # noqa: PTH114
            found = f"it {absence(file_path)}"
        raise RequestError(f"--statistics {path}: {found}; give one that --save-statistics wrote.")
    try:
        with safe_open(file_path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
            tensors = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, file_path, error) from error
    _refuse_other_schema(path, metadata)
    return StatisticsHeader(metadata, tensors)


def damaged(path: Path, reason: str) -> RequestError:
    """That the file is not as it was written."""
    return RequestError(f"--statistics {path} is damaged: {reason}; copy it again from where it was saved, or {ANEW}.")


def are_statistics(path: Path) -> bool:
    """Whether --save-statistics of this or an earlier version wrote the file."""
    try:
        with safe_open(path, framework="pt") as file:
            return "tokens_sha256" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _refuse_other_schema(path: Path, metadata: Mapping[str, str]) -> None:
    schema = metadata.get("schema")
    if schema == STATISTICS_SCHEMA:
        return
    if schema is None or "tokens_sha256" not in metadata:
        raise RequestError(
            f"--statistics {path} is a safetensors file that holds no statistics; give one that --save-statistics "
            "wrote."
        )
    raise RequestError(
        f"--statistics {path} was written by another version (schema {cut_word(schema)}, and this one reads "
        f"{STATISTICS_SCHEMA}); calibrate again with --save-statistics, or {ANEW}."
    )


def _unreadable(path: Path, file_path: Path, error: SafetensorError | OSError) -> RequestError:
    try:
        size = file_path.stat().st_size
        with file_path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    except OSError as refused:
        reason = refused.strerror or str(refused)
        return RequestError(f"--statistics {path} cannot be read ({reason}); check the file and its permissions.")
    if size == 0:
        reason = "it is empty"
    elif size < _LENGTH_BYTES or header_bytes > _MAX_HEADER_BYTES:
        reason = "it is no safetensors file"
    else:
        return damaged(path, f"it is cut short or was changed ({size} bytes; safetensors says: {error})")
    return RequestError(f"--statistics {path} cannot be read ({reason}); give a file that --save-statistics wrote.")
