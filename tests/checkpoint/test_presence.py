"""What stands in place of a folder or a file is said by what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compressor.checkpoint.presence import is_there, lost_link, no_folder
from compressor.cli import main


@pytest.fixture
def places(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for link, target in (("circle", "circle"), ("lost", "nowhere"), ("below a file", "file/x"), ("found", "file")):
        (tmp_path / link).symlink_to(target)
    return tmp_path


def test_places_of_folders(places: Path) -> None:
    assert no_folder(places / "folder") is None
    assert no_folder(places / "absent") == f"there is no folder {places}/absent"
    assert no_folder(places / "pipe") == f"{places}/pipe is a pipe"
    assert no_folder(places / "file") == f"{places}/file is a file"
    assert no_folder(places / "found") == f"{places}/found is a file"
    assert no_folder(places / "lost") == f"{places}/lost links to nowhere, which does not exist"
    assert no_folder(places / "circle") == f"{places}/circle links to circle, and so on in a circle"


def test_places_of_files(places: Path) -> None:
    assert [is_there(places / name) for name in ("file", "found", "absent")] == [True, True, False]
    assert lost_link(places / "found") is lost_link(places / "file") is lost_link("a\0b") is None
    assert lost_link(places / "below a file") == "links to file/x, which does not exist"


@pytest.mark.parametrize("verb", ["recover", "verify", "push"])
def test_verbs_that_take_a_folder(verb: str, places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, fragment in (("circle", "and so on in a circle; give"), ("file", "is a file; give")):
        assert main([verb, str(places / name), *(["owner/name"] * (verb == "push"))]) == 2
        assert f"error: {places}/{name} " in (error := capsys.readouterr().err)
        assert fragment in error
