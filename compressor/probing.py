"""`compress probe`: what a model's states hold, why, and whether the model needs it; a folder with a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.architectures.recurrent_state import state_layout
from compressor.artifacts import write_json
from compressor.baseline import require_same_tokens
from compressor.calibration.tokenizer import load_tokenizer
from compressor.checkpoint.fingerprint import weights_sha256
from compressor.errors import RequestError
from compressor.evaluation.forward import TokenFigures
from compressor.evaluation.results import ModelSource
from compressor.evaluation.tokenizer_identity import tokenizer_sha256
from compressor.export.folder import OutputFolder
from compressor.loading import load_model, release_memory, resolve_device, resolve_dtype
from compressor.preparation import ConfiguredModel, Source, open_model, open_source
from compressor.probe.comparison import compare_states, require_same_heads
from compressor.probe.experiment import RankOnText, answer_losses, loss_of, truncate_on_tasks, truncate_on_text
from compressor.probe.head_search import HeadSearch, measurements, search_heads
from compressor.probe.report_page import draw_all, report_page
from compressor.probe.results import ProbedModel, ProbeResult, Truncation
from compressor.probe.spectra import RANK_FACTOR
from compressor.probe.states import Probed, StateFigures, measure_states
from compressor.probe.summary import summarise_states
from compressor.probe.truncation import Cut, Reading, measure_cut
from compressor.probe_plan import ProbePlan, plan_probe
from compressor.probe_section import ProbeSection
from compressor.progress import Advance, StageReporter
from compressor.recipe import RuntimeSection
from compressor.report import installed_hardware, installed_versions

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
        return Probed(model, source.architecture, source.mixers, self.model_type)

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
    """
    reporter = StageReporter(console)
    output = _output(request.output)
    configured, other = _configured(request)
    output.check(configured.folder.path)
    device, runtime = resolve_device(request.runtime.device), request.runtime
    tokenizer = load_tokenizer(configured.folder.path, runtime.trust_remote_code)
    note = None if other is None else require_same_tokens(configured, other, tokenizer, runtime.trust_remote_code)
    config, other_config = configured.config, None if other is None else other.config
    plan = plan_probe(request.section, config, other_config, configured.mixers, tokenizer, runtime.seed)
    model = _open(request.model, configured, device, runtime)
    baseline = None if other is None else _open(request.baseline, other, device, runtime)
    notes = (*(() if note is None else (note,)), *plan.notes)
    for line in notes:
        reporter.say(f"note: {line}")
    before = None
    if baseline is not None:
        before = baseline.describe(plan, _measure_states(baseline.load(), plan, reporter), tokenizer, reporter)
        release_memory(device)
    probed = model.load()
    figures = _measure_states(probed, plan, reporter)
    after = model.describe(plan, figures, tokenizer, reporter)
    truncation, windowed = None, None
    reading = Reading(plan.section.every, plan.section.batch_size, runtime.seed)
    if plan.section.truncation:
        truncation = _truncate(probed, plan, figures.losses, reading, reporter)
        if _is_hybrid(probed):
            windowed = _truncate(probed, plan, None, replace(reading, window=reading.segment), reporter)
    result = ProbeResult(
        model=after,
        truncation=truncation,
        windowed=windowed,
        searches=_search(probed, plan, reading, reporter),
        baseline=before,
        comparison=None if before is None else compare_states(before.states, after.states),
        settings={
            **plan.settings(), "seed": runtime.seed, "device": str(device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        notes=notes,
        timings_s={name: round(seconds, 3) for name, seconds in reporter.seconds.items()},
        hardware=installed_hardware(),
        versions=installed_versions(),
    )  # fmt: skip
    return _write(output, result)


def _output(given: Path) -> OutputFolder:
    if given.is_file() or (given.is_dir() and any(given.iterdir())):
        raise RequestError(f"--output {given} exists; name a new folder.")
    return OutputFolder(given, overwrite=False)


def _configured(request: ProbeRequest) -> tuple[ConfiguredModel, ConfiguredModel | None]:
    if request.baseline is None and request.baseline_revision is not None:
        raise RequestError(
            f"--baseline-revision {request.baseline_revision} would change nothing here; add --baseline, or leave it "
            "out."
        )
    model = open_model(request.model, request.revision)
    state_layout(str(model.raw_config["model_type"]))
    if request.baseline is None:
        return model, None
    baseline = open_model(request.baseline, request.baseline_revision)
    state_layout(str(baseline.raw_config["model_type"]))
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


def _truncate(
    probed: Probed, plan: ProbePlan, dense: Sequence[TokenFigures] | None, reading: Reading, reporter: StageReporter
) -> Truncation:
    """`dense` are the documents' losses with nothing cut, None where they are still to be measured."""
    cut_text = any(len(document) > reading.segment for document in plan.documents)
    passes = len(plan.ranks) + (dense is None)
    tokens = passes * plan.text_tokens * cut_text + (1 + len(plan.ranks)) * plan.prompt_tokens
    text: tuple[RankOnText, ...] = ()
    with reporter.stage("truncation" if reading.window is None else "windowed", tokens) as advance:
        if cut_text:
            if dense is None:
                dense = measure_cut(probed, plan.documents, None, reading, advance).figures
            text = truncate_on_text(probed, plan.documents, dense, plan.ranks, reading, advance)
        tasks = truncate_on_tasks(probed, plan.prompt_sets, plan.ranks, reading, advance)
    return Truncation(reading.segment, reading.window, text, tasks)


def _is_hybrid(probed: Probed) -> bool:
    """Whether some layers are not mixers: softmax attention."""
    layers: int = probed.model.config.get_text_config(decoder=True).num_hidden_layers
    return layers > len(probed.mixers)


def _search(probed: Probed, plan: ProbePlan, reading: Reading, reporter: StageReporter) -> tuple[HeadSearch, ...]:
    """On every task, and on the text."""
    rank = plan.section.search_rank
    if rank is None:
        return ()

    def losses(sequences: tuple[Tensor, ...], advance: Advance, cut: Cut | None) -> Tensor:
        figures = measure_cut(probed, sequences, cut, reading, advance).figures
        return torch.stack([figure.losses.double().mean() for figure in figures])

    def of_answers(index: int, advance: Advance, cut: Cut | None) -> Tensor:
        prompts = plan.prompt_sets[index]
        sequences = [tokens.whole for tokens in prompts.encoded]
        return answer_losses(prompts, measure_cut(probed, sequences, cut, reading, advance).figures)

    found = []
    with reporter.stage("search", measurements(probed) * (plan.prompt_tokens + plan.text_tokens)) as advance:
        for index, prompts in enumerate(plan.prompt_sets):
            found.append(search_heads(probed, prompts.task.name, partial(of_answers, index, advance), rank))
        if any(len(document) > reading.segment for document in plan.documents):
            found.append(search_heads(probed, "text", partial(losses, plan.documents, advance), rank))
    return tuple(found)


def _write(output: OutputFolder, result: ProbeResult) -> ProbeOutput:
    images = draw_all(result)
    with output.staged() as folder:
        write_json(folder / "probe.json", result.to_json())
        (folder / "report.html").write_text(report_page(result, images), encoding="utf-8")
        (folder / "figures").mkdir()
        for name, image in images.items():
            (folder / "figures" / f"{name}.png").write_bytes(image)
    return ProbeOutput(output.path, output.path / "report.html", result.summary())
