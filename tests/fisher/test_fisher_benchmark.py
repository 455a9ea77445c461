"""The Fisher benchmark writes a cell a method, and measures none twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.fisher import main
from compressor.demo import held_out_text_path


def test_benchmark_writes_its_cells_once(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = held_out_text_path().read_text(encoding="utf-8")[:3000]
    for name in ("prose", "docs", "code"):
        (tmp_path / f"test_{name}.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "fisher.json"
    command = ["fisher", "--models", str(demo_model), "--text", str(tmp_path), "--output", str(output)]
    command += ["--ratios", "0.5", "--epsilons", "keep", "--samples", "2", "--held-out", "1", "--window", "240"]

    def run(*more: str) -> None:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        main()

    run("--variants", "stages-2")
    cells = json.loads(output.read_text())["cells"]
    assert [cell["method"] for cell in cells] == ["drrqr", "stages-2"]
    assert all(cell["key_dim"] == 32 and cell["kl_prompts"] > 0 for cell in cells)
    assert [step["width"] for step in cells[1]["steps"]] == [45, 32]
    assert cells[1]["cost"]["passes"] == 12.0

    run("--variants", "stages-2", "drrqr-measured")
    more = json.loads(output.read_text())["cells"]
    assert more[:2] == cells
    assert [cell["method"] for cell in more] == ["drrqr", "stages-2", "drrqr-measured"]

    with pytest.raises(SystemExit) as exit_:
        run("--seed", "1")
    assert exit_.value.code == 2
    assert "was measured with another seed; name another --output" in capsys.readouterr().err
