"""What a closed-form refit leaves of the differences between methods: cuts of benchmarks.selectors, measured after it.

    python -m benchmarks.selectors_after_refit --models ../shared/models --text ../shared/text \\
        --calibration train_sample.txt --output after_refit.json --before selectors.json

For each model folder of a supported family all cuts are chosen from one calibration, as in benchmarks.selectors and by
`fisher` too. The output projections of each cut are refitted on its sequences (compressor.recovery.refit; the last ones
choose the ridge), the channels masked, which is what a cut checkpoint computes; then it is measured. KL on the held-out
calibration sequences stands in a row before and after. Rows that `--output` has from the same settings are not measured
again. `--before` names result files of benchmarks.selectors, whose figures are printed beside.

    python -m benchmarks.selectors_after_refit --results after_refit.json --before selectors.json --figure after.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
    measure_cut,
    measure_models,
    open_bench,
    prompt_sequences,
    text_sequences,
)
from benchmarks.resumable import Row, Rows, settings_of, stored_rows
from benchmarks.selector_figures import draw_cuts
from benchmarks.selectors import KEYS, METHODS
from benchmarks.selectors import cuts as cuts_of_statistics
from compressor.calibration.tokens import TokenBatch, batches
from compressor.evaluation.forward import forward_tokens
from compressor.fisher.progressive import progressive_fisher
from compressor.fisher.settings import FisherSettings
from compressor.preparation import Source
from compressor.recovery.refit import Refit, RefitPair, refit
from compressor.refitting import divide_tokens
from compressor.retrieval_tokens import interleave
from compressor.selecting import stacked_heads
from compressor.selection.base import HeadStatistics
from compressor.selection.registry import build_selector, get_selector_entry

FISHER = "fisher"
NOT_SETTINGS = (
    "results", "models", "only", "methods", "scorings", "ratios", "norm_epsilon", "output", "figure", "before",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Calibrated:
    """`fit` and `held_out` are the sequences again, divided for the refit."""

    heads: HeadStatistics
    sequences: Sequence[Tensor]
    fit: Sequence[TokenBatch]
    held_out: Sequence[Tensor]


def main() -> None:
    arguments = parse_arguments()
    rows = stored_rows(arguments.results) if arguments.results else measure(arguments)
    if not rows:
        raise SystemExit("nothing was measured: no model folder of a supported family was named.")
    print_table(rows, stored_rows(arguments.before or ()))
    if arguments.figure is not None:
        draw_cuts(rows, arguments.figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[*METHODS, FISHER])
    parser.add_argument("--scorings", nargs="+", default=["qk"])
    parser.add_argument("--before", type=Path, nargs="*", help="result files of benchmarks.selectors")
    add_cut_options(parser)
    add_measuring_options(parser)
    parser.set_defaults(samples=64)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Every model of a supported family; results are written after each row."""
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS)
    cuts = [cut for cut in cuts_of_statistics(arguments) if cut["method"] != "dense"]

    def measure_one(source: Source, asked: list[Row]) -> None:
        measure_model(open_bench(source, arguments), asked, rows, arguments)

    return measure_models(arguments, rows, cuts, measure_one)


def measure_model(bench: Bench, asked: Sequence[Row], rows: Rows, arguments: argparse.Namespace) -> None:
    missing = rows.missing(asked)
    data = calibrated(bench, missing, arguments)
    for known_by in missing:
        rows.measure(known_by, lambda cut=known_by: measure_row(bench, data, cut, arguments))  # type: ignore[misc]


def calibrated(bench: Bench, asked: Sequence[Row], arguments: argparse.Namespace) -> Calibrated:
    """One calibration for all cuts."""
    retrieval = round(arguments.retrieval_share * arguments.samples)
    text = text_sequences(bench, arguments.calibration, arguments.samples - retrieval, arguments.window, arguments.seed)
    sequences = interleave(text, prompt_sequences(bench, retrieval, arguments.window, arguments.seed))
    gradients = any("gradient" in get_selector_entry(row["method"]).needs for row in asked)
    heads = stacked_heads(bench.source, collect_statistics(bench, sequences, arguments.batch_size, gradients))
    divided = divide_tokens(sequences, arguments.retrieval_share)
    return Calibrated(heads, sequences, list(batches(divided.fit, arguments.batch_size)), divided.held_out)


def measure_row(bench: Bench, data: Calibrated, cut: Row, arguments: argparse.Namespace) -> Row:
    keep = round(bench.width * (1 - cut["ratio"]))
    indices = chosen(bench, data, cut, keep, arguments)
    kept, epsilon = by_layer(bench, indices), cut["norm_epsilon"]
    with projections_put_back(bench):
        with masked(bench, kept, epsilon):
            done = refitted(bench, data, arguments.batch_size)
        figures = measure_cut(bench, kept, epsilon)
    held_out = {"kl_held_out": [done.kl_before, done.kl_before if done.kept_old else done.kl_after]}
    return {"key_dim": keep, **figures, **held_out, "kept": as_hexadecimal(indices, bench.width)}


def chosen(bench: Bench, data: Calibrated, cut: Row, keep: int, arguments: argparse.Namespace) -> Tensor:
    """Channels int64 [N, keep], the heads of all layers stacked."""
    generator = torch.Generator().manual_seed(arguments.seed)
    if cut["method"] != FISHER:
        return build_selector(cut["method"], cut["scoring"], arguments.f).select(data.heads, keep, generator).indices
    scaled = cut["norm_epsilon"] == "scaled" or not bench.source.architecture.scales_by_width
    token_batches = [batch.input_ids for batch in batches(data.sequences, arguments.batch_size)]
    return progressive_fisher(
        bench.source.architecture, bench.original, bench.source.mixers, token_batches, keep, FisherSettings(),
        generator, lambda passes: None, epsilon_scaled=scaled,
    ).indices  # fmt: skip


@contextmanager
def projections_put_back(bench: Bench) -> Iterator[None]:
    """Inside, the output projections of `bench.cut` may be changed; behind, they are the original's to the bit."""
    paths = [bench.source.architecture.output_projection(mixer) for mixer in bench.source.mixers]
    try:
        yield
    finally:
        for path in paths:
            bench.cut.get_submodule(path).load_state_dict(bench.original.get_submodule(path).state_dict())


def refitted(bench: Bench, data: Calibrated, batch_size: int) -> Refit:
    """Refit `bench.cut` with its channels masked; weights are rounded to the dtypes of the files, as those written."""
    architecture, entries = bench.source.architecture, bench.source.checkpoint.index.entries
    names = [architecture.output_projection_tensor(mixer) for mixer in bench.source.mixers]
    dtypes = {name: entries[name].torch_dtype for name in names}
    pair = RefitPair(architecture, bench.original, bench.cut, bench.source.mixers, dtypes)

    def divergence(model: torch.nn.Module) -> float:
        found = forward_tokens(bench.cut, data.held_out, batch_size, bench.original)
        values = torch.cat([figures.kl for figures in found if figures.kl is not None])
        return float(values.double().mean())

    held_out = list(batches(data.held_out, batch_size))
    return refit(pair, data.fit, held_out, divergence, lambda layer_tokens: None)


def print_table(rows: Sequence[Row], before: Sequence[Row]) -> None:
    """One line a cut; figures before the refit stand in front of those after it, where they are known."""
    known = {tuple(row[key] for key in KEYS): row for row in before}
    texts = list(rows[0]["perplexity"])
    names = "".join(f"{text:>16}" for text in texts)
    print(
        f"{'model':<14}{'method':<10}{'scoring':<8}{'keep':>5} {'epsilon':<8}{names}{'KL text':>16}{'KL prompts':>16}"
        f"{'memory':>13}{'KL held out':>16}"
    )
    for row in rows:
        old = known.get(tuple(row[key] for key in KEYS))
        pairs = [(None if old is None else old["perplexity"].get(text), row["perplexity"][text], 2) for text in texts]
        pairs += [(None if old is None else old[name], row[name], 4) for name in ("kl_text", "kl_prompts")]
        figures = "".join(f"{_pair(*pair):>16}" for pair in pairs)
        memory = _pair(None if old is None else old["memory"], row["memory"], 1)
        place = f"{row['model']:<14}{row['method']:<10}{row['scoring']:<8}{row['key_dim']:>5} {row['norm_epsilon']:<8}"
        print(f"{place}{figures}{memory:>13}{_pair(*row['kl_held_out'], 4):>16}")


def _pair(before: float | None, after: float | None, digits: int) -> str:
    words = ["none" if value is None else f"{value:.{digits}f}" for value in (before, after)]
    return words[1] if before is None else " ".join(words)


if __name__ == "__main__":
    main()
