"""Cuts of one model that are simulated, not written: what they are chosen from, and what is measured of them.

A cut is the original with its dropped key/query channels zeroed before the norm and the mixers' outputs at the scale
that the exported norm epsilon gives them, which is what a cut checkpoint computes (compressor.architectures.masking).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.options import DTYPES, check_widths, model_folders, section
from benchmarks.resumable import Columns, Row, Rows
from compressor.architectures.masking import MaskedChannels
from compressor.artifacts import CalibrationStatistics
from compressor.calibration.run import calibrate
from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import batches, pack_tokens
from compressor.errors import RequestError
from compressor.evaluation.measure import Material, Measured, compare
from compressor.evaluation.results import collect, mean_of_scores
from compressor.evaluation_section import EvaluationSection
from compressor.loading import load_model, resolve_device, resolve_dtype
from compressor.material import make_material, plan_evaluation
from compressor.preparation import Source, open_model, open_source
from compressor.retrieval_tokens import interleave, retrieval_sequences
from compressor.sensitivity.gradients import gradient_scores, loss_gradients

TEXTS = ("prose", "docs", "code")
MEMORY_TASKS = ("niah_single_1", "vt", "cwe", "recall")
EPSILONS = ("keep", "scaled")

Kept = Mapping[int, Tensor]
"""By layer, the kept channels: int64 [H_k, keep]."""

NUMBER = int | float
FIGURES: Columns = {
    "perplexity": dict, "kl_text": NUMBER, "kl_prompts": NUMBER | None, "memory": NUMBER | None,
}  # fmt: skip
"""What a row has of `figures_of` that tables read."""


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """A model twice, of which `cut` is the one that channels are masked in, and what both are asked."""

    source: Source
    original: PreTrainedModel
    cut: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    material: Material

    @property
    def vocabulary(self) -> int:
        size: int = self.source.config.get_text_config(decoder=True).vocab_size
        return size

    @property
    def width(self) -> int:
        return self.source.mixers[0].head_k_dim


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Where models, results and figures lie, and what `open_bench` reads."""
    parser.add_argument("--results", type=Path, nargs="*", help="print and draw these result files; measure nothing")
    parser.add_argument("--models", type=Path, help="folder of model folders")
    parser.add_argument("--only", nargs="*", help="names of model folders")
    parser.add_argument("--f", type=float, default=1.5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--text", type=Path, help="folder of test_prose.txt, test_docs.txt, test_code.txt")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), help="which of them")
    parser.add_argument("--tasks", nargs="+", default=list(MEMORY_TASKS), help="whose mean is the memory score")
    parser.add_argument("--length", type=int, default=1536, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=96, help="prompts of a task")
    parser.add_argument("--windows", type=int, default=64, help="windows of a text")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window and of a calibration sequence")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--seed", type=int, default=0)


def add_cut_options(parser: argparse.ArgumentParser) -> None:
    """Which cuts are made, and what `mixed_sequences` reads."""
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.25, 0.5, 0.75], help="shares removed")
    parser.add_argument("--norm-epsilon", nargs="+", default=["keep"], choices=EPSILONS)
    parser.add_argument("--calibration", default="demo", help="text to calibrate on, from the training split")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--retrieval-share", type=float, default=0.5)


def supported_models(folder: Path, only: Sequence[str] | None) -> Iterator[Source]:
    """The models below `folder` that can be cut, those called `only` where names are given; others are printed."""
    for path in model_folders(folder):
        if only and path.name not in only:
            continue
        try:
            source = open_source(open_model(str(path), None))
        except RequestError as refusal:
            print(f"{path.name}: not measured: {refusal}")
        else:
            yield source


def measure_models(
    arguments: argparse.Namespace,
    rows: Rows,
    cuts: Sequence[Row],
    measure_model: Callable[[Source, list[Row]], None],
) -> list[Row]:
    """All rows, once `measure_model` was given each supported model that lacks some of `cuts`, and its rows to be.

    Raises:
        RequestError: the output is of other settings, a model is narrower than a ratio asks for, or none of a
            supported family was named.
    """
    rows.load()
    for source in supported_models(arguments.models, arguments.only):
        check_widths(source, arguments.ratios)
        asked = [{"model": source.folder.name, **cut} for cut in cuts]
        if rows.missing(asked):
            measure_model(source, asked)
    return rows.measured()


def open_bench(source: Source, arguments: argparse.Namespace) -> Bench:
    """Raises RequestError for material that cannot be made."""
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(arguments.dtype, device, source.architecture)
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    files = [str(arguments.text / f"test_{name}.txt") for name in arguments.texts]
    settings = {
        "suite": "full", "tasks": arguments.tasks, "lengths": [arguments.length], "samples": arguments.prompts,
        "mode": "teacher-forced", "texts": files, "windows": arguments.windows, "window_length": arguments.window,
        "batch_size": arguments.batch_size,
    }  # fmt: skip
    plan = plan_evaluation(section(EvaluationSection, settings), source.config, tokenizer, arguments.seed, files)
    original, cut = (
        load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device) for _ in range(2)
    )
    return Bench(source, original, cut, tokenizer, make_material(plan, (), "", lambda prompts: None))


def mixed_statistics(bench: Bench, arguments: argparse.Namespace, gradients: bool) -> CalibrationStatistics:
    """Of `mixed_sequences`."""
    return collect_statistics(bench, mixed_sequences(bench, arguments), arguments.batch_size, gradients)


def mixed_sequences(bench: Bench, arguments: argparse.Namespace) -> Sequence[Tensor]:
    """Text and, for a share of the sequences, retrieval prompts: int64 [window] each."""
    retrieval = round(arguments.retrieval_share * arguments.samples)
    text = text_sequences(bench, arguments.calibration, arguments.samples - retrieval, arguments.window, arguments.seed)
    return interleave(text, prompt_sequences(bench, retrieval, arguments.window, arguments.seed))


def text_sequences(bench: Bench, text: str, samples: int, length: int, seed: int) -> tuple[Tensor, ...]:
    """int64 [length] each, drawn with `seed`; fewer where the text ends."""
    if not samples:
        return ()
    packed = pack_tokens(
        open_documents(TextSource(text)), bench.tokenizer, samples, length, 0, seed, vocab_size=bench.vocabulary
    )
    return packed.calibration


def prompt_sequences(bench: Bench, samples: int, length: int, seed: int) -> tuple[Tensor, ...]:
    """Retrieval prompts with their answers, int64 [length] each."""
    return retrieval_sequences(bench.tokenizer, bench.vocabulary, samples, length, seed).sequences if samples else ()


def collect_statistics(
    bench: Bench, sequences: Sequence[Tensor], batch_size: int, gradients: bool
) -> CalibrationStatistics:
    """All that forward passes give, and what backward passes do where `gradients` are wanted."""
    source, token_batches = bench.source, list(batches(sequences, batch_size))
    statistics = calibrate(
        source.architecture,
        bench.original,
        source.mixers,
        token_batches,
        None,
        lambda progress, tokens: None,
        energy=True,
        input_squares=True,
    )
    return with_gradients(bench, statistics, sequences, batch_size) if gradients else statistics


def with_gradients(
    bench: Bench, statistics: CalibrationStatistics, sequences: Sequence[Tensor], batch_size: int
) -> CalibrationStatistics:
    """`statistics` with what backward passes over the same sequences add."""
    source, token_batches = bench.source, list(batches(sequences, batch_size))
    sums = loss_gradients(source.architecture, bench.original, source.mixers, token_batches, lambda tokens: None)
    scores = gradient_scores(source.architecture, bench.original, source.mixers, sums)
    return replace(statistics, gradient_q=scores[0], gradient_k=scores[1])


def by_layer(bench: Bench, indices: Tensor) -> Kept:
    """`indices` int64 [N, keep] of the heads of all layers, stacked."""
    heads = bench.source.mixers[0].num_k_heads
    parts = indices.split(heads)
    return {mixer.layer: part for mixer, part in zip(bench.source.mixers, parts, strict=True)}


def masked(bench: Bench, kept: Kept | None, epsilon: str) -> AbstractContextManager[None]:
    """While active, `bench.cut` computes what a checkpoint with the channels `kept` would; None keeps all."""
    if kept is None:
        return nullcontext()
    width = next(iter(kept.values())).shape[1]
    scale = bench.source.architecture.output_scale(bench.width, width) if epsilon == "keep" else 1.0
    masks = MaskedChannels(kept, bench.width, scale)
    return bench.source.architecture.tapped(bench.cut, bench.source.mixers, masks)


def measure_cut(bench: Bench, kept: Kept | None, epsilon: str) -> dict[str, Any]:
    """Perplexity a token of each text, KL(original || cut) in nats a token, and scores in percent."""
    with masked(bench, kept, epsilon):
        _, measured = compare(bench.original, bench.cut, bench.tokenizer, bench.material, lambda tokens: None)
    return figures_of(bench, measured)


def figures_of(bench: Bench, measured: Measured) -> dict[str, Any]:
    """The figures of `measure_cut`."""
    figures = collect("cut", bench.width, 0, "original", measured.texts, measured.tasks)
    memory = mean_of_scores([task.score for task in measured.tasks])
    error = None if memory is None else memory.standard_error
    return {
        "perplexity": {
            Path(text.name).stem.removeprefix("test_"): _rounded(text.figures.token_perplexity)
            for text in measured.texts
        },
        "kl_text": _rounded(figures.kl_text),
        "kl_prompts": _rounded(figures.kl_prompts),
        "memory": None if memory is None else round(100 * memory.mean, 2),
        "memory_standard_error": None if error is None else round(100 * error, 2),
        "tasks": {task.task: round(100 * task.score.mean, 2) for task in measured.tasks},
    }


def as_hexadecimal(indices: Tensor, width: int) -> list[str]:
    """Kept channels int64 [N, keep] as one number a head, whose bit c is set where channel c is kept."""
    digits = -(-width // 4)
    return [f"{sum(1 << channel for channel in row):0{digits}x}" for row in indices.tolist()]


def overlap(first: Sequence[str], second: Sequence[str]) -> list[float]:
    """Of each head, the share of the channels kept by `first` that `second` keeps too; both keep as many."""
    shares = []
    for one, other in zip(first, second, strict=True):
        a, b = int(one, 16), int(other, 16)
        shares.append((a & b).bit_count() / a.bit_count())
    return shares


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
