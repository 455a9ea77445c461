"""The verb `compress bench`: options in, a table of times and memory out. Imports no torch at start-up."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field
from rich.console import Console

from compressor.command_words import filled, number, path
from compressor.errors import RequestError
from compressor.flat_settings import validate_both
from compressor.interruption import explained_termination
from compressor.naming import option_of
from compressor.recipe import RuntimeSection
from compressor.section import Section, once

if TYPE_CHECKING:
    import torch

    from compressor.preparation import Source
    from compressor.speed.cells import Cell
    from compressor.speed.measure import Bench, Subject

_Count = Annotated[int, Field(ge=1, le=2**24)]


_Sizes = Annotated[list[_Count], Field(min_length=1), AfterValidator(once)]
DEFAULT_PROMPT_LENGTH = 512
DEFAULT_PREFILL_LENGTHS = (2048, 8192, 16384)
_ON_A_CPU = "note: on a CPU recurrences are plain torch, not a GPU's kernels; do not take these ratios for a GPU's"
_CALL_STEPS = 20
"""Steps of one captured graph."""
_WIDEST = 10_000
_LOOKED_AT = 64
"""Tokens behind which logits are looked at: as many as fla reads without tuning another kernel."""
_RATIOS = ("speed_ratio", "memory_ratio")
SCHEMA = 1


class BenchSection(Section):
    """What is measured."""

    batch_sizes: _Sizes = Field(default=[1, 16, 64, 256])
    prompt_length: _Count | None = None
    """None: 512 tokens, or the model's context where that is shorter."""
    prefill_lengths: _Sizes | None = None
    """None: those of 2048, 8192 and 16384 tokens that fit the context, or the whole context."""
    steps: int = Field(default=100, ge=1, le=10**6)
    warm_up: int = Field(default=10, ge=0, le=10**6)
    repeats: int = Field(default=3, ge=1, le=10**4)
    largest_batch: bool = False
    allow_extrapolation: bool = False

    def fitted_to(self, context: int | None) -> BenchSection:
        """With what was left out filled in, for models that read `context` tokens; None is any number."""
        most = 2**24 if context is None else context
        prefill = [length for length in DEFAULT_PREFILL_LENGTHS if length <= most] or [most]
        return self.model_copy(
            update={
                "prompt_length": self.prompt_length or min(DEFAULT_PROMPT_LENGTH, most),
                "prefill_lengths": self.prefill_lengths or prefill,
            }
        )


def bench_command(words: list[str]) -> int:
    """`compress bench`; returns the exit status."""
    with explained_termination():
        return _bench(words)


def _bench(words: list[str]) -> int:
    arguments = vars(_parser().parse_args(words))
    arguments.pop("debug", None)
    given, overwrite = arguments.pop("output", None), arguments.pop("overwrite", False)
    names: list[str | None] = [arguments.pop("model", None)]
    if "baseline" in arguments:
        names.insert(0, arguments.pop("baseline"))
    of_runtime = {name: value for name, value in arguments.items() if name in RuntimeSection.model_fields}
    others = {name: value for name, value in arguments.items() if name not in of_runtime}
    section, runtime = validate_both((BenchSection, others), (RuntimeSection, of_runtime), option_of)
    if overwrite and given is None:
        raise RequestError("--overwrite would change nothing here; add --output, or leave it out.")
    from compressor.loading import resolve_device
    from compressor.output_file import OutputFile

    device = resolve_device(runtime.device)
    section, sources = checked_sources(names, section, device)
    output = None if given is None else OutputFile.checked(given, overwrite)
    console = Console()
    bench = _loaded(sources, section, runtime, device, console)
    if device.type == "cpu":
        _say(console, _ON_A_CPU)
    finite = _finite_logits(bench, section, console)
    measure_all(bench, section)
    cells = bench.recorder.cells
    _print(console, cells, bench.subjects, finite)
    if output is not None:
        output.write(_as_json(cells, section, str(device), bench.subjects, sources, finite))
        _say(console, f"result: {output.given}")
    return 0


def checked_sources(
    names: list[str | None], section: BenchSection, device: torch.device
) -> tuple[BenchSection, list[Source]]:
    """The models by their configs and headers, and what is measured of them with nothing left open.

    Raises:
        RequestError: no such model, one that cannot be measured, a length over the context, or a part that needs a GPU.
    """
    from compressor.context_length import context_length
    from compressor.preparation import open_model, open_source

    if section.largest_batch and device.type != "cuda":
        raise RequestError(f"--largest-batch fills the memory of a GPU, and the device is {device}; leave it out.")
    configured = [open_model(name, None) for name in names]
    baseline = configured[0].config if len(configured) > 1 else None
    context = context_length(configured[-1].config, baseline)
    if context is not None and not section.allow_extrapolation:
        context.refuse_beyond(
            [] if section.prompt_length is None else [section.prompt_length], "prompt_length", option_of
        )
        context.refuse_beyond(section.prefill_lengths or [], "prefill_lengths", option_of)
    return section.fitted_to(None if context is None else context.tokens), [open_source(one) for one in configured]


def measure_all(bench: Bench, section: BenchSection) -> None:
    """Every part of the section, the most telling first; the cells are in `bench.recorder`."""
    from compressor.speed.decoding import DecodePlan
    from compressor.speed.measure import measure_decode, measure_largest_batch, measure_prefill

    prompt_length = section.prompt_length or DEFAULT_PROMPT_LENGTH
    mode, steps = ("graph", _CALL_STEPS) if bench.device.type == "cuda" else ("plain", 1)
    plan = DecodePlan(prompt_length, min(steps, section.steps), mode)  # type: ignore[arg-type]
    for batch in section.batch_sizes:
        measure_decode(bench, batch, plan)
    for length in section.prefill_lengths or ():
        measure_prefill(bench, 1, length)
    if section.largest_batch:
        measure_largest_batch(bench, prompt_length)


def _loaded(
    sources: list[Source], section: BenchSection, runtime: RuntimeSection, device: torch.device, console: Console
) -> Bench:
    """The models on the device, ready to be measured."""
    from compressor.loading import load_model, resolve_dtype
    from compressor.speed.cells import Recorder
    from compressor.speed.measure import Bench, Subject
    from compressor.speed.timing import Schedule

    subjects: list[Subject] = []
    for source in sources:
        name = source.checkpoint.folder.name
        _say(console, f"loading {name}")
        dtype = resolve_dtype(runtime.dtype, device, source.architecture)
        raw_config = source.checkpoint.raw_config
        model = load_model(source.architecture, source.folder, raw_config, dtype, device)
        name = f"{name} ({len(subjects) + 1})" if name in [subject.name for subject in subjects] else name
        subjects.append(Subject(name, model, source.mixers))
    schedule = Schedule(section.steps, section.warm_up, section.repeats)
    return Bench(subjects, device, schedule, Recorder(say=lambda line: _say(console, line)))


def _finite_logits(bench: Bench, section: BenchSection, console: Console) -> dict[str, bool | None]:
    """Of each model by name, and told where they are not: time and memory do not show it."""
    from compressor.speed.passes import has_finite_logits

    length = min(_LOOKED_AT, section.prompt_length or DEFAULT_PROMPT_LENGTH)
    found = {subject.name: has_finite_logits(subject.model, length, bench.device) for subject in bench.subjects}
    _tell_broken(console, bench.subjects, found)
    return found


def _tell_broken(console: Console, subjects: Sequence[Subject], finite: Mapping[str, bool | None]) -> None:
    for subject in subjects:
        if finite[subject.name] is False:
            wider = "" if str(subject.model.dtype) == "torch.float32" else ", or give --dtype float32"
            _say(
                console,
                f"warning: {subject.name} gives logits that are NaN or infinite; it is measured as it is, and what is "
                f"measured answers nothing: check its weights{wider}.",
            )


def _print(console: Console, cells: list[Cell], subjects: Sequence[Subject], finite: Mapping[str, bool | None]) -> None:
    from compressor.speed.tables import DISAGREEMENT, speed_table

    table = speed_table(cells, subjects[0].name if len(subjects) > 1 else None)
    needed = Console(width=_WIDEST).measure(table).maximum  # squeezed, a table loses digits
    Console(file=console.file, width=max(console.width, needed)).print(table)
    # NaN agrees with nothing, itself included.
    if any(cell.replay_agrees is False and finite[cell.model] is not False for cell in cells):
        _say(console, DISAGREEMENT)
    _tell_broken(console, subjects, finite)


def _as_json(
    cells: list[Cell],
    section: BenchSection,
    device: str,
    subjects: Any,
    sources: list[Source],
    finite: Mapping[str, bool | None],
) -> dict[str, Any]:
    from compressor.checkpoint.fingerprint import weights_sha256
    from compressor.report import installed_hardware, installed_versions
    from compressor.speed.tables import ratios_to

    baseline = subjects[0].name if len(subjects) > 1 else None
    models = [
        {
            "name": subject.name,
            "folder": str(source.folder),
            "revision": source.checkpoint.folder.revision,
            "weights_sha256": weights_sha256(source.checkpoint.index, lambda size: None),
            "dtype": str(subject.model.dtype).removeprefix("torch."),
            "finite_logits": finite[subject.name],
        }
        for subject, source in zip(subjects, sources, strict=True)
    ]

    return {
        "schema": SCHEMA,
        "models": models,
        "baseline": baseline,
        "settings": {"device": device, **section.model_dump()},
        "cells": [
            cell.to_json()
            | ({} if baseline is None else dict(zip(_RATIOS, ratios_to(cell, cells, baseline), strict=True)))
            for cell in cells
        ],
        "environment": {**installed_hardware(), "versions": installed_versions()},
    }


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


def _numbers(text: str) -> list[Any]:
    """Words that are no numbers are left to the section, which says what is wrong with them."""
    return [number(word.strip()) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compress bench",
        description="Measure how fast a model decodes and reads prompts and what memory it takes, against a baseline.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model", type=filled("MODEL"), metavar="MODEL", nargs="?", help="a folder or Hub id; default: the bundled model"
    )
    add("--baseline", type=filled("--baseline"), metavar="MODEL", help="model to set it against, such as the original")
    add("--batch-sizes", type=_numbers, metavar="B,C", help="sequences decoded at once (default: 1,16,64,256)")
    add("--prompt-length", type=number, metavar="T", help="tokens behind which decoding begins (default: 512)")
    add(
        "--prefill-lengths",
        type=_numbers,
        metavar="T,U",
        help="tokens of one sequence read at once (default: those of 2048,8192,16384 in the context)",
    )
    add("--steps", type=number, metavar="N", help="timed steps of a round (default: 100; a 20th of it for prompts)")
    add("--warm-up", type=number, metavar="N", help="steps before them (default: 10)")
    add("--repeats", type=number, metavar="N", help="rounds, of which the median counts (default: 3)")
    add("--largest-batch", action="store_true", help="find the largest batch that decodes on the GPU")
    add("--allow-extrapolation", action="store_true", help="measure beyond the context length of the config")
    add("--output", type=path("--output"), metavar="FILE", help="JSON file for the results")
    add("--overwrite", action="store_true", help="replace the file of --output")
    add("--dtype", help="auto, float32, bfloat16, float16 (default: auto, bfloat16 on a GPU)")
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--debug", action="store_true", help="show tracebacks")
    return parser
