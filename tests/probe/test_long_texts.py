"""Texts of many segments: progress while one is read, and the loss by position on the page."""

from __future__ import annotations

import re
from pathlib import Path

from compressor.probe.segments import read_in_segments
from tests.families import tiny_checkpoint, tiny_tokens
from tests.probe.test_command import SHORT, probe, source, text_file


def test_every_segment_is_reported(tmp_path: Path) -> None:
    """As it is done, without padding; the token that only ends a text comes with the last."""
    tiny = tiny_checkpoint("gated_deltanet", tmp_path)
    reported: list[int] = []
    sequences = [tiny_tokens(length, length) for length in (193, 130, 64)]
    read_in_segments(tiny.model, sequences, 64, 2, lambda boundary: None, reported.append)
    # 193 and 130 tokens share a batch of three segments; 64 tokens are one.
    assert [count for count in reported if count] == [128, 128, 66, 1, 64]


def test_loss_by_position_stands_on_the_page(tmp_path: Path) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    other = source("gated_deltanet", tmp_path / "other", seed=1)
    options = [*SHORT, "--text", str(text), "--no-truncation"]
    alone = probe(model, tmp_path / "alone", *options)
    rows = _rows(tmp_path / "alone")
    buckets = alone["model"]["loss"]["by_position"]
    assert [row[0] for row in rows] == ["1 to 63", "64 to 127", "128 to 255"]
    assert [row[1:] for row in rows] == [
        [f"{value:.4g}" for value in (bucket["loss"]["mean"], bucket["loss"]["standard_error"])] for bucket in buckets
    ]
    both = probe(model, tmp_path / "both", *options, "--baseline", str(other))
    losses = [both["baseline"]["loss"], both["model"]["loss"], both["loss_difference"]]
    for place, row in enumerate(_rows(tmp_path / "both")):
        means = [each["by_position"][place]["loss"]["mean"] for each in losses]
        assert row[1:4] == [f"{value:.4g}" for value in means]
        assert abs(means[1] - means[0] - means[2]) < 1e-6


def test_a_search_says_that_it_left_the_text_out(tmp_path: Path) -> None:
    model, text = source("gated_deltanet", tmp_path / "model"), text_file(tmp_path)
    options = ["--every", "64", "--length", "64", "--documents", "1", "--text", str(text), "--no-truncation"]
    asked = ["--tasks", "recall", "--task-length", "512", "--samples", "1", "--search-rank", "1", "--device", "cpu"]
    result = probe(model, tmp_path / "out", *options, *asked)
    assert [search["name"] for search in result["searches"]] == ["recall"]
    assert result["notes"] == ["text is not cut: no document goes beyond its first segment (--every 64)"]


def _rows(folder: Path) -> list[list[str]]:
    page = (folder / "report.html").read_text(encoding="utf-8")
    table = page[page.index("Loss by position in the text") :]
    rows = re.findall("<tr>(<td>.*?)</tr>", table[: table.index("</table>")])
    return [re.findall("<td>(.*?)</td>", row) for row in rows]
