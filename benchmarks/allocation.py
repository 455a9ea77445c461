"""What widths of their own would give each layer, at the same total state: a simulation, since no config can say them.

    python -m benchmarks.allocation --models ../shared/models --only gdn-28m --text ../shared/text \\
        --calibration train.jsonl --output allocation.json

Progressive Fisher selection goes down from the whole width to the narrowest of a grid, all layers alike. What each
layer pays for it is a curve: the costs of its removals by the quadratic models ("fisher" widths), or KL measured with
this layer alone masked ("measured"). Widths of the grid are then chosen for the layers, for the least sum of the curves
at the state of a uniform cut. Cuts are measured by masking, the epsilon scaled (in each layer by its own factor, which
one config cannot say either), as KL to the dense model on held-out text and prompts, with the channels of

    drrqr    at these widths
    fisher   where each layer of the descent had its width
    anew     a descent of their own, each layer to its width

The last column of the table is what uniform widths leave on the table: the share of their KL that the widths save.
Rows that `--output` has from the same settings are not measured again; `--results` prints result files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuts import measure_models
from benchmarks.fisher_data import TEXTS, Data, calibration_and_held_out
from benchmarks.layer_widths import allocate, descend, grid_widths, masks_at, measured_curves, stages_to
from benchmarks.options import DTYPES, check_folders, check_options, check_text
from benchmarks.output_files import told_in_one_sentence
from benchmarks.resumable import Columns, Row, Rows, settings_of, stored_rows
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import batches
from compressor.errors import RequestError
from compressor.fisher.progressive import alone
from compressor.fisher.settings import FisherSettings
from compressor.fisher.statistics import MaskedModel, masked_divergence
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.preparation import Source
from compressor.selection.rrqr import strong_rrqr

CUTS = (
    ("drrqr", "uniform"),
    ("drrqr", "fisher"),
    ("drrqr", "measured"),
    ("fisher", "uniform"),
    ("fisher", "fisher"),
    ("fisher", "measured"),
    ("anew", "fisher"),
    ("anew", "measured"),
)
"""Channels and widths."""
KEYS = ("model", "ratio", "method", "widths_by")
NOT_SETTINGS = ("results", "models", "only", "ratios", "output")
STRONG_RRQR_F = 1.5
COLUMNS: Columns = {
    "model": str, "ratio": int | float, "method": str, "widths_by": str, "widths": list, "kl_text": dict,
    "kl_prompts": int | float, "kl": int | float,
}  # fmt: skip
"""What the table reads."""


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    rows = stored_rows(arguments.results, COLUMNS, "benchmarks.allocation") if arguments.results else measure(arguments)
    print_table(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="*", help="print these result files; measure nothing")
    parser.add_argument("--models", type=Path, help="folder of model folders")
    parser.add_argument("--only", nargs="*", help="names of model folders")
    parser.add_argument("--text", type=Path, help="folder of test_prose.txt, test_docs.txt, test_code.txt")
    parser.add_argument("--calibration", default="demo", help="text to calibrate on, from the training split")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75], help="shares of the state removed")
    parser.add_argument("--step", type=int, default=16, help="widths are multiples of it")
    parser.add_argument("--samples", type=int, default=48, help="calibration sequences, half of them prompts")
    parser.add_argument("--held-out", type=int, default=8, help="windows of each text, and three times as many prompts")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Every model of a supported family; results are written after each row. Raises RequestError before any work."""
    check_folders(arguments, TEXTS)
    check_text(arguments.calibration)
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS)
    cuts: list[Row] = [
        {"ratio": ratio, "method": method, "widths_by": widths_by}
        for ratio in arguments.ratios
        for method, widths_by in CUTS
    ]
    return measure_models(arguments, rows, cuts, lambda source, asked: measure_model(source, asked, rows, arguments))


def measure_model(source: Source, asked: list[Row], rows: Rows, arguments: argparse.Namespace) -> None:
    """One descent for all ratios, and one more for every row "anew"."""
    width = source.mixers[0].head_k_dim
    grid = grid_widths(width, arguments.step)
    for row in asked:
        if round(width * (1 - row["ratio"])) not in grid:
            raise RequestError(
                f"--ratios {row['ratio']:g} keeps no multiple of --step {arguments.step} of {width}; give another."
            )
    data = calibration_and_held_out(source, arguments)
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device, source.architecture)
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device)
    masked = MaskedModel(source.architecture, model, source.mixers)
    token_batches = list(batches([row for batch in data.fit for row in batch], arguments.batch_size))
    sums = calibrate(source.architecture, model, source.mixers, token_batches, None, lambda progress, tokens: None)
    gram = sums.gram_q + sums.gram_k
    layers = len(source.mixers)
    settings, seed = FisherSettings(), arguments.seed
    descent = descend(masked, data.fit, [(each,) * layers for each in grid], settings, seed)
    curves = {"fisher": descent.curves, "measured": measured_curves(masked, data.fit, descent)}

    def work(known_by: Row) -> Row:
        keep = round(width * (1 - known_by["ratio"]))
        curve = curves.get(known_by["widths_by"])
        widths = (keep,) * layers if curve is None else allocate(curve, (width, *grid), keep * layers)
        passes = 0.0
        if known_by["method"] == "drrqr":
            kept = chosen_by_rrqr(gram, widths)
        elif known_by["method"] == "anew":
            anew = descend(masked, data.fit, stages_to(widths, width, settings.stages), settings, seed)
            kept, passes = anew.kept[-1], anew.passes
        else:
            kept, passes = masks_at(descent, widths), descent.passes
        lines = None if curve is None else [[float(f"{cost:.5g}") for cost in line] for line in curve.tolist()]
        return {"widths": list(widths), **figures(masked, data, kept), "passes": passes, "curves": lines}

    for known_by in rows.missing(asked):
        rows.measure(known_by, lambda row=known_by: work(row))  # type: ignore[misc]
    release_memory(device)


def chosen_by_rrqr(gram: Tensor, widths: Sequence[int]) -> Tensor:
    """Masks bool [L, H_k, d_k] of the widths a layer, from the Gram matrices float64 [L, H_k, d_k, d_k]."""
    kept = torch.zeros(gram.shape[:3], dtype=torch.bool)
    for layer, width in enumerate(widths):
        kept[layer].scatter_(1, strong_rrqr(gram[layer], width, STRONG_RRQR_F).indices, True)
    return kept


def figures(masked: MaskedModel, data: Data, kept: Tensor) -> Row:
    """KL in nats a token; `kl` is the mean of text and prompts."""
    texts = {name: masked_divergence(masked, part, kept, 1.0, alone) for name, part in data.texts.items()}
    prompts = masked_divergence(masked, data.prompts, kept, 1.0, alone)
    return {"kl_text": texts, "kl_prompts": prompts, "kl": (sum(texts.values()) / len(texts) + prompts) / 2}


def print_table(rows: Sequence[Row]) -> None:
    texts = "".join(f"{name:>8}" for name in TEXTS)
    print(
        f"{'model':<14}{'ratio':>6} {'method':<8}{'widths':<10}{texts}{'prompts':>9}{'mean':>8}{'saved':>9}  by layer"
    )
    uniform = {(row["model"], row["ratio"], row["method"]): row["kl"] for row in rows if row["widths_by"] == "uniform"}
    for row in rows:
        kl = "".join(f"{row['kl_text'][name]:8.4f}" for name in TEXTS)
        method = "fisher" if row["method"] == "anew" else row["method"]
        whole = uniform.get((row["model"], row["ratio"], method))
        saved = "" if whole is None else f"{1 - row['kl'] / whole:.1%}"
        place = f"{row['model']:<14}{row['ratio']:>6g} {row['method']:<8}{row['widths_by']:<10}"
        print(f"{place}{kl}{row['kl_prompts']:9.4f}{row['kl']:8.4f}{saved:>9}  {' '.join(map(str, row['widths']))}")


if __name__ == "__main__":
    main()
