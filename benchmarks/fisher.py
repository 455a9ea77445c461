"""Progressive Fisher selection and its variants next to drrqr: KL to the dense model on held-out text and prompts.

    python -m benchmarks.fisher --models ../shared/models/gdn-28m ../shared/models/deltanet-14m \\
        --text ../shared/text --calibration train.txt --output fisher.json

For each model, ratio and norm epsilon (kept, scaled): drrqr, the variants of `benchmarks.fisher_variants` and, where
`--variants` names it, `learned`, masks trained by gradient descent (`benchmarks.learned_masks`); all from the same
calibration sequences, half text, half retrieval prompts. Cuts are simulated (dropped channels zeroed before the norm,
the exported scale applied to the mixer outputs), which is what a cut checkpoint computes. Held-out text is windows of
the three test texts, held-out prompts are of the evaluation split. Cells that `--output` has from the same settings are
not measured again. Time is given in bare forward passes of the calibration sequences, head included.

    python -m benchmarks.fisher --results fisher.json

prints results again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.fisher_data import TEXTS, Data, calibration_and_held_out
from benchmarks.fisher_variants import LEARNED, VARIANTS
from benchmarks.learned_masks import LearnedSettings, learned_masks
from benchmarks.options import DTYPES, check_options, check_text, check_text_folder, check_widths, open_sources
from benchmarks.output_files import told_in_one_sentence
from benchmarks.resumable import Columns, Row, Rows, settings_of, stored_rows
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import batches
from compressor.fisher.progressive import alone, progressive_fisher
from compressor.fisher.statistics import MaskedModel, masked_divergence
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.preparation import Source
from compressor.selection.rrqr import strong_rrqr

EPSILONS = ("scaled", "keep")
STRONG_RRQR_F = 1.5


KEYS = ("model", "ratio", "norm_epsilon", "method")
CELLS = "cells"
"""What result files hold the rows under."""
COLUMNS: Columns = {
    "model": str, "ratio": int | float, "key_dim": int, "norm_epsilon": str, "method": str, "kl_text": dict,
    "kl_prompts": int | float, "cost": dict,
}  # fmt: skip
"""What the table reads."""
NOT_SETTINGS = ("results", "models", "ratios", "epsilons", "variants", "output")
"""What is to be measured may grow from run to run; how it is measured may not."""


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    if arguments.results:
        print_table(stored_rows(arguments.results, COLUMNS, "benchmarks.fisher", CELLS))
    else:
        print_table(measure(arguments))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="*", help="print these result files; measure nothing")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="model folders")
    parser.add_argument("--text", type=Path, help="folder of test_prose.txt, test_docs.txt, test_code.txt")
    parser.add_argument("--calibration", default="demo", help="text to calibrate on, from the training split")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.75])
    parser.add_argument("--epsilons", nargs="+", default=EPSILONS, choices=EPSILONS)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=[*VARIANTS, LEARNED])
    parser.add_argument("--samples", type=int, default=64, help="calibration sequences, half of them prompts")
    parser.add_argument(
        "--held-out", type=int, default=8, help="windows of each text, and three times as many of prompts"
    )
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Every model; results are written after each row. Raises RequestError before any work."""
    check_text_folder(arguments.text, TEXTS)
    check_text(arguments.calibration)
    sources = open_sources(arguments.models, "--models")
    for source in sources:
        check_widths(source, arguments.ratios)
    rows = Rows(arguments.output, settings_of(arguments, NOT_SETTINGS), KEYS, CELLS)
    rows.load()
    for source in sources:
        asked: list[Row] = [
            {"model": source.folder.name, "ratio": ratio, "norm_epsilon": epsilon, "method": method}
            for ratio, epsilon, method in itertools.product(
                arguments.ratios, arguments.epsilons, ("drrqr", *arguments.variants)
            )
        ]
        if rows.missing(asked):
            measure_model(source, asked, rows, arguments)
    return rows.measured()


def measure_model(source: Source, asked: list[Row], rows: Rows, arguments: argparse.Namespace) -> None:
    """Calibrate once, then choose and measure every cut that is missing."""
    data = calibration_and_held_out(source, arguments)
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device, source.architecture)
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device)
    masked = MaskedModel(source.architecture, model, source.mixers)
    token_batches = list(batches([row for batch in data.fit for row in batch], arguments.batch_size))
    statistics = calibrate(
        source.architecture, model, source.mixers, token_batches, None, lambda progress, tokens: None
    )
    gram = (statistics.gram_q + statistics.gram_k).flatten(0, 1)
    bare = bare_seconds(model, data.fit)

    def work(cut: Row) -> Row:
        keep = round(masked.shape[2] * (1 - cut["ratio"]))
        drrqr = kept_masks(strong_rrqr(gram, keep, STRONG_RRQR_F).indices, masked)
        held = reset_peak(device)
        started = time.perf_counter()
        kept, passes, steps = select(
            masked, data.fit, keep, cut["method"], cut["norm_epsilon"], drrqr, gram, arguments.seed
        )
        seconds = time.perf_counter() - started
        peak = None if held is None else (torch.cuda.max_memory_allocated(device) - held) / 2**30
        scale = 1.0 if cut["norm_epsilon"] == "scaled" else source.architecture.output_scale(masked.shape[2], keep)
        cost = {"seconds": seconds, "passes": passes, "passes_by_time": seconds / bare, "peak_gib": peak}
        return {"key_dim": keep, **divergences(masked, data, kept, scale), "cost": cost, "steps": steps}

    for known_by in rows.missing(asked):
        rows.measure(known_by, lambda row=known_by: work(row))  # type: ignore[misc]
    release_memory(device)


def divergences(masked: MaskedModel, data: Data, kept: Tensor, scale: float) -> Row:
    """KL(dense || masked) in nats a token, of each text and of the prompts."""
    return {
        "kl_text": {name: masked_divergence(masked, part, kept, scale, alone) for name, part in data.texts.items()},
        "kl_prompts": masked_divergence(masked, data.prompts, kept, scale, alone),
    }


def select(
    masked: MaskedModel,
    fit: Sequence[Tensor],
    keep: int,
    method: str,
    epsilon: str,
    drrqr: Tensor,
    gram: Tensor,
    seed: int,
) -> tuple[Tensor, float, list[dict[str, Any]]]:
    """Masks bool [L, H_k, d_k], cost in forward passes, what stages and rounds saw."""
    if method == "drrqr":
        return drrqr, 0.0, []
    if method == LEARNED:
        width = masked.shape[2]
        scale = 1.0 if epsilon == "scaled" else masked.architecture.output_scale(width, keep)
        energy = gram.diagonal(dim1=1, dim2=2).view(masked.shape)
        learned = learned_masks(
            masked, fit, keep, scale, energy, LearnedSettings(), torch.Generator().manual_seed(seed)
        )
        return learned.kept, learned.passes, [{"kl": kl} for kl in learned.divergences]
    variant = VARIANTS[method]
    selection = progressive_fisher(
        masked.architecture, masked.model, masked.mixers, fit, keep, variant.settings,
        torch.Generator().manual_seed(seed), lambda passes: None, epsilon_scaled=epsilon == "scaled",
        start=drrqr if variant.from_drrqr else None,
    )  # fmt: skip
    steps = [asdict(stage) for stage in selection.stages] + [asdict(done) for done in selection.rounds]
    return kept_masks(selection.indices, masked), selection.passes, steps


def kept_masks(indices: Tensor, masked: MaskedModel) -> Tensor:
    layers, heads, width = masked.shape
    return torch.zeros(layers * heads, width, dtype=torch.bool).scatter_(1, indices, True).view(masked.shape)


def reset_peak(device: torch.device) -> int | None:
    """Bytes held now on a GPU, from which on the peak is counted; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


@torch.inference_mode()
def bare_seconds(model: PreTrainedModel, fit: Sequence[Tensor]) -> float:
    """Of one forward pass over the calibration sequences, after one to warm up."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        for batch in fit:
            float(model(input_ids=batch.to(model.device), use_cache=False).logits[0, 0, 0])
        seconds.append(time.perf_counter() - started)
    return seconds[-1]


def print_table(rows: Sequence[Row]) -> None:
    """KL in nats a token; `mean` is of text and prompts. Passes are counted, and by the clock."""
    texts = "".join(f"{name:>8}" for name in TEXTS)
    figures = f"{texts}{'prompts':>9}{'mean':>8}{'passes':>8}{'by time':>9}"
    print(f"{'model':<14}{'keep':>5} {'epsilon':<8}{'method':<22}{figures}")
    for row in rows:
        texts = "".join(f"{row['kl_text'][name]:8.4f}" for name in TEXTS)
        mean = (fmean(row["kl_text"].values()) + row["kl_prompts"]) / 2
        print(
            f"{row['model']:<14}{row['key_dim']:>5} {row['norm_epsilon']:<8}{row['method']:<22}{texts}"
            f"{row['kl_prompts']:9.4f}{mean:8.4f}{row['cost']['passes']:8.1f}{row['cost']['passes_by_time']:9.1f}"
        )


if __name__ == "__main__":
    main()
