"""What the study says of its methods, on trained models: KL to the original on text, half the channels kept."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.cuts import (
    add_measuring_options,
    by_layer,
    collect_statistics,
    measure_cut,
    open_bench,
    prompt_sequences,
    text_sequences,
)
from compressor.demo import held_out_text_path
from compressor.preparation import open_model, open_source
from compressor.retrieval_tokens import interleave
from compressor.selecting import stacked_heads
from compressor.selection.registry import build_selector
from compressor.selection.request import SCORINGS, Scoring


def divergences(model: str | None, text: Path, methods: tuple[str, ...]) -> dict[tuple[str, Scoring], float]:
    """Of every scoring of each method, calibrated on text and prompts alike; `text` is a folder with test_prose.txt."""
    parser = argparse.ArgumentParser()
    add_measuring_options(parser)
    words = ["--text", str(text), "--texts", "prose", "--tasks", "niah_single_1", "--prompts", "2", "--length", "300"]
    words += ["--windows", "2", "--window", "512", "--device", "cpu"]
    bench = open_bench(open_source(open_model(model, None)), parser.parse_args(words))
    sequences = interleave(text_sequences(bench, "demo", 8, 512, 0), prompt_sequences(bench, 8, 512, 0))
    heads = stacked_heads(bench.source, collect_statistics(bench, sequences, 8, gradients="gradient" in methods))
    found: dict[tuple[str, Scoring], float] = {}
    for method in methods:
        for scoring in SCORINGS if method != "random" else SCORINGS[:1]:
            generator = torch.Generator().manual_seed(0)
            choice = build_selector(method, scoring, 1.5).select(heads, bench.width // 2, generator)
            found[method, scoring] = measure_cut(bench, by_layer(bench, choice.indices), "keep")["kl_text"]
    return found


@pytest.mark.slow
def test_gated_deltanet(tmp_path: Path) -> None:
    """Both streams together are far better than one; activations better than weights; energy as good as drrqr."""
    text = held_out_text_path().read_text(encoding="utf-8")
    (tmp_path / "test_prose.txt").write_text(text, encoding="utf-8")
    kl = divergences(None, tmp_path, ("drrqr", "energy", "l1", "s-wanda", "gradient", "random"))
    for method in ("drrqr", "energy", "l1", "s-wanda"):
        assert 2 * kl[method, "qk"] < kl[method, "q"]
        assert 2 * kl[method, "qk"] < kl[method, "k"]
    assert kl["energy", "qk"] < 1.3 * kl["drrqr", "qk"]
    assert kl["drrqr", "qk"] < kl["gradient", "qk"] < kl["l1", "qk"]
    assert kl["drrqr", "qk"] < 0.5 * kl["l1", "qk"]
    # The gradient by one projection knows what the other does with it.
    assert max(kl["gradient", "k"], kl["gradient", "q"]) < 0.3 * kl["drrqr", "k"]


@pytest.mark.slow
def test_delta_net(shared_models: Path, shared_text: Path) -> None:
    """Queries alone are as good as both, and for weights better; keys alone break every method."""
    kl = divergences(str(shared_models / "deltanet-14m"), shared_text, ("drrqr", "energy", "l1", "gradient"))
    for method in ("drrqr", "energy", "l1", "gradient"):
        assert kl[method, "q"] < 1.3 * kl[method, "qk"]
        assert kl[method, "k"] > 4 * kl[method, "qk"]
    assert kl["l1", "q"] < 0.7 * kl["l1", "qk"]
    assert kl["gradient", "qk"] < 1.3 * kl["drrqr", "qk"]
