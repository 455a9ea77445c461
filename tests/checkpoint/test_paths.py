from __future__ import annotations

import os
from pathlib import Path

import pytest

from compressor.checkpoint.paths import refuse_output_inside_source
from compressor.errors import RequestError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "source"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def refusal(source: Path, output: Path) -> str:
    with pytest.raises(RequestError) as caught:
        refuse_output_inside_source(source, output)
    return str(caught.value)


def test_separate_folders_are_taken(tmp_path: Path, source: Path) -> None:
    refuse_output_inside_source(source, tmp_path / "models" / "source-small")
    refuse_output_inside_source(source, tmp_path / "new" / "output")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    refuse_output_inside_source(source, tmp_path / "link")


def test_the_source_itself_under_any_name(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "chain").symlink_to(tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    same = [source, source / ".." / "source", tmp_path / "link", tmp_path / "chain", Path("models/source")]
    for output in same:
        assert "the output folder is the source folder (after resolving links)" in refusal(source, output)
    assert "the output folder is the source folder" in refusal(tmp_path / "link", source)


def test_inside_the_source(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    for output in (source / "small", tmp_path / "link" / "deep" / "small"):
        message = refusal(source, output)
        assert "the output folder is inside the source folder (after resolving links)" in message
        assert f"give a folder outside {source}" in message


def test_around_the_source(tmp_path: Path, source: Path) -> None:
    for output in (source.parent, tmp_path):
        assert "is inside the output folder" in refusal(source, output)


def test_around_the_files_of_a_snapshot(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "a"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "0").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blobs / "0", snapshot))
    message = refusal(snapshot, blobs)
    assert f"{blobs / '0'} is in {blobs}" in message
    assert (blobs / "0").read_bytes() == b"weights"


def test_a_loop_of_links(tmp_path: Path, source: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "is a link that leads back to itself" in refusal(source, tmp_path / "loop")
