"""Every selection method, scoring and ratio on trained models: perplexity, KL to the original, memory; and the heads.

    python -m benchmarks.selectors --models ../shared/models --text ../shared/text \\
        --calibration train_sample.txt --output selectors.json --figure selectors.png --heads-figure heads.png

For each model folder of a supported family all cuts are chosen from one calibration, `--retrieval-share` of it
retrieval prompts, and measured before any recovery on windows of three texts and on prompts of the evaluation split.
`--norm-epsilon` names the epsilons that the cuts are exported with. A second table tells of each cut how well the kept
columns of the stacked key and query activations are conditioned, whatever was scored, and how many channels a method
has in common with drrqr. Rows that `--output` has from the same settings are not measured again.

    python -m benchmarks.selectors --results docs/results/selectors.json --figure docs/selectors.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuts import (
    Bench,
    add_cut_options,
    add_measuring_options,
    as_hexadecimal,
    by_layer,
    measure_cut,
    measure_models,
    mixed_statistics,
    open_bench,
)
from benchmarks.resumable import Row, Rows, settings_of, stored_rows
from benchmarks.selector_figures import draw_cuts, draw_heads, print_cuts, print_heads
from compressor.preparation import Source
from compressor.selecting import stacked_heads
from compressor.selection.base import HeadStatistics
from compressor.selection.diagnostics import diagnose
from compressor.selection.registry import build_selector, get_selector_entry
from compressor.selection.request import SCORINGS, Scoring

METHODS = ("drrqr", "energy", "l1", "s-wanda", "gradient", "random")
KEYS = ("model", "method", "scoring", "ratio", "norm_epsilon")
NOT_SETTINGS = (
    "results", "models", "only", "methods", "scorings", "ratios", "norm_epsilon", "output", "figure", "heads_figure",
)  # fmt: skip


def main() -> None:
    arguments = parse_arguments()
    rows = stored_rows(arguments.results) if arguments.results else measure(arguments)
    if not rows:
        raise SystemExit("nothing was measured: no model folder of a supported family was named.")
    print_cuts(rows)
    print_heads(rows)
    if arguments.figure is not None:
        draw_cuts(rows, arguments.figure)
    if arguments.heads_figure is not None:
        draw_heads(rows, arguments.heads_figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--scorings", nargs="+", default=list(SCORINGS))
    add_cut_options(parser)
    add_measuring_options(parser)
    parser.add_argument("--heads-figure", type=Path)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Every model of a supported family; results are written after each row."""
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS)

    def measure_one(source: Source, asked: list[Row]) -> None:
        measure_model(open_bench(source, arguments), asked, rows, arguments)

    return measure_models(arguments, rows, list(cuts(arguments)), measure_one)


def cuts(arguments: argparse.Namespace) -> Iterator[Row]:
    """What a row of each cut is known by but for the model; the original comes first."""
    yield {"method": "dense", "scoring": "qk", "ratio": 0.0, "norm_epsilon": "keep"}
    for method in arguments.methods:
        scorings = arguments.scorings if get_selector_entry(method).has_scoring else ["qk"]
        for scoring in scorings:
            for ratio in arguments.ratios:
                for epsilon in arguments.norm_epsilon:
                    yield {"method": method, "scoring": scoring, "ratio": ratio, "norm_epsilon": epsilon}


def measure_model(bench: Bench, asked: list[Row], rows: Rows, arguments: argparse.Namespace) -> None:
    """Calibrate once, then choose and measure every cut that is missing."""
    gradients = any("gradient" in get_selector_entry(m).needs for m in arguments.methods)
    heads = stacked_heads(bench.source, mixed_statistics(bench, arguments, gradients))
    for known_by in rows.missing(asked):
        rows.measure(known_by, lambda cut=known_by: measure_row(bench, heads, cut, arguments))  # type: ignore[misc]


def measure_row(bench: Bench, heads: HeadStatistics, cut: Row, arguments: argparse.Namespace) -> Row:
    keep = round(bench.width * (1 - cut["ratio"]))
    if cut["method"] == "dense":
        return {"key_dim": keep, **measure_cut(bench, None, "keep")}
    scoring: Scoring = cut["scoring"]
    generator = torch.Generator().manual_seed(arguments.seed)
    choice = build_selector(cut["method"], scoring, arguments.f).select(heads, keep, generator)
    figures = measure_cut(bench, by_layer(bench, choice.indices), cut["norm_epsilon"])
    return {"key_dim": keep, **figures, "heads": head_figures(heads, choice.indices, bench.width)}


def head_figures(heads: HeadStatistics, indices: torch.Tensor, width: int) -> dict[str, Any]:
    """One value a head, the heads of all layers stacked, of the kept columns of stacked keys and queries.

    `sigma_min` and `sigma_max` are shares of the largest singular value of all columns; a condition number that is
    infinite stands as None. `energy` is the share of the normalised energy, `activations` that of the squares.
    """
    gram = heads.gram("qk")
    largest = torch.linalg.eigvalsh(gram)[:, -1].sqrt()
    diagnostics = diagnose(gram, indices)
    energy = heads.channel_scores("energy", "qk")
    return {
        "kept": as_hexadecimal(indices, width),
        "condition_number": _figures(diagnostics.condition_number),
        "sigma_min": _figures(diagnostics.sigma_min / largest),
        "sigma_max": _figures(diagnostics.sigma_max / largest),
        "activations": _figures(diagnostics.retained_energy),
        "energy": _figures(energy.gather(1, indices).sum(1) / energy.sum(1)),
    }


def _figures(values: torch.Tensor) -> list[float | None]:
    return [float(f"{value:.5g}") if value < float("inf") else None for value in values.tolist()]


if __name__ == "__main__":
    main()
