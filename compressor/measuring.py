"""The stage `evaluate` of a run: the written checkpoint against the original, on text and prompts."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from compressor.architectures.masking import ScaledOutput
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.evaluating import measure_lm_eval, resolved_settings
from compressor.evaluation.measure import Material, Measured, compare
from compressor.evaluation.pairing import differences
from compressor.evaluation.results import ModelFigures, collect, mean_of_scores
from compressor.loading import load_model
from compressor.planning import RunPlan
from compressor.progress import StageReporter
from compressor.report import EvaluationReport, NormEpsilonFigures

HELD_OUT_NAME = "held-out calibration text"


def evaluate_cut(
    plan: RunPlan, material: Material, original: PreTrainedModel, folder: Path, reporter: StageReporter
) -> EvaluationReport:
    """The reloaded folder against the original, and how the cut would fare with the other norm epsilon.

    Raises:
        RunError: a figure is NaN or infinite.
    """
    if plan.evaluation is None:
        raise ValueError("the plan has no evaluation")
    architecture, tokenizer = plan.source.architecture, plan.tokenizer
    compressed = load_model(architecture, folder, read_config(folder / CONFIG_FILE), plan.dtype, plan.device)
    name = plan.source.checkpoint.folder.name
    policy = plan.recipe.selection.norm_epsilon
    other = "keep" if policy == "scaled" else "scaled"
    forced = replace(material, mode="teacher-forced")
    with reporter.stage("evaluating", material.tokens(2) + forced.tokens(2)) as advance:
        before, after = compare(original, compressed, tokenizer, material, advance)
        with _with_other_epsilon(plan, compressed):
            _, alternative = compare(original, compressed, tokenizer, forced, advance)
    tasks = plan.evaluation.lm_eval
    lm_eval = [measure_lm_eval(model, tokenizer, tasks, plan.evaluation, reporter) for model in (original, compressed)]
    cut = plan.cut
    old = collect(name, cut.key_dim.before, cut.state_bytes.before, None, before.texts, before.tasks, lm_eval[0])
    new = collect(
        plan.output.path.name, cut.key_dim.after, cut.state_bytes.after, name, after.texts, after.tasks, lm_eval[1]
    )
    return EvaluationReport(
        before=old,
        after=new,
        differences=differences(old, new),
        by_norm_epsilon={policy: _summary(new), other: _summary(_collect_alternative(new, alternative))},
        settings=resolved_settings(plan.evaluation),
    )


def _with_other_epsilon(plan: RunPlan, compressed: PreTrainedModel) -> AbstractContextManager[None]:
    """The recurrence's output at the scale that the other policy would give the norm behind it."""
    if plan.cut.keep == plan.cut.key_dim.before:
        return nullcontext()
    architecture = plan.source.architecture
    kept_scale = math.sqrt(plan.cut.key_dim.before / plan.cut.key_dim.after)
    factor = kept_scale if plan.recipe.selection.norm_epsilon == "scaled" else 1 / kept_scale
    mixers = architecture.mixers(compressed.config, list(plan.source.shapes))
    return architecture.tapped(compressed, mixers, ScaledOutput(factor))


def _collect_alternative(figures: ModelFigures, measured: Measured) -> ModelFigures:
    return collect(
        figures.model,
        figures.key_dim,
        figures.state_bytes_per_sequence,
        figures.reference,
        measured.texts,
        measured.tasks,
    )


def _summary(figures: ModelFigures) -> NormEpsilonFigures:
    memory = mean_of_scores([task.score for task in figures.tasks])
    return NormEpsilonFigures(figures.kl_text, figures.kl_prompts, None if memory is None else memory.mean)
