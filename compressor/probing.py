"""`compress probe`: what a model's states hold, why, and whether the model needs it; a folder with a report."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from compressor.architectures.family import family_of
from compressor.architectures.recurrent_state import state_layout
from compressor.artifacts import write_json
from compressor.baseline import require_same_tokens
from compressor.calibration.tokenizer import load_tokenizer
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.errors import RequestError
from compressor.evaluation.results import ModelSource
from compressor.evaluation.tokenizer_identity import tokenizer_sha256
from compressor.export.advice import NEW_FOLDERS_ONLY
from compressor.export.disk import refuse_too_little_space
from compressor.export.folder import OutputFolder
from compressor.home_folders import expanded
from compressor.interruption import explained_interrupts
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.preparation import ConfiguredModel, Source, open_model, open_source
from compressor.probe.comparison import compare_states, require_same_heads
from compressor.probe.experiment import loss_difference, loss_of
from compressor.probe.main_figures import summary_lines
from compressor.probe.report_page import draw_all, report_page
from compressor.probe.results import ProbedModel, ProbeResult
from compressor.probe.spectra import RANK_FACTOR
from compressor.probe.states import Probed, StateFigures, measure_states
from compressor.probe.summary import summarise_states
from compressor.probe.truncation import Reading
from compressor.probe_cuts import search_states, truncate_states
from compressor.probe_plan import ProbePlan, plan_probe
from compressor.probe_section import ProbeSection
from compressor.probe_space import expected_bytes
from compressor.progress import StageReporter
from compressor.recipe import RuntimeSection
from compressor.report import installed_hardware, installed_versions
from compressor.texts_read import local_texts, refuse_outputs_among

STATE_DTYPE = torch.float32
"""What the stock classes keep states in, whatever the dtype of the weights."""


@dataclass(frozen=True)
class ProbeRequest:
    """What `compress probe` was asked. `model` None is the bundled one, `baseline` the same before pruning."""

    output: Path
    section: ProbeSection = field(default_factory=ProbeSection)
    runtime: RuntimeSection = field(default_factory=RuntimeSection)
    model: str | None = None
    revision: str | None = None
    baseline: str | None = None
    baseline_revision: str | None = None


@dataclass(frozen=True)
class ProbeOutput:
    """The folder, the report in it, and the main figures in a few lines."""

    folder: Path
    report: Path
    summary: tuple[str, ...]


@dataclass(frozen=True)
class _Opened:
    """A model folder that is checked and not yet loaded."""

    given: str | None
    source: Source
    device: torch.device
    dtype: torch.dtype

    @property
    def model_type(self) -> str:
        return str(self.source.checkpoint.raw_config["model_type"])

    def load(self) -> Probed:
        source = self.source
        model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, self.dtype, self.device)
        return Probed(model, source.architecture, source.mixers, family_of(source.checkpoint.raw_config))

    def describe(
        self, plan: ProbePlan, figures: StateFigures, tokenizer: PreTrainedTokenizerBase, reporter: StageReporter
    ) -> ProbedModel:
        """Reads all weights, to hash them."""
        index, first = self.source.checkpoint.index, self.source.mixers[0]
        with reporter.stage("hashing", sum(path.stat().st_size for path in index.files), "bytes") as advance:
            sha256 = weights_sha256(index, advance)
        folder = self.source.checkpoint.folder
        return ProbedModel(
            model=folder.name,
            source=ModelSource(self.given, folder.revision, sha256, tokenizer_sha256(tokenizer)),
            key_dim=first.head_k_dim,
            value_dim=first.head_v_dim,
            rank_threshold=RANK_FACTOR * torch.finfo(STATE_DTYPE).eps,
            loss=loss_of(plan.documents, figures.losses),
            states=summarise_states(self.source.mixers, figures),
        )


def probe(request: ProbeRequest, console: Console | None = None) -> ProbeOutput:
    """Measure a model, and the baseline's states beside it, and write the folder.

    Raises:
        RequestError: the request cannot be met; nothing was measured.
        RunError: the run failed; nothing was written.
        InterruptedRunError: a signal came; nothing was written.
    """
    reporter = StageReporter(console)
    with explained_interrupts(request.output, None):
        output = OutputFolder(expanded(request.output), overwrite=False, advice=NEW_FOLDERS_ONLY)
        output.check(None)
        prepared = _prepare(request, output)
        with output.lock():
            for line in prepared.notes:
                reporter.say(f"note: {line}")
            result = _measure(prepared, request.runtime, reporter)
            return _write(output, result)


@dataclass(frozen=True)
class _Prepared:
    """All that can be refused has been; no weight is loaded."""

    plan: ProbePlan
    tokenizer: PreTrainedTokenizerBase
    model: _Opened
    baseline: _Opened | None
    notes: tuple[str, ...]


def _prepare(request: ProbeRequest, output: OutputFolder) -> _Prepared:
    configured, other = _configured(request)
    for each in (configured, other):
        if each is not None:
            output.check(each.folder.path)
    refuse_outputs_among(local_texts([request.section.text]), [output])
    device, runtime = resolve_device(request.runtime.device), request.runtime
    tokenizer = load_tokenizer(configured.folder.path, runtime.trust_remote_code)
    notes = () if other is None else _notes_on_baseline(configured, other, tokenizer, runtime)
    other_config = None if other is None else other.config
    plan = plan_probe(request.section, configured.config, other_config, configured.mixers, tokenizer, runtime.seed)
    models = [configured.mixers] if other is None else [configured.mixers, other.mixers]
    refuse_too_little_space(output.path, expected_bytes(plan, models))
    model = _open(request.model, configured, device, runtime)
    baseline = None if other is None else _open(request.baseline, other, device, runtime)
    return _Prepared(plan, tokenizer, model, baseline, (*notes, *plan.notes))


def _notes_on_baseline(
    model: ConfiguredModel, baseline: ConfiguredModel, tokenizer: PreTrainedTokenizerBase, runtime: RuntimeSection
) -> tuple[str, ...]:
    note = require_same_tokens(model, baseline, tokenizer, runtime.trust_remote_code, "probe each alone")
    notes = [] if note is None else [note]
    widths = baseline.mixers[0].head_k_dim, model.mixers[0].head_k_dim
    if widths[0] < widths[1]:
        notes.append(
            f"the states of --baseline {baseline.folder.name} are narrower, with {widths[0]} key channels, than those "
            f"of the model, with {widths[1]}: as if the cut model was given for the one it was cut from"
        )
    return tuple(notes)


def _measure(prepared: _Prepared, runtime: RuntimeSection, reporter: StageReporter) -> ProbeResult:
    plan, tokenizer, model, notes = prepared.plan, prepared.tokenizer, prepared.model, prepared.notes
    before, losses_before = None, None
    if prepared.baseline is not None:
        figures = _measure_states(prepared.baseline.load(), plan, reporter)
        before, losses_before = prepared.baseline.describe(plan, figures, tokenizer, reporter), figures.losses
        release_memory(model.device)
    probed = model.load()
    figures = _measure_states(probed, plan, reporter)
    after = model.describe(plan, figures, tokenizer, reporter)
    if before is not None and before.source.weights_sha256 == after.source.weights_sha256:
        notes = (*notes, "the model and its baseline have the same weights")
        reporter.say(f"note: {notes[-1]}")
    truncation, windowed = None, None
    reading = Reading(plan.section.every, plan.section.batch_size, runtime.seed)
    if plan.section.truncation and plan.cut:
        truncation = truncate_states(probed, plan, plan.cut, figures.losses, reading, reporter)
    if plan.section.truncation and plan.windowed:
        windowed = truncate_states(
            probed, plan, plan.windowed, None, replace(reading, window=reading.segment), reporter
        )
    return ProbeResult(
        model=after,
        truncation=truncation,
        windowed=windowed,
        searches=search_states(probed, plan, reading, reporter),
        baseline=before,
        comparison=None if before is None else compare_states(before.states, after.states),
        loss_difference=None
        if losses_before is None
        else loss_difference(plan.documents, figures.losses, losses_before),
        settings={
            **plan.settings(), "seed": runtime.seed, "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        notes=notes,
        timings_s={name: round(seconds, 3) for name, seconds in reporter.seconds.items()},
        hardware=installed_hardware(),
        versions=installed_versions(),
    )  # fmt: skip


def _configured(request: ProbeRequest) -> tuple[ConfiguredModel, ConfiguredModel | None]:
    if request.baseline is None and request.baseline_revision is not None:
        raise RequestError(
            f"--baseline-revision {request.baseline_revision} would change nothing here; add --baseline, or leave it "
            "out."
        )
    model = open_model(request.model, request.revision)
    state_layout(family_of(model.raw_config))
    if request.baseline is None:
        return model, None
    baseline = open_model(request.baseline, request.baseline_revision)
    state_layout(family_of(baseline.raw_config))
    heads = [
        [(mixer.layer, head) for mixer in each.mixers for head in range(mixer.num_v_heads)]
        for each in (baseline, model)
    ]
    require_same_heads(*heads)
    return model, baseline


def _open(given: str | None, configured: ConfiguredModel, device: torch.device, runtime: RuntimeSection) -> _Opened:
    dtype = resolve_dtype(runtime.dtype, device, configured.architecture)
    return _Opened(given, open_source(configured), device, dtype)


def _measure_states(probed: Probed, plan: ProbePlan, reporter: StageReporter) -> StateFigures:
    with reporter.stage("states", plan.text_tokens) as advance:
        return measure_states(probed, plan.documents, plan.section.every, plan.section.batch_size, advance)


def _write(output: OutputFolder, result: ProbeResult) -> ProbeOutput:
    images = draw_all(result)
    with output.staged() as folder:
        write_json(folder / "probe.json", result.to_json())
        (folder / "report.html").write_text(report_page(result, images), encoding="utf-8")
        (folder / "figures").mkdir()
        for name, image in images.items():
            (folder / "figures" / f"{name}.png").write_bytes(image)
    return ProbeOutput(output.path, output.path / "report.html", tuple(summary_lines(result)))
