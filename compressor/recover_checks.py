"""Whether a folder can be recovered, and whether a model is its teacher: known before any weight is loaded.

Every function raises RequestError where the answer is no.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from compressor.calibration.tokenizer import load_tokenizer
from compressor.checkpoint.config_file import CONFIG_FILE
from compressor.checkpoint.fingerprint import joint_sha256
from compressor.checkpoint.presence import no_folder
from compressor.checkpoint.source import ADAPTER_FILE
from compressor.errors import RequestError
from compressor.evaluation.tokenizer_identity import tokenizer_sha256
from compressor.export.file_records import differences
from compressor.preparation import ConfiguredModel, Source, open_model
from compressor.recipe import Recipe
from compressor.recipe_file import load_settings
from compressor.report import SCHEMA, Report
from compressor.reporting import read_compression
from compressor.verification.changed import refitted_tensors
from compressor.verification.configs import config_difference
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


@dataclass(frozen=True, slots=True)
class TeacherName:
    """What messages call a teacher, and what they advise where it is another model than it must be."""

    words: str
    remedy: str


def teacher_name(teacher: ConfiguredModel, given: str | None) -> TeacherName:
    """`given` is what the user named, None where it is the model that the folder's recipe names."""
    if given is not None:
        return TeacherName(f"--teacher {teacher.folder.name}", "give the model that it was cut from")
    model = teacher.folder
    place = model.path if model.revision is None else f"{model.name} ({model.revision})"
    remedy = "it changed since the cut: give the place of the original as it was with --teacher"
    return TeacherName(f"the model at {place}", remedy)


def refuse_other_teacher(student: ConfiguredModel, teacher: ConfiguredModel, called: TeacherName) -> None:
    """By what the configs alone say."""
    if student.architecture is not teacher.architecture and type(student.architecture) is not type(
        teacher.architecture
    ):
        raise RequestError(f"{called.words} is of another model family than {student.folder.name}; {called.remedy}.")
    sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"{called.words} has a vocabulary of {sizes[0]:,} tokens and {student.folder.name} one of {sizes[1]:,}; "
            f"{called.remedy}."
        )
    if len(student.mixers) != len(teacher.mixers):
        raise RequestError(
            f"{called.words} has {len(teacher.mixers)} linear-attention layers and {student.folder.name} has "
            f"{len(student.mixers)}; {called.remedy}."
        )
    widths = [each.mixers[0].head_k_dim for each in (teacher, student)]
    if widths[0] <= widths[1]:
        raise RequestError(
            f"{called.words} has a key width of {widths[0]} and {student.folder.name} one of {widths[1]}: it can teach "
            f"nothing that was cut; {called.remedy}."
        )


def refuse_other_config(student: ConfiguredModel, teacher: ConfiguredModel, recipe: Recipe) -> None:
    """Hold the student's config against that of the cut by `recipe`: training would make up for what was edited."""
    scaled = recipe.selection.norm_epsilon == "scaled"
    difference = config_difference(student.architecture, teacher.folder.path, student.folder.path, scaled)
    if difference is not None:
        raise RequestError(f"{difference}; set it back, or compress the original again.")


def refuse_other_selection(student: ConfiguredModel, teacher: ConfiguredModel) -> None:
    """Hold selection.json against both widths; the weights are held against it once they were hashed."""
    selection, width = read_selection(student.folder.path, student.mixers), teacher.mixers[0].head_k_dim
    if selection.head_k_dim != width:
        raise RequestError(
            f"{student.folder.path / 'selection.json'} names channels of {selection.head_k_dim} of a head and the "
            f"original has {width}; restore the file, or compress the original again."
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


def refuse_changed_files(student: Source, sha256: str, report: Report) -> None:
    """Hold the weight files, whose hash together is `sha256`, against what the cut recorded of them: a refit leaves
    projections that nothing else tells from changed ones. Earlier versions recorded nothing."""
    folder, names = student.folder, sorted(path.name for path in student.checkpoint.index.files)
    recorded = {name: report.files[name] for name in names if name in report.files}
    if not report.files or sha256 == joint_sha256({name: record.sha256 for name, record in recorded.items()}):
        return
    found = differences(folder, recorded)
    foreign = [(name, "was not written by compress") for name in names if name not in recorded]
    for name, how in (*foreign, *found):
        raise RequestError(
            f"{folder}: {name} {how}; recover the folder as compress wrote it, or compress the original again."
        )


def trained_original(teacher: Source, report: Report, recipe: Recipe) -> Original:
    """The teacher, to hold against it what a training by `recipe` leaves alone of the cut that `report` describes."""
    refit = None if report.recovery is None else report.recovery.refit
    scaled, refitted = recipe.selection.norm_epsilon == "scaled", refit is not None and refit.kept
    return Original(teacher.folder, scaled, refitted, True, adapter_targets(recipe))


def refuse_other_tokenizer(
    tokenizer: PreTrainedTokenizerBase, teacher: ConfiguredModel, called: TeacherName, trust_remote_code: bool
) -> None:
    other = load_tokenizer(teacher.folder.path, trust_remote_code)
    if tokenizer_sha256(other) != tokenizer_sha256(tokenizer):
        raise RequestError(
            f"{called.words} has a tokenizer that encodes text differently, so the same tokens are another text to "
            f"it; {called.remedy}."
        )
