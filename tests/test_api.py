"""The same from Python: `compressor.compress(recipe) -> Report`."""

from __future__ import annotations

from pathlib import Path

import pytest

import compressor
from compressor import Recipe, RequestError, RunOptions, compress, inspect_model, verify
from compressor.report import Report
from tests.test_pipeline import make_source, make_text


def recipe(source: Path, output: Path, text: Path) -> Recipe:
    return Recipe.from_settings(
        {
            "model": str(source),
            "output_dir": str(output),
            "selection": {"ratio": 0.5, "round_to": 1},
            "calibration": {"source": str(text), "samples": 6, "sequence_length": 80},
            "runtime": {"device": "cpu"},
            "export": {"verify": False},
        }
    )


def test_compress_returns_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, text = make_source("delta_net", tmp_path / "source"), tmp_path / "out", make_text(tmp_path)
    capsys.readouterr()
    report = compress(recipe(source, output, text))
    assert isinstance(report, Report)
    assert (report.key_dim.before, report.key_dim.after, report.output_dir) == (16, 8, str(output))
    assert report.evaluation is not None
    assert report.evaluation.after.kl_text is not None
    assert report.evaluation.after.kl_text > 0
    assert 0 < report.worst_rho <= 1.5
    assert report.verification is None
    assert capsys.readouterr() == ("", ""), "nothing is printed without a console"
    assert verify(output, device="cpu").passed
    with pytest.raises(RequestError, match="--overwrite"):
        compress(recipe(source, output, text))
    assert compress(recipe(source, output, text), RunOptions(overwrite=True)) is not report


def test_inspect_gives_numbers() -> None:
    inspection = inspect_model(None)
    assert (inspection.model, len(inspection.layers), inspection.state_bytes_per_sequence) == ("gdn-tiny", 4, 196608)
    assert inspection.widths[0].keep == 64


def test_names_of_the_package() -> None:
    for name in compressor.__all__:
        assert getattr(compressor, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'prune'"):
        compressor.prune  # noqa: B018
