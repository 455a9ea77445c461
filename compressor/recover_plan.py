"""A request to recover a folder, opened and checked before any weight is loaded or hashed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from compressor.adapter_output import plan_adapter
from compressor.calibration.text import DEMO
from compressor.calibration.tokenizer import load_tokenizer
from compressor.distilling import TrainingPlan, plan_training
from compressor.export.advice import WITH_RESUME
from compressor.export.disk import refuse_too_little_space
from compressor.export.folder import OutputFolder
from compressor.home_folders import expanded
from compressor.loading import resolve_device, resolve_dtype
from compressor.material import EvaluationPlan, plan_evaluation
from compressor.naming import keys_in
from compressor.planning import RunOptions
from compressor.preparation import Source, open_model, open_source
from compressor.recipe import Recipe, RecoverySection, RuntimeSection
from compressor.recover_checks import (
    TeacherName,
    open_teacher,
    read_folder,
    refuse_other_config,
    refuse_other_selection,
    refuse_other_teacher,
    refuse_other_tokenizer,
    teacher_name,
)
from compressor.report import Report
from compressor.shared_output import resume_folder_of
from compressor.texts_read import refuse_outputs_among, texts_of
from compressor.training_settings import refuse_idle_settings, training_settings

_ADVICE = replace(WITH_RESUME, too_large="compress again with a smaller --max-shard-size")
"""Shards stay as they are."""


@dataclass(frozen=True)
class RecoverRequest:
    """What `compress recover` was asked. `teacher` None is the model that the folder's recipe names."""

    folder: Path
    teacher: str | None
    output_dir: Path | None
    section: RecoverySection
    runtime: RuntimeSection
    options: RunOptions
    evaluate: bool = True
    verify: bool = True


@dataclass(frozen=True)
class RecoverPlan:
    """Opened inputs: the compressed folder, its report and recipe, and its teacher."""

    student: Source
    teacher: Source
    called: TeacherName
    report: Report
    recipe: Recipe
    training: TrainingPlan
    evaluation: EvaluationPlan | None
    tokenizer: PreTrainedTokenizerBase
    output: OutputFolder
    adapter: OutputFolder | None
    device: torch.device
    dtype: torch.dtype

    @property
    def training_folder(self) -> Path:
        return resume_folder_of(self.output) / "training"

    @property
    def outputs(self) -> tuple[OutputFolder, ...]:
        """Every folder that the run writes, the checkpoint's first."""
        return (self.output,) if self.adapter is None else (self.output, self.adapter)


def plan_recovery(request: RecoverRequest) -> RecoverPlan:
    """Open everything and refuse what cannot be done, before any weight is loaded.

    Raises:
        RequestError: the folder is no compressed one, the teacher is not its teacher, or the training is impossible.
    """
    folder, runtime = expanded(request.folder), request.runtime
    training_settings(request.section, runtime.seed, request.options.name)
    refuse_idle_settings(request.section, request.evaluate, request.options.name)
    device = resolve_device(runtime.device, request.options.name)
    report, old = read_folder(folder)
    configured = open_model(str(folder), None)
    output_dir = expanded(request.output_dir or folder.with_name(f"{folder.name}-recovered"))
    section = request.section.model_copy(update={"train": True, "refit": old.recovery.refit, "seed": runtime.seed})
    recipe = old.model_copy(update={"recovery": section, "output_dir": str(output_dir)})
    teacher = open_teacher(request.teacher, folder, old)
    called = teacher_name(teacher, request.teacher)
    refuse_other_teacher(configured, teacher, called)
    refuse_other_config(configured, teacher, old)
    refuse_other_selection(configured, teacher)
    output = OutputFolder(output_dir, request.options.overwrite, _ADVICE)
    output.check(folder)
    adapter = plan_adapter(section, output, folder, True, request.options.name)
    refuse_outputs_among(texts_of(recipe), (output, adapter))
    tokenizer = load_tokenizer(folder, runtime.trust_remote_code)
    refuse_other_tokenizer(tokenizer, teacher, called, runtime.trust_remote_code)
    student = open_source(configured)
    cut = (configured.architecture, configured.raw_config)
    training = plan_training(section, old.calibration, *cut, tokenizer, runtime.seed, request.options.name)
    refuse_too_little_space(output.path, sum(path.stat().st_size for path in student.checkpoint.index.files))
    dtype = resolve_dtype(runtime.dtype, device, configured.architecture, request.options.name)
    return RecoverPlan(
        student=student,
        teacher=open_source(teacher),
        called=called,
        report=report,
        recipe=recipe,
        training=training,
        evaluation=_evaluation(request, old, student, tokenizer),
        tokenizer=tokenizer,
        output=output,
        adapter=adapter,
        device=device,
        dtype=dtype,
    )


def _evaluation(
    request: RecoverRequest, recipe: Recipe, student: Source, tokenizer: PreTrainedTokenizerBase
) -> EvaluationPlan | None:
    """As the cut by `recipe` was measured; None where nothing is."""
    if not request.evaluate:
        return None
    asked, texts = recipe.evaluation, recipe.evaluation.texts or [DEMO]
    seed, name = request.runtime.seed, keys_in("evaluation")
    return plan_evaluation(asked, student.config, tokenizer, seed, texts, name=name)
