"""`compress evaluate`: one model, or a model against a baseline, on text and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compressor.artifacts import write_json
from compressor.calibration.text import DEMO
from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError
from compressor.evaluation.lm_eval_bridge import LmEvalFigures, run_lm_eval
from compressor.evaluation.lm_eval_tasks import LmEvalTasks
from compressor.evaluation.measure import Material, Measured, compare, measure
from compressor.evaluation.pairing import differences
from compressor.evaluation.result_files import SCHEMA, EvaluationFile
from compressor.evaluation.results import ModelFigures, collect
from compressor.export.disk import translate_write_errors
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.material import EvaluationPlan, make_material, plan_evaluation
from compressor.preparation import ConfiguredModel, Source, open_model, open_source, state_bytes
from compressor.progress import StageReporter
from compressor.recipe import EvaluationSection
from compressor.report import installed_hardware, installed_versions


@dataclass(frozen=True)
class EvaluationRequest:
    """What `compress evaluate` was asked. `model` None is the bundled one; `output` is a JSON file."""

    section: EvaluationSection
    model: str | None = None
    revision: str | None = None
    baseline: str | None = None
    baseline_revision: str | None = None
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    output: Path | None = None


@dataclass(frozen=True)
class _Opened:
    """A model folder that is checked and not yet loaded."""

    source: Source
    device: torch.device
    dtype: torch.dtype

    def load(self) -> PreTrainedModel:
        source = self.source
        return load_model(source.architecture, source.folder, source.checkpoint.raw_config, self.dtype, self.device)

    @property
    def name(self) -> str:
        return self.source.checkpoint.folder.name

    def collect(self, measured: Measured, reference: str | None, lm_eval: LmEvalFigures | None) -> ModelFigures:
        first = self.source.mixers[0]
        size = state_bytes(self.source.mixers, first.head_k_dim).before
        return collect(self.name, first.head_k_dim, size, reference, measured.texts, measured.tasks, lm_eval)


def evaluate(request: EvaluationRequest, console: Console | None = None) -> EvaluationFile:
    """Measure a model, and the baseline with it; the whole of `compress evaluate`.

    Args:
        request: what to measure.
        console: where progress is shown; None shows nothing.

    Returns:
        What `request.output` holds too, if it is given.

    Raises:
        RequestError: the request cannot be met; nothing was measured.
        RunError: the run failed.
    """
    reporter = StageReporter(console)
    _check_output(request.output)
    device = resolve_device(request.device)
    configured = open_model(request.model, request.revision)
    other = None if request.baseline is None else open_model(request.baseline, request.baseline_revision)
    _require_one_vocabulary(configured, other)
    tokenizer = load_tokenizer(configured.folder.path, request.trust_remote_code)
    texts = request.section.texts or [DEMO]
    plan = plan_evaluation(request.section, configured.config, tokenizer, request.seed, texts)
    model, baseline = _open(configured, device, request), None if other is None else _open(other, device, request)
    with reporter.stage("prompts", plan.num_prompts, "prompts") as advance:
        material = make_material(plan, (), "", advance)
    for note in plan.notes:
        reporter.say(f"note: {note}")
    figures = _measure(model, baseline, tokenizer, material, plan, reporter)
    before, after = (None, figures[0]) if baseline is None else figures
    result = EvaluationFile(
        schema=SCHEMA,
        baseline=before,
        model=after,
        differences=() if before is None else differences(before, after),
        settings={
            **resolved_settings(plan),
            "device": str(device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        notes=plan.notes,
        timings_s={name: round(seconds, 3) for name, seconds in reporter.seconds.items()},
        hardware=installed_hardware(),
        versions=installed_versions(),
    )
    if request.output is not None:
        partial = request.output.with_name(f"{request.output.name}.partial")
        with translate_write_errors(request.output, None):
            write_json(partial, result.to_json())
            partial.replace(request.output)
    return result


def measure_lm_eval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LmEvalTasks | None,
    plan: EvaluationPlan,
    reporter: StageReporter,
) -> LmEvalFigures | None:
    """The plan's lm-eval tasks on a loaded model; None where it has none."""
    if tasks is None:
        return None
    with reporter.stage("lm-eval", len(tasks.names), "tasks") as advance:
        limit = plan.section.samples
        figures = run_lm_eval(model, tokenizer, tasks, limit, plan.section.batch_size, plan.seed)
        advance(len(tasks.names))
    return figures


def _measure(
    model: _Opened,
    baseline: _Opened | None,
    tokenizer: PreTrainedTokenizerBase,
    material: Material,
    plan: EvaluationPlan,
    reporter: StageReporter,
) -> list[ModelFigures]:
    """The baseline's figures first, where there is one."""
    loaded = model.load()
    if baseline is None:
        with reporter.stage("evaluating", material.tokens(1)) as advance:
            measured = measure(loaded, tokenizer, material, advance)
        return [model.collect(measured, None, measure_lm_eval(loaded, tokenizer, plan.lm_eval, plan, reporter))]
    reference = baseline.load()
    with reporter.stage("evaluating", material.tokens(2)) as advance:
        pair = compare(reference, loaded, tokenizer, material, advance)
    before = baseline.collect(pair[0], None, measure_lm_eval(reference, tokenizer, plan.lm_eval, plan, reporter))
    del reference
    release_memory(model.device)
    after = model.collect(pair[1], baseline.name, measure_lm_eval(loaded, tokenizer, plan.lm_eval, plan, reporter))
    return [before, after]


def _open(configured: ConfiguredModel, device: torch.device, request: EvaluationRequest) -> _Opened:
    dtype = resolve_dtype(request.dtype, device, configured.architecture)
    return _Opened(open_source(configured), device, dtype)


def resolved_settings(plan: EvaluationPlan) -> dict[str, object]:
    """The section with the suite's own values filled in: the same settings measure the same again."""
    suite = plan.suite
    lm_eval = () if plan.lm_eval is None else plan.lm_eval.names
    return {
        **plan.section.model_dump(),
        "tasks": [*(task.name for task in plan.tasks), *(f"lm_eval:{name}" for name in lm_eval)],
        "lengths": list(suite.lengths),
        "samples": suite.samples,
        "windows": suite.windows,
        "window_length": suite.window_length,
        "mode": suite.mode,
        "texts": [name for name, _ in plan.texts],
        "seed": plan.seed,
    }


def _check_output(output: Path | None) -> None:
    if output is None:
        return
    if output.is_dir():
        raise RequestError(f"--output {output} is a folder; name a JSON file.")
    if not output.absolute().parent.is_dir():
        raise RequestError(f"--output {output}: there is no folder {output.absolute().parent}; make it first.")


def _require_one_vocabulary(model: ConfiguredModel, baseline: ConfiguredModel | None) -> None:
    if baseline is None:
        return
    sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (baseline, model)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"--baseline {baseline.folder.name} has a vocabulary of {sizes[0]:,} tokens and the model one of "
            f"{sizes[1]:,}; evaluate each alone and use compress compare."
        )
