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
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.environment import write_result
from benchmarks.fisher_data import TEXTS, calibration_and_held_out
from benchmarks.fisher_variants import LEARNED, VARIANTS
from benchmarks.learned_masks import LearnedSettings, learned_masks
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import batches
from compressor.fisher.progressive import alone, progressive_fisher
from compressor.fisher.statistics import MaskedModel, masked_divergence
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.preparation import Source, open_model, open_source
from compressor.selection.rrqr import strong_rrqr

EPSILONS = ("scaled", "keep")
STRONG_RRQR_F = 1.5


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a selection. Passes are bare forward passes over the calibration sequences: counted, and by the clock.

    `peak_gib` is what a GPU held at most beside the model, None on a CPU.
    """

    seconds: float
    passes: float
    passes_by_time: float
    peak_gib: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One model, cut, epsilon and method: KL in nats a token, what the selection cost, what its stages saw."""

    model: str
    ratio: float
    key_dim: int
    norm_epsilon: str
    method: str
    kl_text: dict[str, float]
    kl_prompts: float
    cost: Cost
    steps: list[dict[str, Any]]

    @property
    def kl(self) -> float:
        """Mean of text and prompts."""
        return (sum(self.kl_text.values()) / len(self.kl_text) + self.kl_prompts) / 2

    @property
    def key(self) -> tuple[str, float, str, str]:
        return self.model, self.ratio, self.norm_epsilon, self.method


def main() -> None:
    arguments = parse_arguments()
    if arguments.results:
        print_table([cell for file in arguments.results for cell in stored_cells(file)])
        return
    results = Results(arguments.output, {name: str(value) for name, value in vars(arguments).items()})
    for folder in arguments.models:
        measure_model(open_source(open_model(str(folder), None)), arguments, results)
    print_table(results.cells)


def stored_cells(path: Path) -> list[Cell]:
    cells = json.loads(path.read_text())["cells"]
    return [Cell(**{**cell, "cost": Cost(**cell["cost"])}) for cell in cells]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="*", help="print these result files; measure nothing")
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="model folders")
    parser.add_argument("--text", type=Path, help="folder of test_prose.txt, test_docs.txt, test_code.txt")
    parser.add_argument("--calibration", default="demo", help="text to calibrate on, from the training split")
    parser.add_argument("--ratios", type=float, nargs="*", default=[0.5, 0.75])
    parser.add_argument("--epsilons", nargs="*", default=EPSILONS, choices=EPSILONS)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=[*VARIANTS, LEARNED])
    parser.add_argument("--samples", type=int, default=64, help="calibration sequences, half of them prompts")
    parser.add_argument(
        "--held-out", type=int, default=8, help="windows of each text, and three times as many of prompts"
    )
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


class Results:
    """The cells so far, on disk after each."""

    def __init__(self, path: Path | None, settings: dict[str, str]) -> None:
        self._path = path
        # What is to be measured may grow from run to run; how it is measured may not.
        self._settings = {
            name: value for name, value in settings.items()
            if name not in ("models", "ratios", "epsilons", "variants", "output", "results")
        }  # fmt: skip
        self.cells: list[Cell] = []
        if path is not None and path.exists():
            stored = json.loads(path.read_text())
            if stored["settings"] != self._settings:
                raise SystemExit(
                    f"{path} was measured with other settings: {stored['settings']}; give another --output."
                )
            self.cells = stored_cells(path)

    def has(self, model: str, ratio: float, epsilon: str, method: str) -> bool:
        return (model, ratio, epsilon, method) in {cell.key for cell in self.cells}

    def add(self, cell: Cell) -> None:
        self.cells.append(cell)
        print_table([cell], header=len(self.cells) == 1)
        write_result(self._path, {"settings": self._settings, "cells": [asdict(each) for each in self.cells]})


def measure_model(source: Source, arguments: argparse.Namespace, results: Results) -> None:
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device, source.architecture)
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device)
    masked = MaskedModel(source.architecture, model, source.mixers)
    data = calibration_and_held_out(source, arguments)
    token_batches = list(batches([row for batch in data.fit for row in batch], arguments.batch_size))
    statistics = calibrate(
        source.architecture, model, source.mixers, token_batches, None, lambda progress, tokens: None
    )
    gram = (statistics.gram_q + statistics.gram_k).flatten(0, 1)
    bare = bare_seconds(model, data.fit)
    for ratio, epsilon in itertools.product(arguments.ratios, arguments.epsilons):
        keep = round(masked.shape[2] * (1 - ratio))
        drrqr = kept_masks(strong_rrqr(gram, keep, STRONG_RRQR_F).indices, masked)
        for method in ("drrqr", *arguments.variants):
            if results.has(source.folder.name, ratio, epsilon, method):
                continue
            held = reset_peak(device)
            started = time.perf_counter()
            kept, passes, steps = drrqr, 0.0, list[dict[str, Any]]()
            if method != "drrqr":
                kept, passes, steps = select(masked, data.fit, keep, method, epsilon, drrqr, gram, arguments.seed)
            seconds = time.perf_counter() - started
            peak = None if held is None else (torch.cuda.max_memory_allocated(device) - held) / 2**30
            scale = 1.0 if epsilon == "scaled" else source.architecture.output_scale(masked.shape[2], keep)
            texts = {name: masked_divergence(masked, part, kept, scale, alone) for name, part in data.texts.items()}
            prompts = masked_divergence(masked, data.prompts, kept, scale, alone)
            cost = Cost(seconds, passes, seconds / bare, peak)
            results.add(Cell(source.folder.name, ratio, keep, epsilon, method, texts, prompts, cost, steps))
    release_memory(device)


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


def print_table(cells: list[Cell], header: bool = True) -> None:
    if header:
        print(f"{'model':<14}{'keep':>5} {'epsilon':<8}{'method':<22}{'prose':>8}{'docs':>8}{'code':>8}{'prompts':>9}"
              f"{'mean':>8}{'passes':>8}{'by time':>9}")  # fmt: skip
    for cell in cells:
        texts = "".join(f"{cell.kl_text[name]:8.4f}" for name in TEXTS)
        print(
            f"{cell.model:<14}{cell.key_dim:>5} {cell.norm_epsilon:<8}{cell.method:<22}{texts}{cell.kl_prompts:9.4f}"
            f"{cell.kl:8.4f}{cell.cost.passes:8.1f}{cell.cost.passes_by_time:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
