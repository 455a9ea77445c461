"""The benchmark of cutting states writes what it measured, set by set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.state_truncation import main


def test_made_up_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    words = ["--states", "6", "--width", "64", "--rank", "2", "--repetitions", "2", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["state_truncation", *words, "--profile"])
    main()
    results = json.loads(output.read_text())["results"]
    assert [(result["name"], result["shape"]) for result in results] == [
        (name, [6, 64, 64]) for name in ("1/i", "0.9^i", "flat")
    ]
    assert [result["by_svd"] for result in results] == [0, 0, 6]
    for result in results:
        assert len(result["warm_s"]["all"]) == len(result["cold_s"]["all"]) == 2
        assert result["ratio"] == pytest.approx(result["svd_s"]["median"] / result["warm_s"]["median"])
        assert abs(result["energy_missed"]) <= 1e-5
        assert result["bars"]["energy"]
        assert any("matmul" in kernel["name"] or "bmm" in kernel["name"] for kernel in result["kernels"])
    assert "energy missed" in capsys.readouterr().out
