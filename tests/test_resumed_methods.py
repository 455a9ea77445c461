"""Interrupted runs that go on with another method: the sums that it reads are taken, or made anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressor.artifacts import CalibrationProgress, ProgressFile
from tests.test_interruption import file_size_limit
from tests.test_pipeline import compress, hashes, make_source, make_text
from tests.test_sweep import QUICK


@pytest.mark.parametrize(
    ("first", "second", "fragment"),
    [
        ("drrqr", ["--method", "l1"], "resuming after 1 of 1 calibration batches"),
        ("energy", ["--method", "drrqr"], "resuming after 1 of 1 calibration batches"),
        (
            "drrqr",
            ["--method", "energy"],
            "holds no energy of the channels, which this run sums too: calibrating again",
        ),
        (
            "drrqr",
            ["--method", "s-wanda", "--save-statistics", "FILE"],
            "holds no energy and no wanda of the channels, which this run sums too: calibrating again",
        ),
    ],
)
def test_an_interrupted_run_goes_on_with_another_method(
    first: str, second: list[str], fragment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, text, output = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path), tmp_path / "out"
    with file_size_limit(40_000):
        assert compress(source, output, text, *QUICK, "--method", first) == 1
    words = [str(tmp_path / "saved.safetensors") if word == "FILE" else word for word in second]
    assert compress(source, output, text, *QUICK, *words, "--resume") == 0
    said = capsys.readouterr().out
    assert fragment in said
    assert "hash differs" not in said
    assert compress(source, tmp_path / "whole", text, *QUICK, *second[:2]) == 0
    resumed, whole = hashes(output), hashes(tmp_path / "whole")
    assert all(resumed[name] == whole[name] for name in ("model.safetensors", "selection.json"))


def test_an_interrupted_run_in_low_memory_goes_on_with_another_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of the layers that are done, beside those of the others: energies of some would be of none."""
    source, text, output = make_source("q35", tmp_path / "source"), make_text(tmp_path), tmp_path / "out"
    words, save = [*QUICK, "--low-memory"], ProgressFile.save

    def stop_behind_the_second_layer(file: ProgressFile, progress: CalibrationProgress) -> None:
        save(file, progress)
        if progress.batches == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ProgressFile, "save", stop_behind_the_second_layer)
        assert compress(source, output, text, *words, "--method", "energy") == 130
    assert compress(source, output, text, *words, "--resume") == 0
    assert "resuming after 2 of 3 layers" in capsys.readouterr().out
    assert compress(source, tmp_path / "whole", text, *words) == 0
    assert hashes(output)["selection.json"] == hashes(tmp_path / "whole")["selection.json"]
