"""The verb `compress probe`: options in, a folder with a report out. Imports no torch at start-up."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from compressor.command_words import filled, names, number, path
from compressor.flat_settings import validate_both
from compressor.interruption import explained_termination
from compressor.naming import option_of
from compressor.probe_section import DEFAULT_TASKS, ProbeSection
from compressor.recipe import RuntimeSection


def probe_command(words: list[str]) -> int:
    """`compress probe`; returns the exit status."""
    with explained_termination():
        arguments = vars(_parser().parse_args(words))
        arguments.pop("debug", None)
        names_of_models = ("model", "revision", "baseline", "baseline_revision", "output")
        request = {name: arguments.pop(name) for name in names_of_models if name in arguments}
        of_runtime = {name: value for name, value in arguments.items() if name in RuntimeSection.model_fields}
        others = {name: value for name, value in arguments.items() if name not in of_runtime}
        section, runtime = validate_both((ProbeSection, others), (RuntimeSection, of_runtime), option_of)
        from compressor.probing import ProbeRequest, probe

        console = Console()
    result = probe(ProbeRequest(section=section, runtime=runtime, **request), console)
    for line in (*result.summary, f"result: {result.folder}", f"report: {result.report}"):
        console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compress probe",
        description="Measure how much of its recurrent states a model uses, which heads do, and whether it needs them.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        type=filled("MODEL"),
        metavar="MODEL",
        nargs="?",
        help="a folder or Hub id; default: the bundled demo model",
    )
    add(
        "--output",
        type=path("--output"),
        metavar="DIR",
        required=True,
        help="new folder for probe.json, report.html and figures",
    )
    add("--revision", type=filled("--revision"), help="branch, tag or commit of a Hub model")
    add(
        "--baseline",
        type=filled("--baseline"),
        metavar="MODEL",
        help="the same before pruning: its states beside those of MODEL",
    )
    add("--baseline-revision", type=filled("--baseline-revision"), metavar="REVISION", help="the same for the baseline")
    text = parser.add_argument_group("text").add_argument
    text("--text", metavar="SOURCE", help="a .txt/.jsonl/.parquet file or folder, a Hub data set id, demo (default)")
    text("--length", type=number, metavar="N", help="tokens of each document (default: the model's context)")
    text("--documents", type=number, metavar="D", help="how many are read (default: 8)")
    text("--every", type=number, metavar="N", help="tokens between two looks at, or cuts of, the states (default: 256)")
    text("--concatenate", action="store_true", help="join documents to reach the length, with EOS between them")
    text("--allow-extrapolation", action="store_true", help="read beyond the context length of the config")
    _add_truncation_options(parser)
    _add_run_options(parser)
    return parser


def _add_truncation_options(parser: argparse.ArgumentParser) -> None:
    cut = parser.add_argument_group("truncation").add_argument
    cut("--no-truncation", dest="truncation", action="store_false", help="measure states only")
    cut(
        "--ranks",
        type=_numbers,
        metavar="R,S",
        help="directions kept of each state (default: those of 128,48,24,12,4,1 that are below its width)",
    )
    cut("--tasks", type=names, metavar="A,B", help=f"retrieval tasks (default: {','.join(DEFAULT_TASKS)})")
    cut("--no-tasks", dest="retrieval", action="store_false", help="cut states on text only")
    cut(
        "--task-length",
        type=number,
        metavar="N",
        help="tokens of a prompt (default: 1024, or less where the context is)",
    )
    cut("--samples", type=number, metavar="N", help="prompts of each task (default: 24)")
    cut(
        "--search-rank", type=number, metavar="R",
        help="cut one layer, then one head at a time to R, to find those that carry a task",
    )  # fmt: skip


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run").add_argument
    run("--seed", type=number, help="of prompts and of the search for directions (default: 0)")
    run("--batch-size", type=number, metavar="B", help="sequences at once (default: 8)")
    run("--dtype", help="auto, float32, bfloat16, float16 (default: auto, bfloat16 on a GPU)")
    run("--device", help="auto, cpu, cuda, cuda:N (default: auto)")
    run("--trust-remote-code", action="store_true", help="let the tokenizer run the model's code")
    run("--debug", action="store_true", help="show tracebacks")


def _numbers(text: str) -> list[Any]:
    return [number(word.strip()) for word in text.split(",") if word.strip()]
