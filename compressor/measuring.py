"""The stage `evaluate` of a run: the written checkpoint against the original, on text and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.masking import ScaledOutput
from compressor.checkpoint.config_file import CONFIG_FILE, read_config
from compressor.checkpoint.headers import read_tensor
from compressor.evaluating import measure_lm_eval, resolved_settings
from compressor.evaluation.measure import Material, Measured, compare
from compressor.evaluation.pairing import differences
from compressor.evaluation.results import ModelFigures, collect, mean_of_scores
from compressor.placing import load_placed
from compressor.planning import RunPlan
from compressor.progress import StageReporter
from compressor.recipe import NormEpsilon
from compressor.refitting import Recovered
from compressor.report import EvaluationReport, NormEpsilonFigures

HELD_OUT_NAME = "held-out calibration text"


def evaluate_cut(
    plan: RunPlan,
    material: Material,
    original: PreTrainedModel,
    folder: Path,
    recovered: Recovered | None,
    reporter: StageReporter,
) -> EvaluationReport:
    """The reloaded folder against the original, and how the cut would fare with the other norm epsilon.

    The other epsilon is measured with the output projections that were refitted under it; where they were refitted
    under one alone, it is not measured.

    Raises:
        RunError: a figure is NaN or infinite.
    """
    if plan.evaluation is None:
        raise ValueError("the plan has no evaluation")
    architecture, tokenizer = plan.source.architecture, plan.tokenizer
    compressed = load_placed(plan, folder, read_config(folder / CONFIG_FILE))
    name = plan.source.checkpoint.folder.name
    policy = plan.recipe.selection.norm_epsilon
    other: NormEpsilon = "keep" if policy == "scaled" else "scaled"
    writable = architecture.scales_by_width and architecture.norm_epsilon_in_config
    comparable = writable and (recovered is None or other in recovered.candidates or recovered.chosen.refit is None)
    for note in material.notes:
        reporter.say(f"note: {note}")
    forced = replace(material, mode="teacher-forced")
    alternative = None
    with reporter.stage("evaluating", material.tokens(2) + comparable * forced.tokens(2)) as advance:
        before, after = compare(original, compressed, tokenizer, material, advance)
        if comparable:
            with _with_other_epsilon(plan, compressed), _with_projections(plan, compressed, recovered, other):
                _, alternative = compare(original, compressed, tokenizer, forced, advance)
    tasks = plan.evaluation.lm_eval
    lm_eval = [measure_lm_eval(model, tokenizer, tasks, plan.evaluation, reporter) for model in (original, compressed)]
    cut = plan.cut
    old = collect(name, cut.key_dim.before, cut.state_bytes.before, None, before.texts, before.tasks, lm_eval[0])
    new = collect(
        plan.output.path.name, cut.key_dim.after, cut.state_bytes.after, name, after.texts, after.tasks, lm_eval[1]
    )
    by_norm_epsilon: dict[str, NormEpsilonFigures] = {policy: _summary(new)}
    if alternative is not None:
        by_norm_epsilon[other] = _summary(_collect_alternative(new, alternative))
    return EvaluationReport(
        before=old,
        after=new,
        differences=differences(old, new),
        by_norm_epsilon=by_norm_epsilon,
        settings=resolved_settings(plan.evaluation),
    )


def _with_other_epsilon(plan: RunPlan, compressed: PreTrainedModel) -> AbstractContextManager[None]:
    """The recurrence's output at the scale that the other policy would give the norm behind it."""
    if plan.cut.keep == plan.cut.key_dim.before:
        return nullcontext()
    architecture = plan.source.architecture
    kept_scale = architecture.output_scale(plan.cut.key_dim.before, plan.cut.key_dim.after)
    factor = kept_scale if plan.recipe.selection.norm_epsilon == "scaled" else 1 / kept_scale
    mixers = architecture.mixers(compressed.config, list(plan.source.shapes))
    return architecture.tapped(compressed, mixers, ScaledOutput(factor))


@contextmanager
def _with_projections(
    plan: RunPlan, compressed: PreTrainedModel, recovered: Recovered | None, policy: NormEpsilon
) -> Iterator[None]:
    """The output projections as they were refitted under `policy`, where any were."""
    if recovered is None or policy not in recovered.candidates:
        yield
        return
    architecture, entries = plan.source.architecture, plan.source.checkpoint.index.entries
    written: list[tuple[Tensor, Tensor]] = []
    for mixer in architecture.mixers(compressed.config, list(plan.source.shapes)):
        name = architecture.output_projection_tensor(mixer)
        if name in recovered.chosen.tensors or name in recovered.candidates[policy].tensors:
            weight = compressed.get_submodule(architecture.output_projection(mixer)).get_parameter("weight").data
            written.append((weight, weight.clone()))
            # A cut leaves output projections as they are: without a refit they are the original's.
            refitted = recovered.candidates[policy].tensors.get(name)
            weight.copy_(read_tensor(entries[name]) if refitted is None else refitted)
    try:
        yield
    finally:
        for weight, value in written:
            weight.copy_(value)


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
