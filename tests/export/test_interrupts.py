"""Real signals to real processes: while they stage, between the renames, and during the clean-up."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.export.folder import OutputFolder

ROOT = Path(__file__).resolve().parents[2]


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


STAGE = """
import shutil, signal, sys, time
from pathlib import Path
from compressor.export.folder import OutputFolder
{before}
with OutputFolder(Path(sys.argv[1]), True).staged() as folder:
    (folder / "config.json").write_text('{{"model_type": "x"}}')
    (folder / "version").write_text("new")
    print("staged", flush=True)
    {inside}
print("done", flush=True)
"""
KILL_AT_RENAME = """
import os
rename, count = Path.rename, 0
def rename_and_die(path, target):
    global count
    if count == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    count += 1
    result = rename(path, target)
    if {removing} and count == 3:
        (target / "version").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return result
Path.rename = rename_and_die
"""
SLOW_CLEAN_UP = """
rmtree = shutil.rmtree
def slow(*arguments, **options):
    print("cleaning", flush=True)
    time.sleep(0.5)
    rmtree(*arguments, **options)
shutil.rmtree = slow
"""


def stage(output: Path, before: str = "", inside: str = "time.sleep(60)") -> subprocess.Popen[str]:
    code = STAGE.format(before=before, inside=inside)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(output)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )


def as_in_a_terminal() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, `nohup` SIGHUP, and children inherit that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    output = tmp_path / "out"
    output.mkdir()
    (output / "compression.json").touch()
    (output / "version").write_text("old")
    return output


def version(output: Path) -> str:
    return (output / "version").read_text()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP), (signal.SIGINT, -signal.SIGINT)],
)
def test_a_signal_leaves_what_was_there(tmp_path: Path, old: Path, number: signal.Signals, code: int) -> None:
    for output, names in ((old, ["out"]), (tmp_path / "a" / "new", ["out"])):
        with stage(output) as child:
            assert line(child) == "staged"
            child.send_signal(number)
            child.communicate(timeout=20)
        assert child.returncode == code
        assert listing(tmp_path) == names
    assert version(old) == "old"


def test_a_handler_of_the_caller_is_kept(tmp_path: Path) -> None:
    before = "seen = []; signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))"
    inside = "while not seen: time.sleep(0.01)\n    print('mine', flush=True)"
    with stage(tmp_path / "out", before, inside) as child:
        assert line(child) == "staged"
        child.send_signal(signal.SIGTERM)
        assert line(child) == "mine"
        assert line(child) == "done"
    assert listing(tmp_path) == ["out"]


def test_a_hang_up_that_nohup_has_ignored_ends_nothing(tmp_path: Path, old: Path) -> None:
    before = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with stage(old, before, "signal.raise_signal(signal.SIGHUP)") as child:
        assert [line(child), line(child)] == ["staged", "done"]
    assert child.returncode == 0
    assert listing(tmp_path) == ["out"]
    assert version(old) == "new"


def test_the_default_is_back_afterwards(tmp_path: Path) -> None:
    code = STAGE.format(before="", inside="") + "\ntime.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert [line(child), line(child)] == ["staged", "done"]
        child.terminate()
        assert child.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_cut_the_clean_up_short(tmp_path: Path, number: signal.Signals) -> None:
    with stage(tmp_path / "out", SLOW_CLEAN_UP) as child:
        assert line(child) == "staged"
        child.send_signal(signal.SIGINT)
        assert line(child) == "cleaning"
        child.send_signal(number)
        child.communicate(timeout=20)
    assert child.returncode == -signal.SIGINT
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "removing", "left", "after"),
    [
        (0, False, "old", "old"),  # before the old folder is put aside
        (1, False, None, "old"),  # between the two renames
        (2, False, "new", "new"),  # after both
        (9, True, "new", "new"),  # while the old folder is being removed
    ],
)
def test_a_kill_around_the_renames(
    tmp_path: Path, old: Path, number: int, removing: bool, left: str | None, after: str
) -> None:
    with stage(old, KILL_AT_RENAME.format(number=number, removing=removing), "") as child:
        assert line(child) == "staged"
        child.communicate(timeout=20)
    assert child.returncode == -signal.SIGKILL
    if left is None:
        assert {version(path) for path in tmp_path.iterdir()} == {"old", "new"}
    else:
        assert version(old) == left
    with OutputFolder(old, True).lock():
        assert listing(tmp_path) == ["out", "out.resume"]
        assert version(old) == after


def test_a_kill_while_staging_is_cleaned_by_the_next_run(tmp_path: Path, old: Path) -> None:
    with stage(old) as child:
        assert line(child) == "staged"
        child.kill()
        child.communicate(timeout=20)
    assert listing(tmp_path) == [f".out.partial-{child.pid}", "out"]
    with OutputFolder(old, True).lock():
        pass
    assert listing(tmp_path) == ["out"]
    assert version(old) == "old"
