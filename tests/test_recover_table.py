"""What `compress recover` shows and reports: the teacher, the student as it was, and as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from compressor.cli import main
from compressor.evaluation.result_files import read_models
from tests.test_pipeline import compress, make_source, make_text

SETTINGS = "sequences: 12, sequence_length: 64, batch_size: 2, rank: 2, retrieval_share: 0.0, learning_rate: 0.01"


def evaluation_of(folder: Path) -> dict[str, Any]:
    evaluation: dict[str, Any] = json.loads((folder / "compression.json").read_text(encoding="utf-8"))["evaluation"]
    return evaluation


def test_the_table_has_the_student_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, text = make_source("gated_deltanet", tmp_path / "source"), make_text(tmp_path)
    cut, out = tmp_path / "cut", tmp_path / "out"
    assert compress(source, cut, text, "--no-verify", "--no-evaluate") == 0
    settings = yaml.safe_load((cut / "recipe.yaml").read_text(encoding="utf-8"))
    settings["evaluation"] |= {"tasks": ["recall_2"], "lengths": [400], "samples": 2, "texts": [str(text)]}
    (cut / "recipe.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"recovery: {{{SETTINGS}}}\n", encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    words = ["recover", str(cut), "--recipe", str(recipe), "--output-dir", str(out), "--device", "cpu", "--no-verify"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    evaluation = evaluation_of(out)
    models = [evaluation[name] for name in ("before", "untrained", "after")]
    assert [model["model"] for model in models] == ["source", "cut", "out"]
    # An evaluation of its own finds the same of the folder as it was.
    assert main(["evaluate", str(cut), "--baseline", str(source), *evaluation_words(text, tmp_path)]) == 0
    own = read_models(tmp_path / "own.json")[1]
    assert models[1]["kl_text"] == pytest.approx(own.kl_text, rel=1e-5)
    assert models[1]["kl_text"] != pytest.approx(models[2]["kl_text"], rel=1e-3)
    (row,) = [line for line in shown.splitlines() if "KL to source a token, text" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:4] == ["0", *(f"{model['kl_text']:.4f}" for model in models[1:])]


def evaluation_words(text: Path, folder: Path) -> list[str]:
    words = ["--text", str(text), "--tasks", "recall_2", "--lengths", "400", "--samples", "2"]
    return [*words, "--device", "cpu", "--output", str(folder / "own.json")]
