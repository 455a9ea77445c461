"""Every selection method through the command, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressor.cli import main
from tests.test_pipeline import compress, make_source, make_text

METHODS = ["energy", "s-wanda", "gradient", "l1", "drrqr"]
FAST = ["--no-verify", "--no-evaluate", "--no-refit"]


@pytest.mark.parametrize(
    "name",
    [
        "gated_deltanet", "q35",
        pytest.param("delta_net", marks=pytest.mark.slow),
        pytest.param("gated_deltaproduct", marks=pytest.mark.slow), pytest.param("qn", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_methods_and_scorings_choose_differently(name: str, tmp_path: Path) -> None:
    source, text = make_source(name, tmp_path / "source"), make_text(tmp_path)
    chosen = {}
    for method in METHODS:
        for scoring in ("qk", "k", "q") if method in ("gradient", "s-wanda") else ("qk",):
            output = tmp_path / f"{method}-{scoring}"
            assert compress(source, output, text, "--method", method, "--scoring", scoring, *FAST) == 0
            report = json.loads((output / "compression.json").read_text())
            assert (report["method"], report["scoring"]) == (method, scoring)
            assert ("gradients" in report["timings_s"]) == (method == "gradient")
            chosen[method, scoring] = (output / "selection.json").read_text()
    assert len(set(chosen.values())) == len(chosen) == 9


def test_gradient_is_the_same_twice(tmp_path: Path) -> None:
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    for name in ("first", "second"):
        assert compress(source, tmp_path / name, text, "--method", "gradient", *FAST) == 0
    first, second = ((tmp_path / name / "selection.json").read_text() for name in ("first", "second"))
    assert first == second


def test_scoring_for_random_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_source("gated_deltanet", tmp_path / "source")
    assert compress(source, tmp_path / "out", make_text(tmp_path), "--method", "random", "--scoring", "k") == 2
    assert "Scoring 'k' means nothing to the method random" in capsys.readouterr().err


def test_gradient_without_enough_memory_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A billion tokens at once: other methods only say that the text has fewer."""
    source, output = make_source("gated_deltanet", tmp_path / "source"), tmp_path / "out"
    many = ["--calibration-samples", "1000000", "--batch-size", "1000000", "--sequence-length", "2048"]
    words = [str(source), "--ratio", "0.5", "--round-to", "1", "--device", "cpu", "--output-dir", str(output)]
    words += ["--calibration", str(make_text(tmp_path)), *many, "--method", "gradient"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "the loss's gradient needs about" in error
    assert "for a backward pass over 2,048,000,000 tokens and cpu has" in error
    assert "GB free; lower --batch-size or --sequence-length, or choose a method without backward passes" in error
    assert not output.exists()
    assert not (tmp_path / "out.resume").exists()
