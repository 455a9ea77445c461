"""Perplexity and KL of every cut of the trained models, before any recovery.

    python -m benchmarks.quality --models ../shared/models --text ../shared/text \\
        --calibration train_sample.txt --output quality.json --figure quality.png

For each model folder of a supported family: methods drrqr, random, l1; ratios 0.25, 0.5, 0.75; the
norm epsilon kept and scaled. Every cut is exported, reloaded with the stock class and measured on
windows of `--window` tokens of three texts, where the original runs too. KL is
KL(original || cut) in nats a token, the mean over the texts.

    python -m benchmarks.quality --results docs/results/quality.json --figure docs/quality.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.cuts import supported_models
from benchmarks.environment import write_result
from benchmarks.fisher_data import TEXTS, text_windows
from benchmarks.options import check_folders, check_options, check_text
from benchmarks.output_files import draw_figure, told_in_one_sentence
from benchmarks.resumable import Columns, refuse_nothing_measured, stored_rows
from compressor.architectures.masking import ScaledOutput
from compressor.artifacts import CalibrationStatistics
from compressor.calibration.run import calibrate
from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import batches, pack_tokens
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.evaluation.language_modelling import cross_entropy_sum, kl_divergence_sum
from compressor.loading import load_model, resolve_device, resolve_dtype
from compressor.preparation import Source, plan_cut
from compressor.recipe import Recipe
from compressor.selecting import select_channels
from compressor.writing import write_checkpoint

METHODS = ("drrqr", "l1", "random")
RATIOS = (0.25, 0.5, 0.75)
SETTINGS = ("samples", "windows", "window", "seed")
"""Options that decide a figure."""
COLUMNS: Columns = {
    "model": str, "method": str, "ratio": int | float, "norm_epsilon": str, "key_dim": int, "perplexity": dict,
    "kl": int | float,
}  # fmt: skip
"""Of a cell, as `Cell` has them."""


@dataclass
class Cell:
    """One model, cut and epsilon: sums over the texts, then figures."""

    model: str
    method: str
    ratio: float
    norm_epsilon: str
    key_dim: int
    perplexity: dict[str, float]
    kl: float


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="*", help="print and draw these result files; measure nothing")
    parser.add_argument("--models", type=Path, help="folder of model folders")
    parser.add_argument("--text", type=Path, help="folder of test_prose.txt, test_docs.txt, test_code.txt")
    parser.add_argument("--calibration", default="demo", help="text to calibrate on, from the training split")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--only", nargs="*", help="names of model folders")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    check_options(arguments)
    cells = stored_cells(arguments.results) if arguments.results else measure(arguments)
    print_table(cells)
    cuts = [cell for cell in cells if cell.method != "dense"]
    draw_figure(arguments.figure, cuts, lambda partial: draw(cuts, partial))


def stored_cells(files: Sequence[Path]) -> list[Cell]:
    """Raises RequestError for a file that holds none."""
    rows = stored_rows(files, COLUMNS, "benchmarks.quality", "cells")
    return [Cell(**{name: row[name] for name in COLUMNS}) for row in rows]


def measure(arguments: argparse.Namespace) -> list[Cell]:
    """Every model of a supported family; results are written after each. Raises RequestError before any work."""
    check_folders(arguments, TEXTS)
    check_text(arguments.calibration)
    cells: list[Cell] = []
    for source in supported_models(arguments.models, arguments.only):
        cells += measure_model(source, arguments)
        settings = {name: vars(arguments)[name] for name in SETTINGS}
        write_result(arguments.output, {"settings": settings, "cells": [asdict(cell) for cell in cells]})
    refuse_nothing_measured(cells)
    return cells


def measure_model(source: Source, arguments: argparse.Namespace) -> list[Cell]:
    """Calibrate once, then export, reload and measure every cut of one model."""
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    windows = {
        text: text_windows(tokenizer, arguments.text / f"test_{text}.txt", arguments.windows, arguments.window)
        for text in TEXTS
    }
    device = resolve_device(arguments.device)
    dtype = resolve_dtype("auto", device, source.architecture)
    raw_config = source.checkpoint.raw_config
    original = load_model(source.architecture, source.folder, raw_config, dtype, device)
    statistics = calibration_statistics(source, original, tokenizer, arguments)
    with tempfile.TemporaryDirectory() as folder:
        cuts = {
            (method, ratio): export_cut(source, statistics, method, ratio, Path(folder), dtype, device, arguments.seed)
            for method in METHODS
            for ratio in RATIOS
        }
        figures = compare(source, original, cuts, windows)
    print_table(figures)
    return figures


def calibration_statistics(
    source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> CalibrationStatistics:
    packed = pack_tokens(
        open_documents(TextSource(arguments.calibration)), tokenizer, arguments.samples, arguments.window, 0,
        arguments.seed, vocab_size=source.config.get_text_config(decoder=True).vocab_size,
    )  # fmt: skip
    token_batches = list(batches(packed.calibration, 8))
    return calibrate(source.architecture, model, source.mixers, token_batches, None, lambda progress, tokens: None)


def export_cut(
    source: Source, statistics: CalibrationStatistics, method: str, ratio: float, folder: Path,
    dtype: torch.dtype, device: torch.device, seed: int,
) -> PreTrainedModel:  # fmt: skip
    recipe = Recipe.from_settings({"selection": {"method": method, "ratio": ratio}})
    keep = round(source.mixers[0].head_k_dim * (1 - ratio))
    selection, _ = select_channels(source, statistics, recipe.selection, keep, seed)
    target = folder / f"{method}-{keep}"
    target.mkdir()
    write_checkpoint(target, source, plan_cut(source, recipe, keep), selection, 10**10, lambda written: None)
    return load_model(source.architecture, target, read_config(target / CONFIG_FILE), dtype, device)


def compare(
    source: Source,
    original: PreTrainedModel,
    cuts: dict[tuple[str, float], PreTrainedModel],
    windows: Mapping[str, Tensor],
) -> list[Cell]:
    """Run original and cuts over the same windows of each text; the cuts with their epsilon kept and scaled."""
    name, dense = (
        source.folder.name,
        Cell(source.folder.name, "dense", 0.0, "keep", source.mixers[0].head_k_dim, {}, 0.0),
    )
    cells = {
        (method, ratio, policy): Cell(name, method, ratio, policy, round(dense.key_dim * (1 - ratio)), {}, 0.0)
        for method, ratio in cuts
        for policy in (("keep", "scaled") if source.architecture.scales_by_width else ("keep",))
    }
    for text in TEXTS:
        losses = dict.fromkeys(cells, 0.0)
        divergences = dict.fromkeys(cells, 0.0)
        dense_loss, tokens = 0.0, 0
        for window in windows[text].split(8):
            expected, targets = logits(original, window), window[:, 1:].flatten().to(original.device)
            dense_loss += cross_entropy_sum(expected, targets)
            tokens += len(targets)
            for key in cells:
                cut = cuts[key[0], key[1]]
                with epsilon_variant(source, cut, key[1], key[2]):
                    actual = logits(cut, window)
                losses[key] += cross_entropy_sum(actual, targets)
                divergences[key] += kl_divergence_sum(expected, actual)
        dense.perplexity[text] = math.exp(dense_loss / tokens)
        for key, cell in cells.items():
            cell.perplexity[text] = math.exp(losses[key] / tokens)
            cell.kl += divergences[key] / tokens / len(TEXTS)
    return [dense, *cells.values()]


def epsilon_variant(source: Source, cut: PreTrainedModel, ratio: float, policy: str) -> AbstractContextManager[None]:
    """Cuts are exported with the epsilon kept; dividing the mixer outputs by the scale is the other."""
    if policy == "keep":
        return nullcontext()
    mixers = source.architecture.mixers(cut.config, list(source.shapes))
    width = source.mixers[0].head_k_dim
    kept_scale = source.architecture.output_scale(width, round(width * (1 - ratio)))
    return source.architecture.tapped(cut, mixers, ScaledOutput(1 / kept_scale))


@torch.inference_mode()
def logits(model: PreTrainedModel, window: Tensor) -> Tensor:
    """[B * (T - 1), vocabulary]"""
    output: Tensor = model(input_ids=window.to(model.device), use_cache=False).logits
    return output[:, :-1].flatten(0, 1)


def print_table(cells: list[Cell]) -> None:
    print(f"{'model':<18}{'method':<8}{'keep':>5} {'epsilon':<8}{'prose':>8}{'docs':>8}{'code':>8}{'KL':>9}")
    for cell in cells:
        figures = "".join(f"{cell.perplexity[text]:8.2f}" for text in TEXTS)
        print(f"{cell.model:<18}{cell.method:<8}{cell.key_dim:>5} {cell.norm_epsilon:<8}{figures}{cell.kl:9.4f}")


def draw(cells: list[Cell], path: Path) -> None:
    """KL against the share removed, a panel a model, a line a method and epsilon."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = sorted({cell.model for cell in cells})
    figure, axes = plt.subplots(1, len(models), figsize=(4.5 * len(models), 3.8), squeeze=False, sharey=True)
    for axis, model in zip(axes[0], models, strict=True):
        for color, method in zip(("tab:blue", "tab:orange", "tab:green"), METHODS, strict=True):
            for style, policy in (("-", "keep"), ("--", "scaled")):
                line = [c for c in cells if (c.model, c.method, c.norm_epsilon) == (model, method, policy)]
                line.sort(key=lambda cell: cell.ratio)
                label = f"{method}, epsilon {policy}"
                axis.plot([c.ratio for c in line], [c.kl for c in line], style, color=color, marker="o", label=label)
        axis.set(title=model, xlabel="share of key/query channels removed", yscale="log")
    axes[0][0].set_ylabel("KL(original || cut), nats a token")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
