"""Whether a folder can be recovered, and whether a model is its teacher: known before any weight is loaded.

Every function raises RequestError where the answer is no.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from compressor.calibration.tokenizer import load_tokenizer
from compressor.checkpoint.config_file import CONFIG_FILE
from compressor.checkpoint.presence import no_folder
from compressor.checkpoint.source import ADAPTER_FILE
from compressor.errors import RequestError
from compressor.evaluation.tokenizer_identity import tokenizer_sha256
from compressor.preparation import ConfiguredModel, Source, open_model
from compressor.recipe import Recipe
from compressor.recipe_file import load_settings
from compressor.report import SCHEMA, Report
from compressor.reporting import read_compression
from compressor.verification.changed import refitted_tensors
from compressor.verification.request import adapter_targets
from compressor.verification.run import Original
from compressor.verification.slices import first_difference, read_selection


def read_folder(folder: Path) -> tuple[Report, Recipe]:
    """What the folder says of itself; nothing in it may be missing, or be of a training that would be lost."""
    problem = no_folder(folder)
    if problem is not None:
        raise RequestError(f"{problem}; give a folder that compress wrote.")
    if (folder / ADAPTER_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
        raise RequestError(
            f"{folder} holds an adapter ({ADAPTER_FILE}) and no model; give the folder that compress wrote and the "
            "adapter was saved beside."
        )
    content = read_compression(folder)
    if content is None or not (folder / "recipe.yaml").is_file():
        missing = "compression.json" if content is None else "recipe.yaml"
        raise RequestError(
            f"{folder} has no readable {missing}: it was not compressed; give a folder that compress wrote."
        )
    try:
        report = TypeAdapter(Report).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _another_version(folder, f"{place}: {first['msg']}") from None
    if report.schema != SCHEMA:
        raise _another_version(folder, f"schema {report.schema} instead of {SCHEMA}")
    if report.recovery is not None and report.recovery.training is not None:
        raise RequestError(
            f"{folder} was trained already ({report.recovery.training.steps:,} steps); recover the folder that it was "
            "made from, with more --sequences."
        )
    return report, Recipe.from_settings(load_settings(folder / "recipe.yaml"), f"{folder}/recipe.yaml")


def _another_version(folder: Path, problem: str) -> RequestError:
    return RequestError(
        f"{folder / 'compression.json'}: {problem}; it was written by another version: compress the original again."
    )


def open_teacher(teacher: str | None, folder: Path, recipe: Recipe) -> ConfiguredModel:
    """The model that is named, or else the one that `folder` was cut from."""
    if teacher is not None:
        return open_model(teacher, None)
    try:
        return open_model(recipe.model, recipe.revision)
    except RequestError as error:
        raise RequestError(
            f"the model that {folder} was cut from was not found ({error}); name it with --teacher."
        ) from error


def refuse_other_teacher(student: ConfiguredModel, teacher: ConfiguredModel) -> None:
    if student.architecture is not teacher.architecture and type(student.architecture) is not type(
        teacher.architecture
    ):
        raise RequestError(
            f"--teacher {teacher.folder.name} is of another model family than {student.folder.name}; give the model "
            "that it was cut from."
        )
    sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"--teacher {teacher.folder.name} has a vocabulary of {sizes[0]:,} tokens and {student.folder.name} one of "
            f"{sizes[1]:,}; give the model that it was cut from."
        )
    if len(student.mixers) != len(teacher.mixers):
        raise RequestError(
            f"--teacher {teacher.folder.name} has {len(teacher.mixers)} linear-attention layers and "
            f"{student.folder.name} has {len(student.mixers)}; give the model that it was cut from."
        )
    widths = [each.mixers[0].head_k_dim for each in (teacher, student)]
    if widths[0] <= widths[1]:
        raise RequestError(
            f"--teacher {teacher.folder.name} has a key width of {widths[0]} and {student.folder.name} one of "
            f"{widths[1]}: it can teach nothing that was cut; give the model that it was cut from."
        )


def refuse_changed_cut(student: Source, teacher: Source, report: Report) -> None:
    """Hold every tensor of the student that was not refitted, as `report` says, against the teacher's slices."""
    refit = None if report.recovery is None else report.recovery.refit
    kept = refit.layers if refit is not None and refit.kept else []
    refitted = {layer.layer for layer in kept if layer.ridge is not None}
    folder, architecture = student.folder, student.architecture
    selection = read_selection(folder, student.mixers)
    own = refitted_tensors(architecture, folder, refitted)
    name = first_difference(architecture, teacher.folder, folder, selection, own)
    if name is not None:
        raise RequestError(
            f"{folder}: {name} is not the slice of the teacher's that selection.json says; recover the folder as "
            "compress wrote it, or compress the original again."
        )


def trained_original(teacher: Source, report: Report, recipe: Recipe) -> Original:
    """The teacher, to hold against it what a training by `recipe` leaves alone of the cut that `report` describes."""
    refit = None if report.recovery is None else report.recovery.refit
    scaled, refitted = recipe.selection.norm_epsilon == "scaled", refit is not None and refit.kept
    return Original(teacher.folder, scaled, refitted, True, adapter_targets(recipe))


def refuse_other_tokenizer(
    tokenizer: PreTrainedTokenizerBase, teacher: ConfiguredModel, trust_remote_code: bool
) -> None:
    other = load_tokenizer(teacher.folder.path, trust_remote_code)
    if tokenizer_sha256(other) != tokenizer_sha256(tokenizer):
        raise RequestError(
            f"--teacher {teacher.folder.name} has a tokenizer that encodes text differently, so the same tokens are "
            "another text to it; give the model that the folder was cut from."
        )
