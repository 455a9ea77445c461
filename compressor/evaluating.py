"""`compress evaluate`: one model, or a model against a baseline, on text and prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compressor.baseline import require_same_tokens
from compressor.calibration.text import DEMO
from compressor.calibration.tokenizer import load_tokenizer
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.errors import RequestError
from compressor.evaluation.lm_eval_bridge import LmEvalFigures, run_lm_eval
from compressor.evaluation.lm_eval_tasks import LmEvalTasks
from compressor.evaluation.measure import Material, Measured, compare, measure
from compressor.evaluation.nul_characters import nul_notes
from compressor.evaluation.pairing import differences
from compressor.evaluation.result_files import SCHEMA, EvaluationFile
from compressor.evaluation.results import ModelFigures, ModelSource, collect
from compressor.evaluation.tokenizer_identity import tokenizer_sha256
from compressor.evaluation_section import EvaluationSection
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.material import EvaluationPlan, make_material, plan_evaluation
from compressor.naming import option_of
from compressor.preparation import ConfiguredModel, Source, open_model, open_source, state_bytes
from compressor.progress import StageReporter
from compressor.recipe import RuntimeSection
from compressor.report import installed_hardware, installed_versions


@dataclass(frozen=True)
class EvaluationRequest:
    """What `compress evaluate` was asked. `model` None is the bundled one."""

    section: EvaluationSection
    runtime: RuntimeSection = field(default_factory=RuntimeSection)
    model: str | None = None
    revision: str | None = None
    baseline: str | None = None
    baseline_revision: str | None = None


@dataclass(frozen=True)
class _Opened:
    """A model folder that is checked and not yet loaded. `given` is what the user called it."""

    given: str | None
    source: Source
    device: torch.device
    dtype: torch.dtype

    def load(self) -> PreTrainedModel:
        source = self.source
        return load_model(source.architecture, source.folder, source.checkpoint.raw_config, self.dtype, self.device)

    @property
    def name(self) -> str:
        return self.source.checkpoint.folder.name

    def identity(self, tokenizer: PreTrainedTokenizerBase, reporter: StageReporter) -> ModelSource:
        """Reads all weights, to hash them."""
        index = self.source.checkpoint.index
        with reporter.stage("hashing", sum(path.stat().st_size for path in index.files), "bytes") as advance:
            sha256 = weights_sha256(index, advance)
        return ModelSource(self.given, self.source.checkpoint.folder.revision, sha256, tokenizer_sha256(tokenizer))

    def collect(
        self, measured: Measured, reference: str | None, lm_eval: LmEvalFigures | None, identity: ModelSource
    ) -> ModelFigures:
        first = self.source.mixers[0]
        size = state_bytes(self.source.mixers, first.head_k_dim).before
        return collect(self.name, first.head_k_dim, size, reference, measured.texts, measured.tasks, lm_eval, identity)


def evaluate(request: EvaluationRequest, console: Console | None = None) -> EvaluationFile:
    """Measure a model, and the baseline with it; the whole of `compress evaluate` but for its file.

    Args:
        request: what to measure.
        console: where progress is shown; None shows nothing.

    Raises:
        RequestError: the request cannot be met; nothing was measured.
        RunError: the run failed.
    """
    reporter = StageReporter(console)
    runtime = request.runtime
    device = resolve_device(runtime.device)
    configured, other = _configured(request)
    tokenizer = load_tokenizer(configured.folder.path, runtime.trust_remote_code)
    note = None if other is None else require_same_tokens(configured, other, tokenizer, runtime.trust_remote_code)
    texts = request.section.texts or [DEMO]
    reference_config = None if other is None else other.config
    plan = plan_evaluation(
        request.section, configured.config, tokenizer, runtime.seed, texts, reference_config, option_of
    )
    model = _open(request.model, configured, device, runtime)
    baseline = None if other is None else _open(request.baseline, other, device, runtime)
    with reporter.stage("prompts", plan.num_prompts, "prompts") as advance:
        material = make_material(plan, (), "", advance)
    damaged = nul_notes(material.texts, tokenizer)
    notes = (*(() if note is None else (note,)), *plan.notes, *material.notes, *damaged)
    for line in notes:
        reporter.say(f"note: {line}")
    figures = _measure(model, baseline, tokenizer, material, plan, reporter)
    before, after = (None, figures[0]) if baseline is None else figures
    return EvaluationFile(
        schema=SCHEMA,
        baseline=before,
        model=after,
        differences=() if before is None else differences(before, after),
        settings={
            **resolved_settings(plan),
            "device": str(device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        notes=notes,
        timings_s={name: round(seconds, 3) for name, seconds in reporter.seconds.items()},
        hardware=installed_hardware(),
        versions=installed_versions(),
    )


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
    identity = model.identity(tokenizer, reporter)
    loaded = model.load()
    if baseline is None:
        with reporter.stage("evaluating", material.tokens(1)) as advance:
            measured = measure(loaded, tokenizer, material, advance)
        lm_eval = measure_lm_eval(loaded, tokenizer, plan.lm_eval, plan, reporter)
        return [model.collect(measured, None, lm_eval, identity)]
    reference_identity = baseline.identity(tokenizer, reporter)
    reference = baseline.load()
    with reporter.stage("evaluating", material.tokens(2)) as advance:
        pair = compare(reference, loaded, tokenizer, material, advance)
    lm_eval = measure_lm_eval(reference, tokenizer, plan.lm_eval, plan, reporter)
    before = baseline.collect(pair[0], None, lm_eval, reference_identity)
    del reference
    release_memory(model.device)
    lm_eval = measure_lm_eval(loaded, tokenizer, plan.lm_eval, plan, reporter)
    return [before, model.collect(pair[1], baseline.name, lm_eval, identity)]


def _configured(request: EvaluationRequest) -> tuple[ConfiguredModel, ConfiguredModel | None]:
    if request.baseline is None and request.baseline_revision is not None:
        raise RequestError(
            f"--baseline-revision {request.baseline_revision} would change nothing here; add --baseline, or leave it "
            "out."
        )
    model = open_model(request.model, request.revision)
    return model, None if request.baseline is None else open_model(request.baseline, request.baseline_revision)


def _open(given: str | None, configured: ConfiguredModel, device: torch.device, runtime: RuntimeSection) -> _Opened:
    dtype = resolve_dtype(runtime.dtype, device, configured.architecture)
    return _Opened(given, open_source(configured), device, dtype)


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
        "stride": plan.cut.stride if plan.section.windowing == "sliding" else None,
        "mode": suite.mode,
        "texts": [name for name, _ in plan.texts],
        "seed": plan.seed,
    }
