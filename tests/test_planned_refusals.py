"""What a run would only have met after its calibration, refused when it is planned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compressor.cli import main
from tests.test_pipeline import FAST, compress, make_source, make_text

ALONE = ["--no-refit", "--calibration-samples", "1", "--retrieval-share", "0"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source("gated_deltanet", tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize("asked", [["--norm-epsilon", "auto"], ["--method", "auto"]])
def test_one_sample_for_a_comparison(
    asked: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = make_text(tmp_path)
    for further in ([], ["--dry-run"]):
        assert compress(source, tmp_path / "out", text, *asked, *ALONE, *further) == 2
        assert f"{' '.join(asked)} compares several cuts and --calibration-samples 1" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt"}
    sweep = ["sweep", str(source), "--output-dir", str(tmp_path / "sweep"), "--calibration", str(text), *FAST]
    assert main([*sweep, "--ratios", "0.5", "--methods", "drrqr", "--norm-epsilon", "auto", *ALONE]) == 2
    assert "compares several cuts" in capsys.readouterr().err


def test_a_loop_among_the_companions(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model" / "notes.txt").symlink_to("notes.txt")
    assert compress(tmp_path / "model", tmp_path / "out", make_text(tmp_path), "--dry-run") == 2
    assert "notes.txt is a link to notes.txt, which leads to no file" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compress(source, Path("/proc/nowhere/out"), make_text(tmp_path)) == 2
    assert "error: the folder /proc/nowhere cannot be made (" in capsys.readouterr().err
