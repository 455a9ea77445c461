"""Train the compressed checkpoint of a folder with the original as teacher, and write what it learnt back into it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from compressor.architectures.base import Architecture
from compressor.calibration.tokens import token_sha256
from compressor.checkpoint.config_file import CONFIG_FILE, dump_config, read_config
from compressor.checkpoint.headers import read_headers, read_tensor
from compressor.context_length import refuse_sequences_beyond
from compressor.copying import copy_tree
from compressor.data_parallel import Processes
from compressor.errors import RequestError
from compressor.evaluation.measure import Material, measure
from compressor.export.disk import translate_write_errors
from compressor.export.replacement import replace_tensors
from compressor.loading import build_skeleton, load_model, refused_by_stock_classes
from compressor.naming import Naming, option_of
from compressor.progress import Advance, StageReporter
from compressor.recipe import CalibrationSection, RecoverySection
from compressor.recovery.checkpoints import checkpoints_in, refuse_other_settings, refuse_without_resume
from compressor.recovery.log import StepRecord, draw_curve
from compressor.recovery.settings import Identity, TrainingSettings
from compressor.recovery.student import Student, StudentSettings, StudentSummary, prepare_student
from compressor.recovery.tracking import FIGURES_FOLDER, refuse_missing_tracker, written_figures
from compressor.recovery.training import TrainingResult, train
from compressor.retrieval_shares import too_small_training_share_note
from compressor.retrieval_tokens import calibration_forms
from compressor.training_settings import rounding_note, training_settings
from compressor.training_space import TrainingSpace, stored_bytes
from compressor.training_tokens import TrainingTokens, open_training_text

CURVE_FILE = "training.png"

Figures = Callable[[PreTrainedModel], Mapping[str, float]]
"""Held-out figures of a model by name, for the log of the training."""


class UntrainableCutError(RequestError):
    """The widths of a cut do not allow what is to be trained."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPlan:
    """A checked request to train: the settings of the parts, the opened text and the first batch."""

    section: RecoverySection
    source: str
    student: StudentSettings
    training: TrainingSettings
    space: TrainingSpace
    tokens: TrainingTokens
    first_batch: Tensor
    name: Naming

    def run_key(self, *parts: str) -> str:
        """Tells runs apart that must not go on from each other's checkpoints; `parts` name the two models."""
        return hashlib.sha256("\n".join([*parts, token_sha256(list(self.first_batch))]).encode()).hexdigest()

    def decided(self) -> Identity:
        """Settings beside those of `training` that decide what is learnt."""
        student = self.student
        targets = "default" if student.targets is None else ",".join(student.targets)
        # Those of adapters decide nothing without them.
        lora: Identity = {"rank": student.rank, "alpha": student.alpha, "targets": targets}
        return {
            "trainable": student.trainable,
            **(lora if student.trainable == "lora" else {}),
            "source": self.source,
            "retrieval_share": self.section.retrieval_share,
        }

    def refuse_checkpoints(self, work: Path, resume: bool) -> None:
        """Refuse before any work what `train_folder` would refuse of the checkpoints in `work`, as far as it shows.

        Raises:
            RequestError: there are some without `resume`, the newest is of a run with other settings, or there is too
                little space for those to come and for the output.
        """
        refuse_without_resume(work, resume)
        refuse_other_settings(work, self.training.identity() | self.decided())
        self.space.refuse_too_little(work, self.training.steps, self.training.checkpoint_every)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training run did."""

    summary: StudentSummary
    last: StepRecord
    steps: int
    resumed_step: int


def plan_training(
    section: RecoverySection,
    calibration: CalibrationSection,
    architecture: Architecture,
    cut_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    name: Naming = option_of,
) -> TrainingPlan:
    """Refuse what cannot be trained; reads no weights, and as much of the text as the first batch takes.

    Messages call a setting `name(setting)`.

    Raises:
        RequestError: a length, share or text that does not fit the compressed model; an `UntrainableCutError` where a
            rank or target does not.
    """
    refuse_missing_tracker(section.tracker)
    seed = seed if section.seed is None else section.seed
    training = training_settings(section, seed, name)
    targets = None if section.targets is None else tuple(section.targets)
    student = StudentSettings(section.trainable, section.rank, section.alpha, targets, seed)
    decoder, space = check_student(architecture, cut_config, student)
    if section.save_adapter is not None:
        space.refuse_too_little_for_adapter(section.save_adapter, name)
    length = section.sequence_length
    refuse_sequences_beyond(length, name("recovery.sequence_length", length), decoder)
    if section.retrieval_share:
        calibration_forms(tokenizer, length, name, "recovery")
    documents = open_training_text(section, calibration)
    tokens = TrainingTokens(
        documents=documents,
        tokenizer=tokenizer,
        vocab_size=decoder.vocab_size,
        steps=section.steps,
        batch_size=section.batch_size,
        sequence_length=section.sequence_length,
        retrieval_share=section.retrieval_share,
        seed=seed,
    )
    return TrainingPlan(section, documents.source.name, student, training, space, tokens, next(iter(tokens)), name)


def held_out_figures(
    plan: TrainingPlan, material: Material | None, tokenizer: PreTrainedTokenizerBase
) -> Figures | None:
    """Loss on the material's texts and scores of its prompts, teacher-forced; None where training asks for none."""
    if material is None or plan.section.evaluate_every == 0:
        return None
    forced = replace(material, mode="teacher-forced")

    def figures(model: PreTrainedModel) -> Mapping[str, float]:
        measured = measure(model, tokenizer, forced, lambda tokens: None)
        losses = {f"loss on {text.name}": text.figures.loss.mean or 0.0 for text in measured.texts}
        return losses | {f"{task.task} at {task.length}": task.score.mean for task in measured.tasks}

    return figures


def check_student(
    architecture: Architecture, cut_config: Mapping[str, Any], student: StudentSettings
) -> tuple[PretrainedConfig, TrainingSpace]:
    """The decoder's config of the cut model, on whose shapes the settings are checked, and what training it takes.

    Raises:
        UntrainableCutError: they do not fit the shapes.
        RequestError: the stock classes make no model of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_FILE).write_text(dump_config(dict(cut_config)), encoding="utf-8")
        with refused_by_stock_classes(None):
            skeleton = build_skeleton(architecture, Path(folder), dict(cut_config))
    mixers = architecture.mixers(skeleton.config, [name for name, _ in skeleton.named_parameters()])
    output_bytes = stored_bytes(skeleton)
    try:
        # On the meta device, where it takes no memory.
        summary = prepare_student(architecture, skeleton, mixers, student).summary()
    except RequestError as error:
        raise UntrainableCutError(str(error)) from error
    decoder: PretrainedConfig = skeleton.config.get_text_config(decoder=True)
    return decoder, TrainingSpace(summary.trainable_parameters, output_bytes)


@dataclass(frozen=True, slots=True)
class TrainingFolders:
    """`checkpoint` is trained in place; `work` holds what a resumed run goes on from; `adapter` takes the adapter
    before it is merged, where one is to be saved."""

    checkpoint: Path
    work: Path
    adapter: Path | None


def train_folder(
    plan: TrainingPlan,
    architecture: Architecture,
    teacher: PreTrainedModel,
    folders: TrainingFolders,
    run_key: str,
    resume: bool,
    evaluate: Figures | None,
    processes: Processes,
    reporter: StageReporter,
) -> Trained:
    """Train a checkpoint and replace its tensors; `training.jsonl` and the curve are put beside them.

    Every process trains, and the main one writes. `teacher` gives the device. On a GPU the student computes in
    bfloat16 and holds in it what is not trained; what is trained and merged is taken from the files, in float32.

    Raises:
        RequestError, RunError: see `compressor.recovery.training.train`.
    """
    device, folder = teacher.device, folders.checkpoint
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(architecture, folder, read_config(folder / CONFIG_FILE), dtype, device)
    entries = read_headers(folder).entries
    mixers = architecture.mixers(model.config, list(entries))
    student = prepare_student(architecture, model, mixers, plan.student)
    student.take_exact(lambda name: read_tensor(entries[name]))
    accelerator = Accelerator(cpu=device.type == "cpu", log_with=plan.section.tracker, project_dir=str(folders.work))
    for note in _notes(plan, device):
        reporter.say(f"note: {note}")
    # The gradients of the first step would wait for a process that is still loading, and with a limit.
    processes.wait_for_all()
    with reporter.stage("training", plan.training.steps * plan.section.batch_size, "sequences") as advance:
        result = train(
            model,
            student.trainable_parameters(),
            teacher,
            architecture,
            mixers,
            lambda step: plan.tokens.after(step).loaded(workers=int(device.type == "cuda")),
            plan.training,
            folders.work,
            resume,
            accelerator,
            _on_step(plan, advance, reporter),
            None if evaluate is None else lambda step: evaluate(model),
            run_key=run_key,
            decided=plan.decided(),
            name=plan.name,
            on_note=reporter.say,
        )
    if processes.is_main:
        _tell_of_a_missing_checkpoint(folders.work, result.last.step, reporter)
        _write_trained(plan, student, result, folders)
    return Trained(student.summary(), result.last, plan.training.steps, result.resumed_step)


def _notes(plan: TrainingPlan, device: torch.device) -> Iterator[str]:
    if plan.section.sequences % plan.section.batch_size:
        yield rounding_note(plan.section)
    if plan.section.retrieval_share and not plan.tokens.prompts_before(plan.training.steps):
        yield too_small_training_share_note(plan.section)
    if device.type == "cuda":
        yield "the first step compiles and tunes the GPU's kernels, which can take minutes."


def _on_step(plan: TrainingPlan, advance: Advance, reporter: StageReporter) -> Callable[[StepRecord], None]:
    def on_step(record: StepRecord) -> None:
        advance(plan.section.batch_size)
        if record.step % max(1, plan.training.steps // 20) == 0:
            rate = f"{record.tokens_per_second:,.0f} tokens/s"
            reporter.say(f"step {record.step:,}: loss {record.loss:.4f}, KL {record.kl:.4f}, {rate}")

    return on_step


def _tell_of_a_missing_checkpoint(work: Path, step: int, reporter: StageReporter) -> None:
    present = [path.name for path in checkpoints_in(work)]
    if f"checkpoint-{step}" not in present:
        before = f"--resume goes on from {present[0]}" if present else "the training has to be done again"
        reporter.say(
            f"note: the last checkpoint could not be written to {work} (see the room on its file system); the result "
            f"is written without it, and should that fail, too, {before}."
        )


def _write_trained(plan: TrainingPlan, student: Student, result: TrainingResult, folders: TrainingFolders) -> None:
    folder = folders.checkpoint
    entries = read_headers(folder).entries
    dtypes = {name: entry.torch_dtype for name, entry in entries.items()}
    replace_tensors(folder, student.merged_tensors(dtypes, lambda name: read_tensor(entries[name])))
    (folder / result.log.name).write_bytes(result.log.read_bytes())
    draw_curve(result.log, folder / CURVE_FILE)
    figures = written_figures(folders.work)
    if figures is not None:
        copy_tree(figures, folder / FIGURES_FOLDER, Path(FIGURES_FOLDER))
    if folders.adapter is not None:
        with translate_write_errors(Path(plan.section.save_adapter or folders.adapter), None):
            student.save_adapter(folders.adapter)
