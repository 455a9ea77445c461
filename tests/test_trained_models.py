"""The main job on models that were really trained: the bundled one, and the larger ones beside the clone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compressor.cli import main

# Selection alone: the refit has tests of its own.
OPTIONS = ["--ratio", "0.5", "--device", "cpu", "--calibration", "demo", "--sequence-length", "512"]
OPTIONS += ["--retrieval-share", "0", "--no-refit"]


def run(model: list[str], output: Path, *options: str) -> dict[str, Any]:
    recipe = output.with_suffix(".yaml")
    recipe.write_text("evaluation: {tasks: [niah_single_1], samples: 2}\n")
    words = [
        *model,
        *OPTIONS,
        "--recipe",
        str(recipe),
        "--calibration-samples",
        "8",
        "--output-dir",
        str(output),
        *options,
    ]
    assert main(words) == 0
    return json.loads((output / "compression.json").read_text())


def check(model: list[str], folder: Path, scaled_helps: bool = True) -> None:
    """DRRQR is exact, certified and far better than chance; `scaled_helps` says whether the scaled epsilon is better
    on text."""
    report = run(model, folder / "drrqr")
    assert report["verification"]["oracle_relative_error"] < 1e-4
    assert report["verification"]["generation_error"] < 0.05
    assert max(rho for layer in report["layers"] for rho in layer["max_rho"]) <= 1.5
    assert not any(deficient for layer in report["layers"] for deficient in layer["rank_deficient"])
    chance = run(model, folder / "random", "--method", "random", "--no-verify")
    kl = {name: figures["kl_text"] for name, figures in report["evaluation"]["by_norm_epsilon"].items()}
    assert min(kl.values()) > 0
    assert max(kl.values()) < 0.3
    assert (kl["scaled"] < kl["keep"]) == scaled_helps
    assert kl["keep"] < 0.6 * chance["evaluation"]["after"]["kl_text"]
    before, after = (
        report["evaluation"][name]["texts"][0]["figures"]["token_perplexity"] for name in ("before", "after")
    )
    assert before < after < 60


def test_bundled_model(tmp_path: Path) -> None:
    check([], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn-28m", "deltanet-14m", "deltaproduct-14m", "qwen35-18m"])
def test_larger_models(name: str, shared_models: Path, tmp_path: Path) -> None:
    check([str(shared_models / name)], tmp_path, scaled_helps=name != "deltaproduct-14m")


def test_calibration_text_does_not_decide_alone(tmp_path: Path) -> None:
    """Two disjoint samples of the text agree on most channels: the choice is the model's."""
    for seed in ("1", "2"):
        words = ["--calibration-samples", "8", "--output-dir", str(tmp_path / seed), "--no-verify", "--no-evaluate"]
        assert main([*OPTIONS, *words, "--seed", seed]) == 0
    first, second = (json.loads((tmp_path / seed / "selection.json").read_text())["layers"] for seed in ("1", "2"))
    assert first != second
    heads = [(set(a), set(b)) for layer in first for a, b in zip(first[layer], second[layer], strict=True)]
    assert sum(len(a & b) for a, b in heads) / sum(len(a) for a, _ in heads) > 0.85
