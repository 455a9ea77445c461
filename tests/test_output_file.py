"""A file of results is there as a whole or not at all, and what stands in its way is known before the work."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from compressor.errors import RequestError, RunError
from compressor.output_file import OutputFile
from tests.test_interruption import file_size_limit


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_once_and_replaced_on_request(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    OutputFile.checked(path, overwrite=False).write({"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    with pytest.raises(RequestError, match="exists; give --overwrite to replace it"):
        OutputFile.checked(path, overwrite=False)
    OutputFile.checked(path, overwrite=True).write({"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert listing(tmp_path) == ["result.json"]


def test_a_file_that_came_in_the_meantime_is_left(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    first, second = (OutputFile.checked(path, overwrite=False) for _ in range(2))
    first.write({"a": 1})
    with pytest.raises(RunError, match=r"result\.json was written by something else in the meantime"):
        second.write({"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert listing(tmp_path) == ["result.json"]


def test_a_new_file_has_the_users_usual_mode(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    OutputFile.checked(tmp_path / "result.json", overwrite=False).write({})
    assert (tmp_path / "result.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(exists: bool, tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "target.json", tmp_path / "link.json"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    link.symlink_to(target)
    OutputFile.checked(link, overwrite=exists).write({"new": True})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"new": True}


def test_what_is_there_and_is_no_file(tmp_path: Path) -> None:
    pipe, other_end = os.pipe()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path, message in (
        (tmp_path / "pipe", "is a device or a pipe"),
        (tmp_path / "link", "is a device or a pipe"),
        (tmp_path, "is a folder"),
        (Path(f"/proc/self/fd/{pipe}"), "is a device or a pipe"),
        (tmp_path / "absent" / "a.json", "there is no folder"),
        (tmp_path / ("n" * 300), "cannot be written"),
        (Path("/proc/result.json"), "cannot be written"),
    ):
        with pytest.raises(RequestError, match=message):
            OutputFile.checked(path, overwrite=True)
    assert listing(tmp_path) == ["link", "pipe"]
    os.close(pipe)
    os.close(other_end)


@pytest.mark.parametrize(
    ("content", "message"),
    [({"a": "x" * 50_000}, "could not be written"), ({"a": float("inf")}, "a figure is infinite or NaN")],
)
def test_a_failure_leaves_what_was_there(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    output = OutputFile.checked(path, overwrite=True)
    with file_size_limit(20_000), pytest.raises(RunError, match=message) as error:
        output.write(content)
    assert "--resume" not in str(error.value)
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["result.json"]


def test_two_runs_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "result.json.partial").write_text("another's")
        OutputFile.checked(tmp_path / "result.json", overwrite=True).write({})
    assert (tmp_path / "result.json.partial").read_text() == "another's"
