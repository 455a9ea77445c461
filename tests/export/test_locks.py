from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.errors import RequestError
from compressor.export.locks import lock_file_of, refuse_foreign, run_lock

ROOT = Path(__file__).resolve().parents[2]


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from compressor.export.locks import run_lock
with run_lock(Path(sys.argv[1]), Path("DIR")):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(lock_file: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(lock_file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_second_run_is_refused_until_the_first_died(tmp_path: Path) -> None:
    lock_file = tmp_path / "out.resume" / "lock"
    with hold(lock_file) as first:
        try:
            with pytest.raises(RequestError) as error, run_lock(lock_file, Path("DIR")):
                pass
            assert str(error.value) == (
                f"another run is writing DIR (pid {first.pid}); wait for its end or choose another output folder."
            )
        finally:
            first.kill()
    assert lock_file.read_text() == str(first.pid)
    with run_lock(lock_file, Path("DIR")):
        assert lock_file.read_text() == str(os.getpid())
    assert listing(tmp_path) == []


def test_a_second_run_of_the_same_process_is_refused(tmp_path: Path) -> None:
    with run_lock(tmp_path / "lock", Path("DIR")):
        message = rf"another run is writing DIR \(pid {os.getpid()}\)"
        with pytest.raises(RequestError, match=message), run_lock(tmp_path / "lock", Path("DIR")):
            pass
        assert (tmp_path / "lock").exists()


def test_nothing_is_left_of_the_lock_and_all_of_the_rest(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_lock(tmp_path / "a" / "b" / "lock", Path("DIR")):
        raise KeyError
    assert listing(tmp_path) == []
    folder = tmp_path / "out.resume"
    with run_lock(folder / "lock", Path("DIR")):
        (folder / "statistics").touch()
    assert listing(folder) == ["lock", "statistics"]  # the mark by which the next run knows the folder
    with run_lock(folder / "lock", Path("DIR")):
        (folder / "statistics").unlink()
    assert listing(tmp_path) == []
    folder.mkdir()
    with run_lock(folder / "lock", Path("DIR")):
        pass
    assert listing(tmp_path) == ["out.resume"]  # a user's


def test_a_folder_that_no_run_made_is_left_alone(tmp_path: Path) -> None:
    lock_file = lock_file_of(tmp_path / "out")
    refuse_foreign(lock_file)
    lock_file.parent.mkdir()
    refuse_foreign(lock_file)
    for name in ("training", "weights"):
        (lock_file.parent / name).mkdir()
    for refuse in (refuse_foreign, enter_lock):
        with pytest.raises(RequestError) as error:
            refuse(lock_file)
        assert str(error.value) == (
            f"{tmp_path}/out.resume, where runs keep what --resume goes on with, was not made by compress: it holds "
            "training and no compress.lock; move it away or choose another output folder."
        )
    assert listing(lock_file.parent) == ["training", "weights"]
    lock_file.touch()
    refuse_foreign(lock_file)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out.resume").touch()
    for refuse in (refuse_foreign, enter_lock):
        with pytest.raises(RequestError, match=r"out.resume is a file, and runs keep there what --resume goes on with"):
            refuse(lock_file_of(tmp_path / "out"))


def enter_lock(lock_file: Path) -> None:
    with run_lock(lock_file, Path("DIR")):
        pass


def test_the_resume_folder_may_be_removed_inside(tmp_path: Path) -> None:
    with run_lock(tmp_path / "out.resume" / "lock", Path("DIR")):
        (tmp_path / "out.resume" / "lock").unlink()
        (tmp_path / "out.resume").rmdir()
    assert listing(tmp_path) == []


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A data loader's workers share the open file with the process that forked them."""
    code = """
import os, sys, time
from pathlib import Path
from compressor.export.locks import run_lock
with run_lock(Path(sys.argv[1]), Path("DIR")):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        try:
            with run_lock(tmp_path / "lock", Path("DIR")):
                pass
        finally:
            parent.kill()
            os.kill(worker, 9)


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match=r"cannot write .*lock"), run_lock(tmp_path / "lock", Path("DIR")):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_on_a_removed_file_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before ends, and removes its file, between this run's opening and locking of it."""
    lock_file = tmp_path / "resume" / "lock"
    flock = fcntl.flock
    removals = [lock_file]

    def flock_too_late(descriptor: int, operation: int) -> None:
        if removals:
            removals.pop().unlink()
            lock_file.parent.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_too_late)
    with run_lock(lock_file, Path("DIR")):
        assert removals == []
        assert lock_file.read_text() == str(os.getpid())
        with pytest.raises(RequestError, match="another run"), run_lock(lock_file, Path("DIR")):
            pass


def test_a_file_system_without_locks_shuts_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = errno.ENOSYS

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with run_lock(tmp_path / "lock", Path("DIR")):
        pass
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output error"), run_lock(tmp_path / "lock", Path("DIR")):
        pass
