"""Is the evaluation a sound instrument? Dense scores, spread over settings that should not matter, random pruning.

    python -m benchmarks.instrument MODEL... --text ../shared/text/test_prose.txt --output docs/results/instrument.json

Each model is asked `--samples` prompts a task of `--length` tokens, teacher-forced: as it is, with other batch sizes,
in other dtypes, and with its key/query channels zeroed but for a random subset (nested: every smaller subset lies in
the greater ones).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.environment import write_result
from benchmarks.options import DTYPES, check_options, check_widths, open_sources, section
from benchmarks.output_files import told_in_one_sentence
from compressor.architectures.masking import MaskedChannels
from compressor.calibration.tokenizer import load_tokenizer
from compressor.evaluation.measure import Material, measure
from compressor.evaluation_section import EvaluationSection
from compressor.loading import load_model, resolve_device, resolve_dtype
from compressor.material import make_material, plan_evaluation
from compressor.preparation import Source


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tasks", nargs="+", default=["niah_single_1", "niah_keys_8", "vt", "cwe", "recall"])
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 7, 1], help="the first is the reference")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["auto"], help="the first is the reference")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.75, 0.5, 0.25, 0.125], help="of channels kept")
    parser.add_argument("--windows", type=int, default=64, help="of each text")
    parser.add_argument("--window-length", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    check_options(arguments)
    sources = open_sources(arguments.models, "MODEL")
    materials = [make_prompts(source, arguments) for source in sources]
    for source in sources:
        check_widths(source, [1 - share for share in arguments.shares])
    runs: list[dict[str, Any]] = []
    for source, material in zip(sources, materials, strict=True):
        for run in measure_model(source, material, arguments):
            runs.append(run)
            print(" ".join(f"{key}={value}" for key, value in run.items()), flush=True)
            write_result(arguments.output, {"settings": vars(arguments) | {"output": None}, "runs": runs})


def measure_model(source: Source, material: Material, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a variant."""
    device = resolve_device(arguments.device)
    model, *others = (
        load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device)
        for dtype in (resolve_dtype(name, device, source.architecture) for name in arguments.dtype)
    )
    setting: dict[str, Any] = {"batch_size": material.batch_size, "share": 1.0}
    rows = []
    for batch_size in arguments.batch_sizes:
        variant = replace(material, batch_size=batch_size)
        rows.append(_row(source, model, variant, nullcontext(), setting | {"batch_size": batch_size}))
    rows += [_row(source, other, material, nullcontext(), setting) for other in others]
    for share in arguments.shares:
        cut = random_cut(source, model, share, arguments.seed)
        rows.append(_row(source, model, material, cut, setting | {"share": share}))
    return rows


def make_prompts(source: Source, arguments: argparse.Namespace) -> Material:
    """The texts and prompts that every variant is asked."""
    settings = {
        "suite": "full", "tasks": arguments.tasks, "lengths": [arguments.length], "samples": arguments.samples,
        "mode": "teacher-forced", "texts": arguments.text, "windows": arguments.windows,
        "window_length": arguments.window_length, "batch_size": arguments.batch_sizes[0],
    }  # fmt: skip
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    asked = section(EvaluationSection, settings)
    plan = plan_evaluation(asked, source.config, tokenizer, arguments.seed, arguments.text)
    return make_material(plan, (), "", lambda prompts: None)


def random_cut(source: Source, model: PreTrainedModel, share: float, seed: int) -> AbstractContextManager[None]:
    """Only a random `share` of the channels of every head, at the scale that an export with its epsilon kept has."""
    generator = torch.Generator().manual_seed(seed)
    first = source.mixers[0]
    keep = round(share * first.head_k_dim)
    kept = {
        mixer.layer: torch.rand(first.num_k_heads, first.head_k_dim, generator=generator).argsort(-1)[:, :keep]
        for mixer in source.mixers
    }
    scale = source.architecture.output_scale(first.head_k_dim, keep)
    return source.architecture.tapped(model, source.mixers, MaskedChannels(kept, first.head_k_dim, scale))


def _row(
    source: Source,
    model: PreTrainedModel,
    material: Material,
    change: AbstractContextManager[None],
    setting: Mapping[str, Any],
) -> dict[str, Any]:
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    with change:
        measured = measure(model, tokenizer, material, lambda tokens: None)
    row: dict[str, Any] = {"model": source.folder.name, "dtype": str(model.dtype).removeprefix("torch."), **setting}
    for text in measured.texts:
        row[Path(text.name).stem] = round(text.figures.token_perplexity or float("inf"), 4)
    for task in measured.tasks:
        error = task.score.standard_error
        row[task.task] = round(100 * task.score.mean, 2)
        row[f"{task.task}_standard_error"] = None if error is None else round(100 * error, 2)
        row[f"{task.task}_tokens"] = round(100 * task.token_accuracy.mean, 2)
    return row


if __name__ == "__main__":
    main()
