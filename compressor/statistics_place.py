"""Where statistics may be saved: a place that will be there at the end, is nobody else's, and has the room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from compressor.errors import RequestError
from compressor.export.disk import format_bytes
from compressor.export.locks import lock_file_of
from compressor.export.placement import lies_in
from compressor.export.trial import file_problem
from compressor.home_folders import expanded
from compressor.statistics_header import are_statistics


def refuse_place(path: Path, outputs: Sequence[Path], model: Path, texts: Iterable[Path], overwrite: bool) -> None:
    """Refuse, before any work, a file to save to that would not be there at the end, or that is not ours to replace.

    Raises:
        RequestError: there is no such folder; the file exists and not `overwrite`, or holds no statistics; it lies in
            the folders `outputs` or `model` or among the `texts` that are read, or nothing can be written there.
    """
    given = expanded(path)
    _refuse_folders(path, given, outputs, model, texts)
    real = Path(os.path.realpath(given))
    if real.is_dir():
        raise RequestError(f"--save-statistics {path} is a folder; name a file, such as {path}/statistics.safetensors.")
    if real.exists() and not real.is_file():
        raise RequestError(f"--save-statistics {path} is a device or a pipe, not a file; name a file.")
    if not real.parent.is_dir():
        raise RequestError(f"--save-statistics {path}: there is no folder {real.parent}; make it first.")
    problem = file_problem(real.parent)
    if problem is not None:
        raise RequestError(
            f"--save-statistics {path}: {real.parent} cannot be written to ({problem}); name another folder."
        )
    if real.exists() and not overwrite:
        raise RequestError(f"--save-statistics {path} exists; give --overwrite to replace it, or name another file.")
    if real.exists() and not are_statistics(real):
        raise RequestError(
            f"--save-statistics {path} exists and holds no statistics, and --overwrite replaces only those; name "
            "another file."
        )


def _refuse_folders(path: Path, given: Path, outputs: Sequence[Path], model: Path, texts: Iterable[Path]) -> None:
    if lies_in(given, model):
        raise RequestError(
            f"--save-statistics {path} lies in the model's folder, whose files this run reads; name a file elsewhere."
        )
    for text in texts:
        if os.path.realpath(given) == os.path.realpath(text):
            raise RequestError(f"--save-statistics {path} is a text that this run reads; name another file.")
        if text.is_dir() and lies_in(given, text):
            raise RequestError(
                f"--save-statistics {path} lies in {text}, a folder of texts that this run reads; name a file "
                "elsewhere."
            )
    for output in outputs:
        if lies_in(given, lock_file_of(output).parent):
            raise RequestError(
                f"--save-statistics {path} lies in the folder that --resume goes on with; name a file elsewhere."
            )
        if Path(os.path.realpath(given)) == output or lies_in(given, output):
            raise RequestError(
                f"--save-statistics {path} lies in the output folder {output}, beside whose weights no other may "
                "stand; name a file elsewhere."
            )


def refuse_little_room(path: Path, required_bytes: int) -> None:
    """Refuse, before any work, a file system that has no room for the file; see `refuse_place` first.

    Raises:
        RequestError: less than `required_bytes` is free. A file system that tells no size at all is trusted.
    """
    folder = Path(os.path.realpath(expanded(path))).parent
    usage = shutil.disk_usage(folder)
    if usage.total > 0 and usage.free < required_bytes:
        raise RequestError(
            f"--save-statistics {path} needs {format_bytes(required_bytes)} and the file system of {folder} has "
            f"{format_bytes(usage.free)} free; free {format_bytes(required_bytes - usage.free)} more, or name a file "
            "on another disk."
        )
