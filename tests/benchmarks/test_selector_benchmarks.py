"""The benchmarks of selection methods and of calibration run on the bundled model, and go on where they stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cuts import as_hexadecimal, overlap
from benchmarks.resumable import Rows
from compressor.demo import calibration_text_path, demo_model_path
from compressor.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--texts", "prose", "--tasks", "niah_single_1", "--prompts", "2", "--length", "300", "--windows", "2"]
SMALL += ["--window", "256", "--device", "cpu"]


def test_channels_as_numbers_overlap_as_sets_do() -> None:
    first, second = torch.tensor([[0, 1, 5], [2, 3, 4]]), torch.tensor([[0, 5, 7], [0, 1, 9]])
    numbers = as_hexadecimal(first, 10)
    assert numbers == ["023", "01c"]
    assert overlap(numbers, as_hexadecimal(second, 10)) == [2 / 3, 0.0]
    assert overlap(numbers, numbers) == [1.0, 1.0]


def test_rows_are_written_after_each_and_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = Rows(path, {"seed": 0}, ("name",))
    rows.load()
    assert rows.measure({"name": "a"}, lambda: {"value": 1})["value"] == 1
    again = Rows(path, {"seed": 0}, ("name",))
    again.load()
    assert again.missing([{"name": "a"}, {"name": "b"}]) == [{"name": "b"}]
    assert again.measure({"name": "a"}, lambda: {"value": 2})["value"] == 1
    again.measure({"name": "b"}, lambda: {"value": 2})
    assert [row["value"] for row in json.loads(path.read_text())["rows"]] == [1, 2]


def test_rows_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    Rows(path, {"seed": 0, "samples": 4}, ("name",)).measure({"name": "a"}, dict)
    with pytest.raises(RequestError, match="was measured with another samples; name another --output"):
        Rows(path, {"seed": 0, "samples": 8}, ("name",)).load()


def run(tmp_path: Path, module: str, words: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """The rows that were written, and what was printed."""
    text = tmp_path / "test_prose.txt"
    text.write_text(calibration_text_path().read_text(encoding="utf-8")[:6000], encoding="utf-8")
    output, figure = tmp_path / "rows.json", tmp_path / "figure.png"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--models", str(demo_model_path().parent)]
    command += ["--text", str(tmp_path), *SMALL, "--output", str(output), "--figure", str(figure), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert figure.stat().st_size > 0
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    return rows, done.stdout


@pytest.mark.slow
def test_selectors(tmp_path: Path) -> None:
    words = ["--samples", "8", "--ratios", "0.5", "--scorings", "qk", "q", "--norm-epsilon", "keep", "scaled"]
    words += ["--heads-figure", str(tmp_path / "heads.png")]
    rows, _ = run(tmp_path, "selectors", [*words, "--methods", "gradient"])
    assert [(row["method"], row["scoring"], row["norm_epsilon"]) for row in rows] == [
        ("dense", "qk", "keep"),
        *(("gradient", scoring, epsilon) for scoring in ("qk", "q") for epsilon in ("keep", "scaled")),
    ]
    dense, kept, scaled = rows[0], rows[1], rows[2]
    assert dense["kl_text"] == 0
    assert 0 < scaled["kl_text"] < kept["kl_text"]
    assert kept["heads"]["kept"] == scaled["heads"]["kept"] != rows[3]["heads"]["kept"]
    assert {len(values) for values in kept["heads"].values()} == {12}
    for row in rows[1:]:
        assert row["kl_held_out"][1] < row["kl_held_out"][0]
        assert row["after_refit"]["kl_text"] < row["kl_text"]
    more, printed = run(tmp_path, "selectors", [*words, "--methods", "gradient", "random"])
    assert more[:5] == rows
    assert [row["method"] for row in more[5:]] == ["random", "random"]
    assert more[5]["kl_text"] > kept["kl_text"]
    assert (tmp_path / "heads.png").stat().st_size > 0
    assert printed.count("method=") == 2
    assert f"| {kept['kl_text']:.3f} → {kept['after_refit']['kl_text']:.3f} |" in printed


@pytest.mark.slow
def test_a_cut_is_measured_alike_whatever_was_measured_before(tmp_path: Path) -> None:
    """What the cut before was refitted to is gone, and remembered answers of the original are its answers."""
    folders = [tmp_path / name for name in ("both", "alone")]
    found = []
    for folder, methods in zip(folders, (["energy", "l1"], ["l1"]), strict=True):
        folder.mkdir()
        words = ["--samples", "8", "--ratios", "0.5", "--scorings", "qk", "--methods", *methods]
        rows, _ = run(folder, "selectors", words)
        found.append({name: rows[-1][name] for name in rows[-1] if name != "seconds"})
    assert found[0]["method"] == "l1"
    assert found[0] == found[1]


@pytest.mark.slow
def test_calibration_robustness(tmp_path: Path) -> None:
    words = ["--sources", "demo=demo", "--samples", "2", "4", "--seeds", "0", "1", "--methods", "drrqr"]
    rows, printed = run(tmp_path, "calibration_robustness", words)
    assert len(rows) == 3 * 2 * 2
    assert {row["sequences"] for row in rows} == {2, 4}
    by_source = {source: [r["kept"] for r in rows if r["source"] == source] for source in ("demo", "mixture")}
    assert by_source["demo"] == by_source["mixture"]
    last = next(line for line in printed.splitlines() if line.split()[2:4] == ["prompts-half", "4"])
    of_seeds, reference = (float(word) for word in last.split()[-2:])
    assert 0.5 < of_seeds < 1
    assert reference == pytest.approx((1 + of_seeds) / 2, abs=1e-3)
