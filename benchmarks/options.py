"""What the options of the benchmarks may be, known before any work. One name means the same in all of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from benchmarks.environment import check_output
from benchmarks.output_files import check_figure
from compressor.calibration.text import TextSource, open_documents
from compressor.checkpoint.config_file import CONFIG_FILE
from compressor.errors import RequestError
from compressor.loading import resolve_device
from compressor.preparation import Source, open_model, open_source
from compressor.recipe import RuntimeSection
from compressor.section import describe, refuse_doubles
from compressor.selection.registry import build_selector
from compressor.selection.request import check_f

Section = TypeVar("Section", bound=BaseModel)
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Limit:
    """Of a number, or of each of several."""

    words: str
    holds: Callable[[float], bool]


_AT_LEAST_0 = Limit("at least 0", lambda value: value >= 0)
_AT_LEAST_1 = Limit("at least 1", lambda value: value >= 1)
_AT_LEAST_2 = Limit("at least 2", lambda value: value >= 2)
_INSIDE = Limit("above 0 and below 1", lambda value: 0 < value < 1)
_ABOVE_0 = Limit("above 0 and at most 1", lambda value: 0 < value <= 1)
_SHARE = Limit("0 to 1", lambda value: 0 <= value <= 1)
_SEED = Limit("0 to 2^63 - 1", lambda value: 0 <= value < 2**63)

_NAMES = {
    _AT_LEAST_0: "budget_seconds time_limit warm_up widths_prefill",
    _AT_LEAST_1: """all_widths batch_size batch_sizes calibration_samples call_steps documents every head_dim heads
        held_out hidden_size key_widths layers memory_prompts micro_batch_size mixer_batch_sizes mixer_length num_heads
        prompt_length prompt_piece prompts pruning_samples rank repeats repetitions samples states step steps
        test_lengths test_samples threads windows""",
    _AT_LEAST_2: "length prefill_lengths sequence_length window window_length",
    _INSIDE: "ratio ratios",
    _ABOVE_0: "learning_rate shares",
    _SHARE: "retrieval_share weight_decay",
    _SEED: "seed seeds",
}
LIMITS: Mapping[str, Limit] = {name: limit for limit, names in _NAMES.items() for name in names.split()}
"""By the name of an option that holds a number, or several."""
_PAIRS = ("cut", "train_lengths")
"""Options with two values, each of which means something else, so that both may be the same."""


def check_options(arguments: argparse.Namespace) -> None:
    """Numbers within their limits, nothing named twice, a device that is there, and files that can be written.

    Raises:
        RequestError: an option is not as it must be.
    """
    given = vars(arguments)
    for name, value in given.items():
        option, values = f"--{name.replace('_', '-')}", value if isinstance(value, list) else [value]
        for each in values:
            if name in LIMITS and each is not None and not LIMITS[name].holds(each):
                raise RequestError(f"{option} {each:g} is outside its limits; give {LIMITS[name].words}.")
        if name not in _PAIRS:
            refuse_doubles(option, values)
    if "f" in given:
        check_f(arguments.f)
    output, figures = given.get("output"), [given.get("figure"), given.get("heads_figure")]
    check_output(output)
    for figure in figures:
        check_figure(figure)
    files = [path.resolve() for path in (output, *figures) if path is not None]
    if len(set(files)) < len(files):
        raise RequestError(f"{files[0]} is named for two results; name a file for each.")
    if "device" in given:
        check_device(arguments.device)


def check_device(name: str) -> None:
    """Raises RequestError for no device, or one that this machine does not show."""
    resolve_device(section(RuntimeSection, {"device": name}).device)


def section(kind: type[Section], settings: Mapping[str, object]) -> Section:
    """A section of a recipe, of options that have the names of its settings. Raises RequestError for a wrong one."""
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise RequestError(f"--{describe(error, kind)[0].removesuffix('.')}.") from error


def check_folder(option: str, folder: Path | None) -> Path:
    """The folder of an option. Raises RequestError where none is named, or what is named is none."""
    if folder is None or not folder.is_dir():
        given = f"--{option} is missing" if folder is None else f"--{option} {folder} is no folder"
        raise RequestError(f"{given}; name a folder, or --results to print what was measured.")
    return folder


def model_folders(folder: Path) -> list[Path]:
    """Those below `folder`, by name."""
    return sorted(path for path in folder.iterdir() if (path / CONFIG_FILE).exists())


def check_models(folder: Path | None, only: Sequence[str] | None) -> None:
    """Raises RequestError where there is no such folder, or it has no model folder of a name in `only`."""
    found = check_folder("models", folder)
    names = [path.name for path in model_folders(found)]
    for name in only or ():
        if name not in names:
            raise RequestError(f"--only {name} is no model folder in {found}, which has {', '.join(names) or 'none'}.")


def check_text_folder(folder: Path | None, texts: Sequence[str]) -> None:
    """Raises RequestError where the folder, or the test text of one of these names in it, is missing or empty."""
    found = check_folder("text", folder)
    for name in texts:
        check_text(str(found / f"test_{name}.txt"), held_out=True)


def check_text(name: str, held_out: bool = False) -> None:
    """Raises RequestError where a text, named as `compress --calibration` takes it, is missing or has nothing in it."""
    if not name:
        raise RequestError("a text is named by no word; give a file, a folder, a Hub data set (org/name), or demo.")
    open_documents(TextSource(name, held_out=held_out))


def check_folders(arguments: argparse.Namespace, texts: Sequence[str]) -> None:
    """Raises RequestError as `check_models` and `check_text_folder`."""
    check_models(arguments.models, arguments.only)
    check_text_folder(arguments.text, texts)


def check_methods(methods: Sequence[str]) -> None:
    """Raises RequestError for a method that is not known, or that chooses nothing from statistics alone."""
    for method in methods:
        build_selector(method, "qk", 1.5)


def check_widths(source: Source, ratios: Sequence[float]) -> None:
    """Raises RequestError for a share removed that leaves a head of the model no channel, or, above 0, all of them."""
    width = source.mixers[0].head_k_dim
    for ratio in ratios:
        if ratio > 0 and round(width * (1 - ratio)) == width:
            raise RequestError(
                f"a ratio of {ratio:g} removes none of the {width} key channels of {source.folder.name}; "
                f"give at least {1 / width:g}."
            )
        if round(width * (1 - ratio)) < 1:
            raise RequestError(
                f"a ratio of {ratio:g} leaves none of the {width} key channels of {source.folder.name}; "
                f"give at most {1 - 1 / width:g}."
            )


def open_sources(names: Sequence[str | Path], option: str) -> list[Source]:
    """The models of these names, all opened before the first is measured. Raises RequestError where one cannot be."""
    if not names:
        raise RequestError(f"{option} is missing; name model folders, or --results to print what was measured.")
    return [open_source(open_model(str(name), None)) for name in names]
