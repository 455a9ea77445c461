"""What a cut costs, and how much of it the refit and training win back.

    python -m benchmarks.recovery MODEL --ratio 0.5 --training-text train.jsonl \\
        --text prose.txt docs.txt code.txt --work DIR --output docs/results/recovery-NAME.json \\
        --variants dense cut scaled refit mixers-4M mixers-4M-from-cut lora-4M control-4M

Each variant is what the product's own commands write, reloaded: `cut` without refit, `scaled` without refit and with
the norm epsilon scaled, `refit` the default, `refit-scaled` the same with the norm epsilon scaled, `mixers-4M` and
`lora-4M` the refitted cut after `compress recover` on four million tokens, `...-from-cut` the same without the refit.
`control-4M` is the model that was not pruned, trained by cross-entropy on the same batches with the same settings:
what the tokens alone are worth.

Perplexity a token is of `--windows` windows of 2048 tokens a text; KL(dense || variant) in nats a token, of the texts
and of the prompts. Memory is the mean over single needle, variable tracking, common words and recall, `--samples`
prompts each, the same for all variants, teacher-forced: of the scores (all or part of the answers, paired difference to
dense), and of the shares of the answers' tokens that are the most probable ones.

    python -m benchmarks.recovery --results docs/results/recovery-*.json --figure docs/recovery.png

prints and draws results again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from benchmarks.cuts import MEMORY_TASKS
from benchmarks.environment import write_result
from benchmarks.options import check_options, section
from benchmarks.output_files import draw_figure, told_in_one_sentence
from benchmarks.recovery_figure import draw, print_table
from benchmarks.recovery_request import (
    CUTS,
    DENSE,
    SEQUENCE_LENGTH,
    check_request,
    cut_recipe,
    recovery_section,
    trained_variant,
)
from benchmarks.resumable import Columns, stored_rows
from compressor.calibration.tokenizer import load_tokenizer
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.headers import read_tensor
from compressor.distilling import plan_training
from compressor.evaluation.measure import Material, compare
from compressor.evaluation.pairing import differences, memory_difference
from compressor.evaluation.results import Difference, collect
from compressor.evaluation_section import EvaluationSection
from compressor.export.replacement import replace_tensors
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.material import make_material, plan_evaluation
from compressor.pipeline import compress
from compressor.planning import RunOptions
from compressor.preparation import Source, open_model, open_source
from compressor.recipe import CalibrationSection, RecoverySection, RuntimeSection
from compressor.recover_plan import RecoverRequest
from compressor.recovering import recover
from compressor.recovery.student import prepare_student
from compressor.recovery.training import train

NUMBER = int | float
COLUMNS: Columns = {
    "model": str, "ratio": NUMBER, "variant": str, "method": str, "settings": list, "perplexity": dict,
    "kl_text": NUMBER, "kl_prompts": NUMBER, "memory": NUMBER, "memory_difference": NUMBER,
    "memory_standard_error": NUMBER | None, "memory_tokens": NUMBER, "seconds": NUMBER,
}  # fmt: skip
"""What the table and the figure read."""


@dataclass(frozen=True)
class Bench:
    """One model at one ratio, and what it is measured on."""

    source: Source
    dense: PreTrainedModel
    material: Material
    ratio: float
    arguments: argparse.Namespace

    def folder(self, name: str) -> Path:
        asked = self.arguments
        calibrated = f"{asked.calibration_samples}-{asked.retrieval_share}"
        path: Path = asked.work / f"{self.source.folder.name}-{self.ratio}-{asked.method}-{calibrated}-{name}"
        return path


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--results", type=Path, nargs="*", help="print and draw these result files; measure nothing")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--method", default="drrqr")
    parser.add_argument("--variants", nargs="+", default=["dense", "cut", "scaled", "refit", "mixers-4M"])
    parser.add_argument("--training-text", help="of calibration, refit and training; never the text that is measured")
    parser.add_argument("--text", nargs="+", help="held-out text files")
    parser.add_argument("--calibration-samples", type=int, default=128)
    parser.add_argument("--retrieval-share", type=float, default=0.5, help="of the calibration's sequences")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the recovery section")
    parser.add_argument("--windows", type=int, default=63, help="whole ones: prose has no more")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=1536, help="tokens of a prompt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("recovery-work"), help="where checkpoints are put")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    check_options(arguments)
    rows = stored_rows(arguments.results, COLUMNS, "benchmarks.recovery") if arguments.results else measure(arguments)
    print_table(rows)
    draw_figure(arguments.figure, rows, lambda partial: draw(rows, partial))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a variant; results are written after each."""
    check_request(arguments)
    bench = prepare(arguments)
    rows: list[dict[str, Any]] = []
    for name in arguments.variants:
        start = time.monotonic()
        model, details = build(bench, name)
        seconds = time.monotonic() - start
        rows.append(figures(bench, name, model, details | {"seconds": round(seconds, 1)}))
        print(json.dumps(rows[-1]), flush=True)
        del model
        release_memory(bench.dense.device)
        settings = {key: value for key, value in vars(arguments).items() if key not in ("results", "figure")}
        write_result(arguments.output, {"settings": json.loads(json.dumps(settings, default=str)), "rows": rows})
    return rows


def prepare(arguments: argparse.Namespace) -> Bench:
    source = open_source(open_model(arguments.model, None))
    device = resolve_device(arguments.device)
    dtype = resolve_dtype("auto", device, source.architecture)
    settings = {
        "suite": "full", "tasks": list(MEMORY_TASKS), "lengths": [arguments.length], "samples": arguments.samples,
        "mode": "teacher-forced", "texts": arguments.text, "windows": arguments.windows,
        "window_length": SEQUENCE_LENGTH,
    }  # fmt: skip
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    asked = section(EvaluationSection, settings)
    plan = plan_evaluation(asked, source.config, tokenizer, arguments.seed, arguments.text)
    material = make_material(plan, (), "", lambda prompts: None)
    dense = load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device)
    return Bench(source, dense, material, arguments.ratio, arguments)


def build(bench: Bench, name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The variant's model, and what is to be told of it beside its figures."""
    if name == DENSE:
        return bench.dense, {}
    if name in CUTS:
        return _load(bench, _cut(bench, name)), {}
    variant = trained_variant(name)
    section = recovery_section(bench.arguments, variant)
    folder = bench.folder(_labelled(bench, name))
    if (folder / CONFIG_FILE).exists():  # of an earlier call
        return _load(bench, folder), {"training": _last_step(folder)}
    if variant["kind"] == "control":
        return _control(bench, section, name)
    report = recover(
        RecoverRequest(
            folder=_cut(bench, variant["start"] or "refit"), teacher=str(bench.source.folder), output_dir=folder,
            section=section, runtime=_runtime(bench), options=RunOptions(overwrite=True), evaluate=False, verify=False,
        )
    )  # fmt: skip
    return _load(bench, folder), {"training": _last_step(folder), "timings_s": report.timings_s}


def figures(bench: Bench, name: str, model: PreTrainedModel, details: dict[str, Any]) -> dict[str, Any]:
    """A row: the variant's figures and their paired differences to the dense model's."""
    tokenizer = load_tokenizer(bench.source.folder, trust_remote_code=False)
    pair = compare(bench.dense, model, tokenizer, bench.material, lambda tokens: None)
    before, after = (
        collect(label, 0, 0, None, each.texts, each.tasks) for label, each in zip(("dense", name), pair, strict=True)
    )
    memory = memory_difference(before, after, seen=True)
    if memory is None:
        raise ValueError("no task was asked")
    return {
        "model": bench.source.folder.name,
        "ratio": 0.0 if name == "dense" or name.startswith("control") else bench.ratio,
        "variant": name,
        "method": bench.arguments.method,
        "settings": bench.arguments.set,
        "calibration": {
            "samples": bench.arguments.calibration_samples,
            "retrieval_share": bench.arguments.retrieval_share,
        },
        "perplexity": {Path(text.name).stem: text.figures.token_perplexity for text in after.texts},
        "kl_text": after.kl_text,
        "kl_prompts": after.kl_prompts,
        "memory": memory.change.after,
        "memory_difference": memory.change.difference,
        "memory_standard_error": memory.change.standard_error,
        "tasks": {task.task: task.score.mean for task in after.tasks},
        "memory_tokens": sum(task.token_accuracy.mean for task in after.tasks) / len(after.tasks),
        "token_accuracy": {task.task: task.token_accuracy.mean for task in after.tasks},
        "differences": [_difference(change) for change in differences(before, after)],
        **details,
    }


def _difference(change: Difference) -> dict[str, Any]:
    """With the text's name for its path."""
    return dataclasses.asdict(change) | {"name": Path(change.name).stem}


def _cut(bench: Bench, name: str) -> Path:
    """The folder of the cut, made on first use."""
    folder = bench.folder(name)
    if (folder / CONFIG_FILE).exists():
        return folder
    compress(cut_recipe(bench.arguments, str(bench.source.folder), folder, name), RunOptions(overwrite=True))
    return folder


def _control(bench: Bench, section: RecoverySection, name: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model itself, trained by cross-entropy, and written and read as any other."""
    source, device = bench.source, bench.dense.device
    tokenizer = load_tokenizer(source.folder, trust_remote_code=False)
    plan = plan_training(
        section, CalibrationSection(source=bench.arguments.training_text), source.architecture,
        source.checkpoint.raw_config, tokenizer, bench.arguments.seed,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # as a student is held
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, dtype, device)
    student = prepare_student(source.architecture, model, source.mixers, plan.student)
    entries = source.checkpoint.index.entries
    student.take_exact(lambda name: read_tensor(entries[name]))
    work = bench.folder(_labelled(bench, name))
    train(
        model, student.trainable_parameters(), None, source.architecture, source.mixers,
        lambda step: plan.tokens.after(step).loaded(workers=int(device.type == "cuda")),
        plan.training, work, False, Accelerator(cpu=device.type == "cpu"), lambda record: None, None,
        run_key=name, on_note=print,
    )  # fmt: skip
    folder = work.with_name(f"{work.name}-model")
    shutil.copytree(source.folder, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    dtypes = {key: entry.torch_dtype for key, entry in entries.items()}
    replace_tensors(folder, student.merged_tensors(dtypes))
    return _load(bench, folder), {"training": _last_step(work)}


def _load(bench: Bench, folder: Path) -> PreTrainedModel:
    raw_config = read_config(folder / CONFIG_FILE)
    return load_model(bench.source.architecture, folder, raw_config, bench.dense.dtype, bench.dense.device)


def _runtime(bench: Bench) -> RuntimeSection:
    return RuntimeSection(device=bench.arguments.device, seed=bench.arguments.seed)


def _labelled(bench: Bench, name: str) -> str:
    return "-".join([name, *(re.sub(r"[^\w.=-]", "", each) for each in bench.arguments.set)])


def _last_step(folder: Path) -> dict[str, Any]:
    lines: Sequence[str] = (folder / "training.jsonl").read_text().splitlines()
    last: dict[str, Any] = json.loads(lines[-1])
    return last


if __name__ == "__main__":
    main()
