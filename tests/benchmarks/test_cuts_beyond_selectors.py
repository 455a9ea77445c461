"""Cuts to widths of each layer, measured on the bundled model and not measured again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import allocation
from compressor.demo import demo_model_path, held_out_text_path


@pytest.mark.slow
def test_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = held_out_text_path().read_text(encoding="utf-8")[:3000]
    for name in ("prose", "docs", "code"):
        (tmp_path / f"test_{name}.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "allocation.json"
    command = ["allocation", "--models", str(demo_model_path().parent), "--text", str(tmp_path)]
    command += ["--output", str(output), "--samples", "4", "--held-out", "1", "--window", "240", "--device", "cpu"]

    def rows(*more: str) -> list[dict[str, object]]:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        allocation.main()
        found: list[dict[str, object]] = json.loads(output.read_text())["rows"]
        return found

    first = rows("--ratios", "0.5", "--step", "16")
    assert [(row["method"], row["widths_by"]) for row in first] == list(allocation.CUTS)
    for row in first:
        widths = row["widths"]
        if not isinstance(widths, list):
            pytest.fail("widths are a list")
        assert sum(widths) <= 4 * 32
        assert (widths == [32] * 4) == (row["widths_by"] == "uniform")
    assert rows("--ratios", "0.5", "--step", "16") == first
    assert capsys.readouterr().out.count("method=") == len(first)
    with pytest.raises(SystemExit):
        rows("--ratios", "0.4", "--step", "16")
    assert "error: --ratios 0.4 keeps no multiple of --step 16 of 64" in capsys.readouterr().err
