"""One run at a time for an output folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.errors import RequestError
from compressor.export.files import made_folders

# What file systems without locks answer: the run goes on unguarded there, since refusing would shut them out.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK})

# Runs that end just now can remove the folder a few times; where no folder can be made, that goes on for ever.
_ATTEMPTS = 100


@contextmanager
def run_lock(lock_file: Path, output: Path) -> Iterator[None]:
    """Hold `lock_file` while inside; the kernel drops the lock when the process dies, however it dies.

    Folders above the file are made when missing. At the end the file is removed, and the folders
    that are empty then.

    Raises:
        RequestError: another run holds it, or it cannot be made.
    """
    with made_folders(lock_file.parent.parent):
        descriptor = _acquire(lock_file, output)
        try:
            # What a second run names; the lock does not need it.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            yield
        finally:
            # Removed before it is unlocked: who opened it meanwhile finds that it is no longer the file of that name,
            # and forked children, which share the open file and so its lock, keep nobody out.
            lock_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                lock_file.parent.rmdir()
            os.close(descriptor)


def _acquire(lock_file: Path, output: Path) -> int:
    for _ in range(_ATTEMPTS):
        descriptor = _open(lock_file)
        if descriptor is None:
            continue
        if not _lock(descriptor):
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise RequestError(
                f"another run is writing {output} (pid {holder}); wait for its end or choose another output folder."
            )
        if _is_current(descriptor, lock_file):
            return descriptor
        os.close(descriptor)
    raise RequestError(f"{lock_file} cannot be made and kept; choose an output folder on an ordinary file system.")


def _open(lock_file: Path) -> int | None:
    """None when the run that ends just now removed the folder meanwhile."""
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RequestError(
            f"cannot write {lock_file} ({error.strerror}); make its folder writable or choose another output folder."
        ) from error


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
    return True


def _is_current(descriptor: int, lock_file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), lock_file.stat())
    except FileNotFoundError:
        return False
