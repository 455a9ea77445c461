"""Modes of what is written, and bringing it to the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.errors import RequestError

# What file systems without fsync of folders (CIFS, some of FUSE) answer.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


@contextmanager
def made_folders(path: Path) -> Iterator[None]:
    """Make `path` and the folders above it; at the end remove those that were made and are empty.

    Raises:
        RequestError: it cannot be made there, whatever room is left.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RequestError(f"the folder {path} cannot be made ({error.strerror}); choose another output.") from error
    try:
        yield
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def sync_file(path: Path) -> None:
    """Return when the file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return when the names in the folder are on the disk, where the file system can say so."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def new_file_mode(folder: Path) -> int:
    """Mode of a file made in `folder` without any wish: 0666 less the umask or as its default ACL says.

    A file is made and removed, since reading the umask means setting it for every thread.
    """
    probe = _probe_path(folder)
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        probe.unlink()


def new_folder_mode(folder: Path) -> int:
    """As `new_file_mode`, for a folder: 0777 less the umask, with the set-group-id bit that it inherits."""
    probe = _probe_path(folder)
    probe.mkdir()
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.rmdir()


def finish_tree(folder: Path) -> None:
    """Give everything in `folder` the mode of new files and folders, and bring it to the disk.

    Libraries that write through private temporary files leave 0600, which a server under another
    user cannot read. Links, symbolic and hard ones, are left alone: a mode set through one lands on a file elsewhere.
    """
    file_mode, folder_mode = new_file_mode(folder), new_folder_mode(folder)
    for path in folder.rglob("*"):
        status = path.lstat()
        kind = status.st_mode
        if stat.S_ISDIR(kind):
            path.chmod(folder_mode)
            sync_folder(path)
        elif stat.S_ISREG(kind) and status.st_nlink == 1:
            path.chmod(file_mode)
            sync_file(path)
    folder.chmod(folder_mode)
    sync_folder(folder)


def _probe_path(folder: Path) -> Path:
    return folder / f".mode-probe-{os.getpid()}-{threading.get_ident()}"
