"""Whether a file of a checkpoint is there, and what stands in its place where it is none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from compressor.errors import RequestError
from compressor.file_kinds import kind_of


def is_there(path: Path) -> bool:
    """Whether the file is there. What is no file is not taken for an absent one.

    Raises:
        RequestError: a folder, a pipe or the like has its name, or a link that leads to nothing, as an interrupted
            download leaves.
    """
    kind = kind_of(path)
    if kind is not None:
        raise RequestError(f"{path} is {kind}, and should be a file; put the file there, or download it again.")
    lost = lost_link(path)
    if lost is not None:
        raise RequestError(f"{path} {lost}; download the file again.")
    return path.is_file()


def no_folder(path: Path | str) -> str | None:
    """What there is in place of a folder, as the beginning of a sentence; None where there is one."""
    kind = kind_of(path)
    if kind == "a folder":
        return None
    lost = lost_link(path)
    if lost is not None:
        return f"{path} {lost}"
    if kind is None and not os.path.exists(path):  # noqa: PTH110
        return f"there is no folder {path}"
    return f"{path} is {kind or 'a file'}"


def lost_link(path: Path | str) -> str | None:
    """`links to X, which does not exist` or `..., and so on in a circle`; None where there is no such link."""
    try:
        target = os.readlink(path)  # noqa: PTH115, takes any string
    except (OSError, ValueError):
        return None
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as error:
        # Of what may not be looked at, other messages tell.
        ends = {errno.ELOOP: "and so on in a circle", errno.ENOENT: "which does not exist"}
        ends[errno.ENOTDIR] = ends[errno.ENOENT]
        return f"links to {target}, {ends[error.errno]}" if error.errno in ends else None
    return None
