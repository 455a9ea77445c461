"""One run at a time for an output folder, and the folder beside it that is known by the lock."""

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

LOCK_NAME = "compress.lock"
"""In the resume folder from its beginning to its end: runs write and remove there, and nowhere without it."""

# Runs that end just now can remove the folder a few times; where no folder can be made, that goes on for ever.
_ATTEMPTS = 100


def lock_file_of(output: Path) -> Path:
    """Of the run that writes `output`, links resolved; beside it lies what --resume goes on with."""
    return output.with_name(f"{output.name}.resume") / LOCK_NAME


def refuse_foreign(lock_file: Path) -> None:
    """Refuse a resume folder that no run made: what stands in it is a user's, whatever its name.

    Raises:
        RequestError: something stands there, and not the lock file, or it is no folder that can be read.
    """
    folder = lock_file.parent
    try:
        # Looked for on both sides: a run may begin or end meanwhile.
        entries = [] if _is_there(lock_file) else sorted(path.name for path in folder.iterdir())
        foreign = bool(entries) and not _is_there(lock_file)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise RequestError(
            f"{folder} is a file, and runs keep there what --resume goes on with; move it away or choose another "
            "output folder."
        ) from None
    except OSError as error:
        raise RequestError(
            f"{folder} cannot be read ({error.strerror}); make it readable or choose another output folder."
        ) from error
    if foreign:
        raise RequestError(
            f"{folder}, where runs keep what --resume goes on with, was not made by compress: it holds {entries[0]} "
            f"and no {lock_file.name}; move it away or choose another output folder."
        )


@contextmanager
def run_lock(lock_file: Path, output: Path) -> Iterator[None]:
    """Hold `lock_file` while inside; the kernel drops the lock when the process dies, however it dies.

    Folders above the file are made when missing. At the end, where nothing else stands beside the file, it is removed,
    and the folders that are empty then; else it stays as the mark of the folder.

    Raises:
        RequestError: another run holds it, it cannot be made, or as `refuse_foreign`.
    """
    # An empty folder of the user's is used, and left.
    adopted = lock_file.parent.is_dir() and not _is_there(lock_file)
    with made_folders(lock_file.parent.parent):
        descriptor = _acquire(lock_file, output)
        try:
            # What a second run names; the lock does not need it.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
            yield
        finally:
            with contextlib.suppress(OSError):
                _end(lock_file, adopted)
            # Forked children share the open file and so its lock, and are to keep nobody out.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _end(lock_file: Path, adopted: bool) -> None:
    """Removed before it is unlocked: who opened it meanwhile finds that it is no longer the file of that name."""
    folder = lock_file.parent
    if any(path != lock_file for path in folder.iterdir()):
        return
    lock_file.unlink(missing_ok=True)
    if not adopted:
        folder.rmdir()


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


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
        refuse_foreign(lock_file)
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
