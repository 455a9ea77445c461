from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from compressor.errors import RequestError, RunError
from compressor.export.folder import OutputFolder

DEAD = 2**22 + 1  # beyond the kernel's largest process id


def write_model(folder: Path, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "version").write_text(version)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_staged_takes_the_place_at_the_end(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "a" / "b" / "out", False)
    with output.staged() as folder:
        assert folder.parent == output.path.parent
        assert folder.name == f".out.partial-{os.getpid()}"
        assert not output.path.exists()
        write_model(folder, "new")
    assert listing(tmp_path / "a" / "b") == ["out"]
    assert (output.path / "version").read_text() == "new"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with OutputFolder(tmp_path / "out", False).staged() as folder:
        write_model(folder, "new")
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["config.json", "version"]


def test_overwrite_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    write_model(tmp_path / "out", "old")
    (tmp_path / "out" / "model-00002-of-00002.safetensors").touch()
    with OutputFolder(tmp_path / "out", True).staged() as folder:
        write_model(folder, "new")
        assert (tmp_path / "out" / "version").read_text() == "old"
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["config.json", "version"]
    assert (tmp_path / "out" / "version").read_text() == "new"


def test_a_link_stays_and_its_folder_is_written(tmp_path: Path) -> None:
    write_model(tmp_path / "disk" / "real", "old")
    (tmp_path / "link").symlink_to("disk/real")
    with OutputFolder(tmp_path / "link", True).staged() as folder:
        write_model(folder, "new")
    assert (tmp_path / "link").readlink() == Path("disk/real")
    assert (tmp_path / "disk" / "real" / "version").read_text() == "new"
    assert listing(tmp_path / "disk") == ["real"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, RunError])
@pytest.mark.parametrize("old", [False, True])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException], old: bool) -> None:
    if old:
        write_model(tmp_path / "out", "old")
    path = tmp_path / "out" if old else tmp_path / "made" / "on" / "the" / "way" / "out"
    raised = error("the reason")
    with pytest.raises(error) as caught, OutputFolder(path, old).staged() as folder:  # noqa: PT012
        write_model(folder, "new")
        raise raised
    assert caught.value is raised
    assert listing(tmp_path) == (["out"] if old else [])
    if old:
        assert (tmp_path / "out" / "version").read_text() == "old"


def test_staged_asks_before_it_writes(tmp_path: Path) -> None:
    write_model(tmp_path / "out", "old")
    with pytest.raises(RequestError, match="exists and is not empty"), OutputFolder(tmp_path / "out", False).staged():
        pass
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_place_that_was_taken_meanwhile_is_not_replaced(tmp_path: Path, overwrite: bool) -> None:
    output = OutputFolder(tmp_path / "out", overwrite)
    with pytest.raises(RunError, match="place changed during the run: "), output.staged() as folder:  # noqa: PT012
        write_model(folder, "new")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("precious")
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["thesis.tex"]


def test_a_failed_second_rename_brings_the_old_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "out", "old")
    rename = Path.rename

    def fail_on_partial(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise OSError(18, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_on_partial)
    partial = tmp_path / f".out.partial-{os.getpid()}"
    with pytest.raises(RunError) as error, OutputFolder(tmp_path / "out", True).staged() as folder:
        write_model(folder, "new")
    assert str(error.value) == (
        f"cannot rename {partial} to {tmp_path}/out (Invalid cross-device link); choose another output folder and run "
        "again with --resume."
    )
    assert listing(tmp_path) == ["out"]
    assert (tmp_path / "out" / "version").read_text() == "old"


def test_modes_follow_the_umask_and_links_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "blob").touch(mode=0o400)
    before = os.umask(0o022)
    try:
        with OutputFolder(tmp_path / "out", False).staged() as folder:
            for private in (folder, folder / "inside"):
                private.mkdir(mode=0o700, exist_ok=True)
                os.close(os.open(private / "private", os.O_CREAT, 0o600))
            folder.chmod(0o700)
            (folder / "link").symlink_to(tmp_path / "blob")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    out = tmp_path / "out"
    assert listing(out) == ["inside", "link", "private"]
    modes = {
        path: path.stat().st_mode & 0o7777 for path in (out, out / "inside", out / "private", out / "inside/private")
    }
    assert list(modes.values()) == [0o755, 0o755, 0o644, 0o644]
    assert (tmp_path / "blob").stat().st_mode & 0o777 == 0o400


def test_the_group_of_a_shared_folder_is_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    with OutputFolder(tmp_path / "out", False).staged() as folder:
        (folder / "inside").mkdir()
    assert (tmp_path / "out").stat().st_mode & 0o2000
    assert (tmp_path / "out" / "inside").stat().st_mode & 0o2000


def test_leftovers_of_dead_runs_are_removed_and_others_are_not(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "out", False)
    stale = [f".out.partial-{DEAD}", f".out.partial-{os.getpid()}", f".out.partial-{10**30}"]
    kept = [".out.partial-1", f".outer.partial-{DEAD}", f"out.partial-{DEAD}", f".out.partial-{DEAD}x", ".other"]
    for name in stale + kept:
        write_model(tmp_path / name, "half")
    output.check(None)
    assert listing(tmp_path) == sorted(stale + kept)
    with output.lock():
        assert listing(tmp_path) == sorted([*kept, "out.resume"])
        with output.staged() as folder:
            write_model(folder, "new")
    assert listing(tmp_path) == sorted([*kept, "out"])


def test_names_are_taken_literally(tmp_path: Path) -> None:
    write_model(tmp_path / f".aXb.partial-{DEAD}", "half")
    with OutputFolder(tmp_path / "a.b", False).lock():
        pass
    assert listing(tmp_path) == [f".aXb.partial-{DEAD}"]


def test_an_old_folder_left_aside_comes_back_and_is_then_in_the_way(tmp_path: Path) -> None:
    """Killed between the renames of --overwrite, then started again without it."""
    write_model(tmp_path / f".out.replaced-{DEAD}", "old")
    write_model(tmp_path / f".out.partial-{DEAD}", "new")
    output = OutputFolder(tmp_path / "out", False)
    with pytest.raises(RequestError, match="exists and is not empty"), output.lock():
        pass
    assert listing(tmp_path) == ["out"]
    assert (tmp_path / "out" / "version").read_text() == "old"


def test_the_same_process_cannot_stage_twice(tmp_path: Path) -> None:
    output = OutputFolder(tmp_path / "out", False)
    with output.staged() as folder:
        write_model(folder, "new")
        with pytest.raises(RunError, match=r"this process is writing .*out already"), output.staged():
            pass
        assert (folder / "version").read_text() == "new"
    assert listing(tmp_path) == ["out"]


def test_staging_in_another_thread(tmp_path: Path) -> None:
    """Signal handlers can be set in the main thread only."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with OutputFolder(tmp_path / "out", False).staged() as folder:
                write_model(folder, "new")
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert (tmp_path / "out" / "version").read_text() == "new"
