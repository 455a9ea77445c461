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
    text = make_text(tmp_path)
    for further in ([], ["--dry-run"]):
        assert compress(source, Path("/proc/nowhere/out"), text, *further) == 2
        error = capsys.readouterr().err
        assert (
            "error: the folder /proc/nowhere/out cannot be made in /proc (No such file or directory); choose" in error
        )
    assert compress(source, tmp_path / "out", text, "--save-statistics", "/proc/x.safetensors", "--dry-run") == 2
    assert "/proc cannot be written to (No such file or directory); name another" in capsys.readouterr().err


def test_outputs_among_the_texts(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a run writes would be read by the next one, and --overwrite would remove what it reads."""
    texts, old = tmp_path / "texts", tmp_path / "old"
    texts.mkdir()
    text = make_text(texts)
    assert compress(source, texts / "out", texts, "--dry-run") == 2
    sentence = f"out is in {texts}, a folder of texts that this run reads; choose another."
    assert sentence in capsys.readouterr().err
    train = ["--recover", "--save-adapter", str(texts / "out"), "--dry-run"]
    assert compress(source, tmp_path / "out", texts, *train) == 2
    assert sentence in capsys.readouterr().err
    assert main(["probe", str(source), "--output", str(texts / "out"), "--text", str(texts), "--device", "cpu"]) == 2
    assert sentence in capsys.readouterr().err
    assert compress(source, texts / "out", text, "--dry-run") == 0
    assert compress(source, texts / "out", Path("n" * 300), "--dry-run") == 2
    assert "does not exist" in capsys.readouterr().err
    shutil.copytree(source, old)
    assert compress(source, old, make_text(old), "--overwrite", "--dry-run") == 2
    assert f"the output folder {old} holds {old}/text.txt, which this run reads" in capsys.readouterr().err
