"""What stands at a path where a file is wanted: said by its kind, and not opened. Imports no torch.

A device has no end, and a pipe that nothing writes to has no beginning.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from compressor.errors import RequestError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def kind_of(path: Path | str) -> str | None:
    """`a folder`, `a pipe`, `a device` or `a socket`; None for a file, and where nothing is found."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116, takes any string
    except (OSError, ValueError):
        return None
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)


def refuse_no_file(path: Path, called: str, remedy: str) -> None:
    """Refuse what is there and is no file that can be read to its end; a pipe of the shell, as `<(...)`, can be.

    Raises:
        RequestError: `called` is of another kind; `remedy` says what to give.
    """
    kind = kind_of(path)
    if kind is None or (kind == "a pipe" and not os.path.exists(os.path.realpath(path))):  # noqa: PTH110
        return
    raise RequestError(f"{called} is {kind}, not a file; {remedy}.")


def absence(path: Path | str) -> str:
    """Why nothing is found at a path: `does not exist`, or that its link leads nowhere."""
    try:
        return f"is a link to {os.readlink(path)}, which does not exist"  # noqa: PTH115
    except (OSError, ValueError):
        return "does not exist"
