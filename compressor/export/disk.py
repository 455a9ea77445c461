"""Space on the disk: asked before the work, and what a full disk says during it."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from compressor.errors import RequestError, RunError
from compressor.export.advice import WITH_RESUME, Advice

_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")


def format_bytes(count: int) -> str:
    """`5.00 GB` for 5,000,000,000: decimal units, as --max-shard-size and file managers count them."""
    if count < 1000:
        return f"{count} bytes"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.995:
            return f"{value:.2f} {unit}"
    return f"{value / 1000:.2f} TB"


def nearest_existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def refuse_too_little_space(folder: Path, required_bytes: int) -> None:
    """Ask the file system that will hold `folder`, which need not exist yet.

    Raises:
        RequestError: less than `required_bytes` is free. A file system that tells no size at all is trusted.
    """
    usage = shutil.disk_usage(nearest_existing(folder))
    if usage.total > 0 and usage.free < required_bytes:
        raise RequestError(
            f"writing {folder} needs {format_bytes(required_bytes)} and its file system has {format_bytes(usage.free)} "
            f"free; free {format_bytes(required_bytes - usage.free)} more or choose an output folder on another disk."
        )


@contextmanager
def translate_write_errors(target: Path, required_bytes: int | None, advice: Advice = WITH_RESUME) -> Iterator[None]:
    """Turn what a full or write-protected disk answers into one sentence that names `target`.

    `required_bytes` is what all of the output takes, None where that is unknown. Other errors pass unchanged.

    Raises:
        RunError: no space or quota left, a file beyond the allowed size, a read-only file system.
    """
    try:
        yield
    except OSError as error:
        message = _sentence(error.errno, target, required_bytes, advice)
        if message is None:
            raise
        raise RunError(message) from error
    except SafetensorError as error:
        # The Rust library flattens the operating system's error into its text.
        found = _OS_ERROR.search(str(error))
        message = _sentence(int(found.group(1)), target, required_bytes, advice) if found else None
        if message is None:
            raise
        raise RunError(message) from error


def _sentence(code: int | None, target: Path, required_bytes: int | None, advice: Advice) -> str | None:
    needed = "more space" if required_bytes is None else format_bytes(required_bytes)
    if code == errno.ENOSPC:
        return f"no space left on device while writing {target}; free {needed} and {advice.again}."
    if code == errno.EDQUOT:
        return f"disk quota exceeded while writing {target}; free {needed} of it and {advice.again}."
    if code == errno.EROFS:
        return f"{target} is on a read-only file system; make it writable and {advice.again}."
    if code == errno.EFBIG:
        return (
            f"a file in {target} grew beyond the size limit of the file system or of `ulimit -f`; "
            f"raise it or {advice.too_large}, and {advice.again}."
        )
    return None
