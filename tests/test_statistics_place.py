"""Where statistics may be saved: no file but statistics is replaced, and nothing beside the output is removed."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from compressor.cli import main
from compressor.errors import RequestError
from compressor.export.locks import LOCK_NAME
from compressor.statistics_place import refuse_little_room, refuse_place
from tests.test_pipeline import compress, hashes, make_source, make_text
from tests.test_sweep import QUICK


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("gated_deltanet", tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize(
    ("place", "fragment"),
    [
        ("out/statistics.safetensors", "lies in the output folder"),
        ("nowhere/statistics.safetensors", "there is no folder"),
        (".", "is a folder; name a file"),
        ("notes.txt", "exists; give --overwrite"),
        ("out.resume/statistics.safetensors", "lies in the folder that --resume goes on with"),
        ("text.txt", "is a text that this run reads; name another file."),
        ("pipe", "is a device or a pipe, not a file; name a file."),
    ],
)
def test_places_for_statistics_that_are_refused(
    place: str, fragment: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "notes.txt").write_text("mine")
    overwrite = ["--overwrite"] * (place == "pipe")
    words = ["--save-statistics", str(tmp_path / place), *overwrite, *QUICK]
    assert compress(source, tmp_path / "out", make_text(tmp_path), *words) == 2
    assert fragment in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "fragment"),
    [
        ("adapter/new", "lies in the output folder .*/adapter, beside"),
        ("adapter.resume/new", "lies in the folder that --resume goes on with"),
        ("texts/deeper/new", "lies in .*/texts, a folder of texts that this run reads"),
        ("model/deeper/new", "lies in the model's folder"),
        ("model/link", "lies in the model's folder"),
        ("model/deeper/link", "lies in the model's folder"),
        ("link to the model/deeper/link", "lies in the model's folder"),
    ],
)
def test_folders_of_the_run_are_no_place(place: str, fragment: str, tmp_path: Path) -> None:
    """Nor are links there that lead to nothing: they would stay, and lead to statistics."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "model" / "deeper").mkdir(parents=True)
    for link in ("model/link", "model/deeper/link"):
        (tmp_path / link).symlink_to(tmp_path / "nothing")
    (tmp_path / "link to the model").symlink_to("model")
    outputs, texts = [tmp_path / "out", tmp_path / "adapter"], [tmp_path / "texts"]
    with pytest.raises(RequestError, match=fragment):
        refuse_place(tmp_path / place, outputs, tmp_path / "model", texts, overwrite=False)
    refuse_place(tmp_path / "new", outputs, tmp_path / "model", texts, overwrite=False)


@pytest.mark.parametrize(
    "words",
    [
        ["--statistics", ""],
        ["--save-statistics", " "],
        ["sweep", "--output-dir", "out", "--statistics", ""],
        ["sweep", "--output-dir", "out", "--save-statistics", ""],
        ["sweep", "--output-dir", ""],
        ["recover", "out", "--output-dir", ""],
        ["recover", ""],
    ],
    ids=" ".join,
)
def test_paths_without_a_word(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    name = words[-2] if words[-2].startswith("--") else "DIR"
    said = capsys.readouterr().err
    assert said == f'compress: error: {name} "{words[-1]}" is empty; name something, or leave it out.\n'


def test_a_place_without_room(tmp_path: Path) -> None:
    file = tmp_path / "statistics.safetensors"
    refuse_little_room(file, 1)
    sentence = (
        rf"^--save-statistics {file} needs 1000000\.00 TB and the file system of {tmp_path} has [0-9.]+ .B free; free "
        r"[0-9.]+ TB more, or name a file on another disk\.$"
    )
    with pytest.raises(RequestError, match=sentence):
        refuse_little_room(file, 10**18)


class RemovingOutput(io.StringIO):
    """Standard output of a run that takes `folder` away when it calibrates."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def write(self, text: str) -> int:
        if text.startswith("calibrating"):
            self._folder.rmdir()
        return super().write(text)


def test_a_place_that_is_gone_after_calibration_loses_no_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    words = [*QUICK, "--save-statistics", str(folder / "statistics.safetensors")]
    output = RemovingOutput(folder)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        assert compress(source, tmp_path / "out", make_text(tmp_path), *words) == 0
    said = [line for line in output.getvalue().splitlines() if "could not be written" in line]
    assert len(said) == 1
    assert said[0].startswith(f"note: --save-statistics {folder}/statistics.safetensors could not be written (")
    assert said[0].endswith(
        "the run goes on without it; to have the statistics, run again and name a file in a place with room."
    )
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_no_file_but_statistics_is_replaced(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, model = make_text(tmp_path), tmp_path / "model"
    model.symlink_to(source)
    weights, notes = hashes(source), tmp_path / "notes.txt"
    notes.write_text("mine")
    for place in (source / "model.safetensors", model / "model.safetensors", source / "new.safetensors"):
        words = ["--save-statistics", str(place), "--overwrite", *QUICK]
        assert compress(source, tmp_path / "out", text, *words) == 2
        assert "lies in the model's folder" in capsys.readouterr().err
    assert compress(source, tmp_path / "out", text, "--save-statistics", str(notes), "--overwrite", *QUICK) == 2
    assert "holds no statistics, and --overwrite replaces only those" in capsys.readouterr().err
    assert (hashes(source), notes.read_text()) == (weights, "mine")
    earlier = tmp_path / "earlier.safetensors"
    for overwrite in ([], ["--overwrite"]):
        assert compress(source, tmp_path / "out", text, "--save-statistics", str(earlier), *overwrite, *QUICK) == 0


def test_a_folder_of_the_users_beside_the_output_is_left(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is what another command goes on with removed: finished cuts of a sweep, checkpoints of a training."""
    mine, text = tmp_path / "out.resume", make_text(tmp_path)
    kept = ["calibration-notes.txt", "cuts/drrqr-8.json", "training/checkpoint-5"]
    for name in kept:
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
    for further in ([], ["--dry-run"]):
        assert compress(source, tmp_path / "out", text, *further, *QUICK) == 2
        assert f"{mine}, where runs keep what --resume goes on with, was not made by" in capsys.readouterr().err
    assert files_below(mine) == kept
    (mine / LOCK_NAME).touch()  # as an interrupted command leaves it
    saved = mine / "statistics.safetensors"
    assert compress(source, tmp_path / "out", text, "--save-statistics", str(saved), *QUICK) == 2
    assert "lies in the folder that --resume goes on with" in capsys.readouterr().err
    assert compress(source, tmp_path / "out", text, *QUICK) == 0
    assert files_below(mine) == sorted([*kept, LOCK_NAME])


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
