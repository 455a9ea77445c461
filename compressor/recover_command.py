"""The verb `compress recover`: options in, a table out. Imports no torch at start-up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from compressor.abbreviation import cut_word
from compressor.command_words import path
from compressor.errors import RequestError
from compressor.flat_settings import validate_both
from compressor.launched import LaunchedParser, launch
from compressor.naming import names_of
from compressor.recipe import Recipe, RecoverySection, RuntimeSection
from compressor.recipe_file import load_settings
from compressor.section import known_settings

_SECTION_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("--sequences", int, "to train on (default: 32768)"),
    ("--sequence-length", int, "tokens of a sequence (default: 2048)"),
    ("--batch-size", int, "sequences of a step (default: 16)"),
    ("--micro-batch-size", int, "sequences at once (default: those of a step)"),
    ("--retrieval-share", float, "retrieval prompts instead of text, in [0, 1] (default: 0.25)"),
    ("--trainable", str, "lora, or mixers: all of their weights (default: lora)"),
    ("--rank", int, "of the adapters (default: 32)"),
    ("--alpha", float, "an adapter's output is multiplied by alpha / rank (default: 64)"),
    ("--learning-rate", float, "peak (default: 1e-4)"),
    ("--final-learning-rate", float, "of the last step (default: 1e-5)"),
    ("--warmup-share", float, "share of the steps in which it rises (default: 0.05)"),
    ("--weight-decay", float, "AdamW's, of matrices (default: 0)"),
    ("--gradient-norm", float, "longer gradients are scaled down to it (default: 1)"),
    ("--kl-weight", float, "of KL(teacher || student) (default: 1)"),
    ("--cross-entropy-weight", float, "of the loss on the text itself (default: 0)"),
    ("--temperature", float, "of both distributions of the KL (default: 1)"),
    ("--matching-weight", float, "of the match of every mixer's outputs (default: 0)"),
    ("--checkpoint-every", int, "steps between two checkpoints (default: 200)"),
    ("--evaluate-every", int, "steps between two looks at held-out text and prompts (default: 0, only at the end)"),
    ("--tracker", str, "tensorboard, trackio or wandb"),
)


def recover_command(words: list[str]) -> int:
    """`compress recover`; returns the exit status."""
    arguments = vars(_parser().parse_args(words))
    arguments.pop("debug", None)
    place = {name: arguments.pop(name, None) for name in ("folder", "teacher", "output_dir")}
    switches = {name: arguments.pop(name) for name in ("resume", "overwrite", "evaluate", "verify")}
    recipe_file = arguments.pop("recipe", None)
    base = {} if recipe_file is None else _sections(recipe_file)
    runtime: dict[str, Any] = {
        name: arguments.pop(name) for name in ("seed", "dtype", "device", "trust_remote_code") if name in arguments
    }
    # The recipe's other sections are not read.
    given = {*(f"recovery.{name}" for name in arguments), *(f"runtime.{name}" for name in runtime), "export.evaluate"}
    name = names_of(given, recipe_file is not None, {"recovery.source": "text"}, ())
    section, runtime_section = validate_both(
        (RecoverySection, {**base.get("recovery", {}), **arguments}),
        (RuntimeSection, {**base.get("runtime", {}), **runtime}),
        name,
        ("recovery.", "runtime."),
    )
    from compressor.data_parallel import leave_processes
    from compressor.planning import RunOptions
    from compressor.recover_plan import RecoverRequest
    from compressor.recovering import recover
    from compressor.reporting import result_table

    console = Console()
    report = recover(
        RecoverRequest(
            folder=place["folder"],
            teacher=place["teacher"],
            output_dir=place["output_dir"],
            section=section,
            runtime=runtime_section,
            options=RunOptions(switches["resume"], switches["overwrite"], name=name),
            evaluate=switches["evaluate"],
            verify=switches["verify"],
        ),
        console,
    )
    leave_processes()
    if launch().index > 0:
        return 0
    console.print(result_table(report))
    console.print(f"result: {report.output_dir}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"load:   {report.load_line}", soft_wrap=True, highlight=False, markup=False)
    return 0


def _sections(recipe: Path) -> dict[str, dict[str, Any]]:
    """The two that are read, where `recipe` has them. Raises RequestError for what is no section of a recipe."""
    settings = load_settings(recipe)
    unknown = [key for key in settings if key not in Recipe.model_fields]
    if unknown:
        known = known_settings(unknown[0], list(Recipe.model_fields))
        raise RequestError(f"{recipe}: {cut_word(unknown[0])} is no part of a recipe{known}")
    sections = {key: settings[key] for key in ("recovery", "runtime") if settings.get(key) is not None}
    for key, value in sections.items():
        if not isinstance(value, dict):
            raise RequestError(f'{recipe}: {key}: "{value}" is no section; write its settings below it.')
    return sections


def _parser() -> argparse.ArgumentParser:
    parser = LaunchedParser(
        prog="compress recover",
        description="Train a compressed checkpoint with the model it was cut from as teacher.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", type=path("DIR"), metavar="DIR", help="what compress wrote")
    add("--teacher", metavar="MODEL", help="a folder or Hub id (default: the model that DIR was cut from)")
    add("--output-dir", type=path("--output-dir"), metavar="OUT", help="default: DIR-recovered")
    add("--recipe", type=path("--recipe"), metavar="FILE", help="YAML whose sections recovery and runtime are read")
    training = parser.add_argument_group("training").add_argument
    training(
        "--text", dest="source", metavar="SOURCE",
        help="demo, a .txt/.jsonl/.parquet file or folder, or a Hub data set id (default: what DIR was calibrated on)",
    )  # fmt: skip
    training("--column", metavar="NAME", help="field with the text (default: text)")
    training("--config", metavar="NAME", help="configuration of a Hub data set")
    training("--split", metavar="NAME", help="split of a Hub data set (default: train)")
    for name, kind, text in _SECTION_OPTIONS:
        training(name, type=kind, help=text)
    training("--targets", type=_names, metavar="A,B", help="modules with an adapter (default: all projections)")
    training(
        "--save-adapter", metavar="ADAPTER",
        help="new folder, which --overwrite does not replace, for the adapter before it is merged, in peft's format, "
        "for DIR; its README.md loads it",
    )  # fmt: skip
    training("--gradient-checkpointing", action="store_true", help="less memory, more time")
    run = parser.add_argument_group("run")
    run.add_argument("--seed", type=int, help="default: 0")
    run.add_argument("--dtype", help="of teacher and evaluation: auto, float32, bfloat16, float16 (default: auto)")
    run.add_argument("--device", help="auto, cpu, cuda, cuda:N (default: auto)")
    run.add_argument("--trust-remote-code", action="store_true", help="let the tokenizer run the model's code")
    for name, text in (
        ("--resume", "go on with an interrupted run"),
        ("--overwrite", "replace the output folder"),
        ("--debug", "show tracebacks"),
    ):
        run.add_argument(name, action="store_true", default=False, help=text)
    for name in ("evaluate", "verify"):
        run.add_argument(
            f"--no-{name}", dest=name, action="store_false", default=True, help=f"do not {name} the result"
        )
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
