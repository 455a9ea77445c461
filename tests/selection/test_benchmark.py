"""The benchmark script runs, and every head it selects for is certified."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_benchmark_writes_its_figures(tmp_path: Path) -> None:
    output = tmp_path / "selection.json"
    command = [sys.executable, "-m", "benchmarks.selection", "--output", str(output)]
    command += ["--heads", "3", "--width", "16", "--ratio", "0.25", "--repetitions", "2", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 heads of 16, keep 12, 1 threads\n")
    report = json.loads(output.read_text())
    assert report["settings"]["keep"] == 12
    assert report["environment"].keys() >= {"cpu", "cores", "versions", "commit"}
    assert [result["certified"] for result in report["results"]] == [3] * 7
    assert all(len(result["seconds"]) == 2 for result in report["results"])
    methods = {result["method"]: result["seconds"] for result in report["methods"]}
    assert methods.keys() == {"drrqr", "l1", "energy", "s-wanda", "gradient", "random"}
    assert all(len(seconds) == 2 for seconds in methods.values())
    assert {result["name"]: result["rank_deficient"] for result in report["results"]}["rank width/4"] == 3
