"""What a probe says of figures that it has not, and what its page explains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compressor.probe.terms import CONDITION_BOUND, TERMS
from tests.probe.test_command import SHORT, probe, source, text_file


def test_one_document_has_no_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    options = ["--every", "64", "--length", "200", "--documents", "1", "--ranks", "1", "--no-tasks", "--device", "cpu"]
    result = probe(model, tmp_path / "out", *options, "--text", str(text))
    assert "documents of 192 tokens instead of 200: whole segments of 64" in result["notes"]
    rise = result["truncation"]["text"][1]["difference"]["all"]
    assert rise["standard_error"] is None
    printed = capsys.readouterr().out
    assert f"rank 1: loss {rise['mean']:+.4f} nats a token (of one sequence: no standard error)" in printed
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "+-" not in printed + page


def test_a_segment_of_one_token(tmp_path: Path) -> None:
    """The last token is not read, so two tokens have one state and nothing to cut; three have one cut."""
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    options = ["--every", "1", "--documents", "2", "--no-tasks", "--device", "cpu", "--text", str(text)]
    result = probe(model, tmp_path / "two", *options, "--length", "2")
    assert result["model"]["states"]["tokens"] == [1]
    assert result["truncation"] is None
    assert result["notes"] == ["text is not cut: no document goes beyond its first segment (--every 1)"]
    result = probe(model, tmp_path / "three", *options, "--length", "3", "--ranks", "1")
    assert result["model"]["states"]["tokens"] == [1, 2]
    assert [cut["rank"] for cut in result["truncation"]["text"]] == [None, 1]


def test_same_weights_are_said(tmp_path: Path) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    options = [*SHORT, "--text", str(text), "--no-truncation", "--baseline", str(model)]
    result = probe(model, tmp_path / "out", *options)
    assert "the model and its baseline have the same weights" in result["notes"]
    assert result["loss_difference"]["all"]["mean"] == 0


def test_two_segments_have_no_windowed_figures(tmp_path: Path) -> None:
    """They would equal the others, as the first lies inside the window."""
    model, text = source("q35", tmp_path / "model"), text_file(tmp_path)
    options = [*SHORT, "--length", "128", "--text", str(text), "--ranks", "1", "--no-tasks"]
    result = probe(model, tmp_path / "out", *options)
    assert result["windowed"] is None
    assert any("no windowed figures of text: two segments of 64 tokens" in note for note in result["notes"])


def test_the_page_shows_what_was_used(tmp_path: Path) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    probe(model, tmp_path / "out", *SHORT, "--text", str(text), "--no-truncation")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    settings = page[page.index("Settings") :]
    assert f"<td>model</td><td>{model}, weights " in settings
    assert "<td>document lengths</td><td>3 x 256</td>" in settings
    assert "<td>truncation</td><td>no</td>" in settings
    for unused in ("ranks", "tasks", "task length", "samples", "search rank", "baseline", "None", "[]"):
        assert f">{unused}<" not in settings


def test_the_page_explains_its_words(tmp_path: Path) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    probe(model, tmp_path / "out", *SHORT, "--text", str(text), "--ranks", "1", "--no-tasks")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    explained = set(re.findall("<dt>(.*?)</dt><dd>.{20,}?</dd>", page))
    assert explained == set(TERMS)
    columns = set(re.findall('<th scope="col">(.*?)</th>', page))
    used = {"horizon", "mean key", "keys in horizon", "decayed keys", "states by SVD", "condition number"}
    assert used <= columns & explained
    assert CONDITION_BOUND in columns
    assert "(u)" not in page
