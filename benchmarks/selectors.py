"""Every selection method, scoring and ratio on trained models, before and after a refit; and the heads.

    python -m benchmarks.selectors --models ../shared/models --text ../shared/text \\
        --calibration train_sample.txt --output selectors.json --figure selectors.png --heads-figure heads.png

For each model folder of a supported family all cuts are chosen from one calibration, `--retrieval-share` of it
retrieval prompts. Perplexity and KL to the original on windows of three texts, KL on prompts of the evaluation split
and the memory score are measured of each cut with its channels masked, which is what a cut checkpoint computes, and
again once its output projections were refitted on the same sequences (compressor.recovery.refit; the last ones choose
the ridge). `--norm-epsilon` names the epsilons that the cuts are exported with. The original, and `--memory-methods`
that score both streams, are asked `--memory-prompts` prompts a task, the others the first `--prompts` of them;
differences are of the prompts that both were asked. A second table tells of each cut how well the kept columns of the
stacked key and query activations are conditioned, whatever was scored, and how many channels a method has in common
with drrqr.

Rows are written one by one, the most telling first, until `--budget-seconds` are over; the same command goes on from
there. `benchmarks.selector_table` writes the table of several result files.

    python -m benchmarks.selectors --results docs/results/selectors.json --figure docs/selectors.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuts import (
    Bench,
    add_cut_options,
    add_measuring_options,
    as_hexadecimal,
    by_layer,
    collect_statistics,
    masked,
    mixed_sequences,
    open_bench,
    supported_models,
    with_gradients,
)
from benchmarks.options import check_folders, check_methods, check_options, check_text, check_widths
from benchmarks.output_files import draw_figure, told_in_one_sentence
from benchmarks.resumable import Budget, Row, Rows, settings_of
from benchmarks.selector_cuts import FISHER, KEYS, check_scorings, methods_of, ordered_cuts
from benchmarks.selector_figures import choices, draw_heads, print_heads
from benchmarks.selector_measures import Questions, answers, questions
from benchmarks.selector_refit import projections_put_back, refit_sequences, refitted
from benchmarks.selector_table import draw_before_and_after, markdown, read_rows
from compressor.artifacts import CalibrationStatistics
from compressor.calibration.tokens import batches
from compressor.errors import RequestError
from compressor.fisher.progressive import progressive_fisher
from compressor.fisher.settings import FisherSettings
from compressor.preparation import Source
from compressor.selecting import stacked_heads
from compressor.selection.base import HeadStatistics
from compressor.selection.diagnostics import diagnose
from compressor.selection.registry import build_selector, get_selector_entry
from compressor.selection.request import SCORINGS

NOT_SETTINGS = (
    "results", "models", "only", "methods", "scorings", "ratios", "norm_epsilon", "output", "figure", "heads_figure",
    "budget_seconds",
)  # fmt: skip


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    rows = read_rows(arguments.results) if arguments.results else measure(arguments)
    if not rows:
        raise RequestError(
            f"nothing was measured: {arguments.models} holds no folder of a supported family that --only allows, or "
            "--budget-seconds were over; name other models or allow more."
        )
    print(markdown(rows, [], {row["ratio"] for row in rows if row["ratio"]}))
    print_heads(rows)
    draw_before_and_after(rows, arguments.figure)
    shown = [row for row in choices(rows) if row["scoring"] == "qk"]
    draw_figure(arguments.heads_figure, shown, lambda partial: draw_heads(rows, partial), "--heads-figure")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", help="all that mean something to the family where none are named")
    parser.add_argument("--scorings", nargs="+", default=list(SCORINGS), choices=SCORINGS)
    parser.add_argument("--no-refit", action="store_true", help="measure the cuts before a refit alone")
    parser.add_argument("--memory-prompts", type=int, help="prompts of a task for --memory-methods; as --prompts")
    parser.add_argument("--memory-methods", nargs="*", default=["drrqr", FISHER])
    parser.add_argument("--budget-seconds", type=float, help="begin no row that is likely to end later")
    parser.add_argument("--heads-figure", type=Path)
    add_cut_options(parser)
    add_measuring_options(parser)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Every model of a supported family; results are written after each row.

    Raises:
        RequestError: before any work, for what cannot be measured.
    """
    check_folders(arguments, arguments.texts)
    check_text(arguments.calibration)
    named = (*(arguments.methods or ()), *arguments.memory_methods)
    check_methods([method for method in named if method != FISHER])
    check_scorings(arguments.methods or (), arguments.scorings)
    budget = Budget(arguments.budget_seconds)
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS)
    rows.load()
    for row in rows.rows:
        budget.took(kind_of(row, arguments), row["seconds"])
    for source in supported_models(arguments.models, arguments.only):
        check_widths(source, arguments.ratios)
        methods = methods_of(source, arguments.methods)
        asked = [{"model": source.folder.name, **cut} for cut in ordered_cuts(methods, arguments)]
        if rows.missing(asked) and budget.allows(""):
            measure_model(source, asked, rows, arguments, budget)
    return rows.rows


class Calibration:
    """One calibration for all cuts; backward passes are run when they are first asked for."""

    def __init__(self, bench: Bench, arguments: argparse.Namespace) -> None:
        self.sequences = mixed_sequences(bench, arguments)
        self.refit = refit_sequences(self.sequences, arguments.retrieval_share, arguments.batch_size)
        self._bench, self._batch_size = bench, arguments.batch_size
        self._statistics: CalibrationStatistics = collect_statistics(bench, self.sequences, self._batch_size, False)
        self._heads = stacked_heads(bench.source, self._statistics)

    def heads(self, gradients: bool) -> HeadStatistics:
        if gradients and self._statistics.gradient_q is None:
            self._statistics = with_gradients(self._bench, self._statistics, self.sequences, self._batch_size)
            self._heads = stacked_heads(self._bench.source, self._statistics)
        return self._heads


def measure_model(source: Source, asked: list[Row], rows: Rows, arguments: argparse.Namespace, budget: Budget) -> None:
    """Calibrate once, then choose and measure every cut that is missing, as far as the budget goes."""
    started = time.perf_counter()
    whole = argparse.Namespace(**vars(arguments))
    whole.prompts = max(arguments.prompts, arguments.memory_prompts or 0)
    bench = open_bench(source, whole)
    asking = questions(bench, arguments.prompts)
    data = Calibration(bench, arguments)
    before, missing = time.perf_counter() - started, rows.missing(asked)
    for number, known_by in enumerate(missing):
        kind = kind_of(known_by, arguments)
        if not budget.allows(kind):
            left = f"{source.folder.name}: {len(missing) - number} rows are left after the budget"
            print(f"{left}." if number else f"{left}; {none_measured(before, budget.longest.get(kind))}.")
            return
        row = rows.measure(known_by, lambda cut=known_by: measure_both(asking, data, cut, arguments))  # type: ignore[misc]
        budget.took(kind, row["seconds"])


def measure_both(asked: Questions, data: Calibration, cut: Row, arguments: argparse.Namespace) -> Row:
    """Before the refit, and after it under `after_refit`; KL on the held-out calibration sequences before and after."""
    bench, more = asked.bench, asked_more(cut, arguments)
    keep = round(bench.width * (1 - cut["ratio"]))
    if cut["method"] == "dense":
        return {"key_dim": keep, **answers(asked, more), "methods": methods_of(bench.source, arguments.methods)}
    indices = chosen(bench, data, cut, keep, arguments)
    row: Row = {"key_dim": keep}
    with projections_put_back(bench), masked(bench, by_layer(bench, indices), cut["norm_epsilon"]):
        row |= answers(asked, more)
        if not arguments.no_refit:
            done = refitted(asked, data.refit)
            # Weights that were put back answer as they did.
            row["after_refit"] = {name: row[name] for name in row if name != "key_dim"}
            if not done.kept_old:
                row["after_refit"] = answers(asked, more)
            row["kl_held_out"] = [done.kl_before, done.kl_before if done.kept_old else done.kl_after]
    return {**row, "heads": head_figures(data.heads(gradients=False), indices, bench.width)}


def none_measured(calibration: float, row: float | None) -> str:
    """Why the same command may never go on; `row` is the longest of its kind, None where there was none. Seconds."""
    and_row = "" if row is None else f" and such a row {row:.0f} s"
    return (
        f"none was measured: calibrating took {calibration:.0f} s{and_row}, and with a --budget-seconds of less the "
        "same command never goes on"
    )


def kind_of(row: Row, arguments: argparse.Namespace) -> str:
    """Rows that take about as long."""
    return f"{row['method'] == FISHER} {asked_more(row, arguments)}"


def asked_more(cut: Row, arguments: argparse.Namespace) -> bool:
    """Whether the cut is asked `--memory-prompts`: of the methods that are compared, cuts that score both streams."""
    return cut["method"] in ("dense", *arguments.memory_methods) and cut["scoring"] == "qk"


def chosen(bench: Bench, data: Calibration, cut: Row, keep: int, arguments: argparse.Namespace) -> Tensor:
    """Channels int64 [N, keep], the heads of all layers stacked."""
    generator = torch.Generator().manual_seed(arguments.seed)
    if cut["method"] != FISHER:
        heads = data.heads("gradient" in get_selector_entry(cut["method"]).needs)
        return build_selector(cut["method"], cut["scoring"], arguments.f).select(heads, keep, generator).indices
    scaled = cut["norm_epsilon"] == "scaled" or not bench.source.architecture.scales_by_width
    token_batches = [batch.input_ids for batch in batches(data.sequences, arguments.batch_size)]
    return progressive_fisher(
        bench.source.architecture, bench.original, bench.source.mixers, token_batches, keep, FisherSettings(),
        generator, lambda passes: None, epsilon_scaled=scaled,
    ).indices  # fmt: skip


def head_figures(heads: HeadStatistics, indices: Tensor, width: int) -> dict[str, Any]:
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


def _figures(values: Tensor) -> list[float | None]:
    return [float(f"{value:.5g}") if value < float("inf") else None for value in values.tolist()]


if __name__ == "__main__":
    main()
