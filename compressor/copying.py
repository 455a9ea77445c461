"""Copies of whole folders: the first file that cannot be copied ends it, in one sentence."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from compressor.errors import RunError

_NO_ROOM = "free more space there"
_REMEDIES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EFBIG: "raise the limit of its file system or of `ulimit -f`",
}


def copy_tree(source: Path, folder: Path, called: Path, copy: Callable[[Path, Path], object] = shutil.copyfile) -> None:
    """Copy what stands in `source`, links followed, into `folder`, which messages know as `called`.

    shutil.copytree would go on after a failure, and then tell of all of them without a number that says their kind.

    Raises:
        RunError: a file or folder cannot be read or written.
    """
    failing = source
    try:
        folder.mkdir(exist_ok=True)
        for failing in sorted(source.iterdir()):
            target = folder / failing.name
            if failing.is_dir():
                copy_tree(failing, target, called / failing.name, copy)
            else:
                copy(failing, target)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check it and the disk of the copy")
        raise RunError(
            f"{failing} could not be copied to {called} ({error.strerror or error}); {remedy}, and run again with "
            "--resume."
        ) from error
