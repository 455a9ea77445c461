"""Whether something can be made in a folder, found by making it: modes tell nothing of /proc and its like."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path

_PREFIX = ".compress-trial-"


def folder_problem(parent: Path) -> str | None:
    """Why no folder can be made in `parent`, as the system says it; None where one could be, and no more is there."""
    return _problem(lambda: Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)).rmdir())


def file_problem(parent: Path) -> str | None:
    """As `folder_problem`, of a file."""
    return _problem(lambda: tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=parent).close())


def _problem(make: Callable[[], object]) -> str | None:
    try:
        make()
    except OSError as error:
        # Room is asked for elsewhere, where it is known how much is needed.
        return None if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    return None
