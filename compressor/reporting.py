"""From a finished run to its report, model card and table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from compressor.architectures.base import Architecture
from compressor.architectures.engines import engine_answers
from compressor.architectures.family import family_of, vision_note
from compressor.calibration.tokens import PackedTokens
from compressor.cutting import WrittenCut
from compressor.distilling import Trained
from compressor.evaluation.tables import comparison_rows, several_rows
from compressor.export.base_card import read_license, read_pipeline_tag
from compressor.export.file_records import FileRecord, record_files
from compressor.export.model_card import ModelCardFacts
from compressor.json_text import parse_json
from compressor.planning import RunPlan
from compressor.preparation import CutPlan
from compressor.progress import StageReporter
from compressor.recovery_report import recovery_line, recovery_report
from compressor.refitting import Policies
from compressor.report import (
    CalibrationReport,
    EvaluationReport,
    NormEpsilonFigures,
    NormEpsilonReport,
    Report,
    SelectionReport,
    VerificationReport,
    chained_provenance,
    installed_versions,
)


@dataclass(frozen=True)
class RunFacts:
    """What the stages of one run found."""

    tokens: PackedTokens
    base_sha256: str
    policies: Policies
    written: WrittenCut
    trained: Trained | None
    evaluation: EvaluationReport | None
    verification: VerificationReport | None
    files: dict[str, FileRecord]
    timings_s: dict[str, float]


def build_report(plan: RunPlan, facts: RunFacts) -> Report:
    """Everything about the run, as compression.json holds it."""
    selection, source, cut, written = plan.recipe.selection, plan.source, plan.cut, facts.written
    return Report(
        output_dir=str(plan.output.path),
        load_line=load_line(source.architecture, plan.recipe.output_dir),
        base_model=source.checkpoint.folder.name,
        base_revision=source.checkpoint.folder.revision,
        base_sha256=facts.base_sha256,
        base_compression=chained_provenance(read_compression(source.folder)),
        architecture=source.checkpoint.model_type,
        method=selection.method,
        scoring=selection.scoring,
        f=selection.f,
        ratio=cut.ratio,
        key_dim=cut.key_dim,
        state_bytes_per_sequence=cut.state_bytes,
        convolution_state_bytes_per_sequence=cut.convolution_state_bytes,
        parameters=cut.parameters,
        norm_epsilon=_norm_epsilon_report(selection.norm_epsilon, cut, facts.policies),
        layers=written.layers,
        calibration=_calibration_report(plan, facts.tokens),
        recovery=recovery_report(written.recovered, written.selection.candidates, plan.training, facts.trained),
        evaluation=facts.evaluation,
        verification=facts.verification,
        engines=list(engine_lines(plan)),
        notes=[*plan.notes, *facts.policies.notes, *written.notes, *cut.engine_warnings, *facts.tokens.problems],
        timings_s={name: round(seconds, 3) for name, seconds in facts.timings_s.items()},
        versions=installed_versions(),
        selection=written.selection,
        files=facts.files,
    )


def read_compression(folder: Path) -> dict[str, object] | None:
    """The compression.json of an already compressed folder; None where there is none that can be read."""
    file = folder / "compression.json"
    try:
        # What is no regular file may be a pipe, which would be waited for.
        content = parse_json(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def record_output(folder: Path, names: Sequence[str], reporter: StageReporter) -> dict[str, FileRecord]:
    """Sizes and hashes of files of an output that is finished but for its report and its card."""
    total = sum((folder / name).stat().st_size for name in names)
    with reporter.stage("recording", total, "bytes") as advance:
        return record_files(folder, names, advance)


def load_line(architecture: Architecture, folder: str | None) -> str:
    """The one line of Python that loads the result."""
    prefix = f"{architecture.load_line}; " if architecture.load_line else ""
    return (
        f"{prefix}from transformers import AutoModelForCausalLM; "
        f"model = AutoModelForCausalLM.from_pretrained({folder!r})"
    )


def engine_lines(plan: RunPlan) -> tuple[str, ...]:
    family = family_of(plan.source.checkpoint.raw_config)
    answers = engine_answers(family, plan.source.mixers[0], plan.cut.keep)
    return tuple(
        f"{answer.engine}: {answer.verdict} ({answer.note}; {answer.evidence})"
        + ("" if answer.command is None else f": `{answer.command}`")
        for answer in answers
    )


@dataclass(frozen=True)
class CardPlace:
    """What a model card needs beside the report: the folder's name, and the checkpoint it was made from."""

    model_name: str
    source: Path
    needs_fla: bool
    trust_remote_code: bool
    loading_note: str


def card_place(plan: RunPlan) -> CardPlace:
    source, architecture = plan.source, plan.source.architecture
    trust = plan.recipe.runtime.trust_remote_code
    return CardPlace(plan.output.path.name, source.folder, architecture.needs_fla, trust, architecture.loading_note)


def card_facts(place: CardPlace, report: Report) -> ModelCardFacts:
    """What the model card says of the report."""
    evaluation = report.evaluation
    revision = report.base_revision
    return ModelCardFacts(
        model_name=place.model_name,
        base_name=report.base_model,
        base_model=report.base_model if revision is not None else None,
        base_revision=revision,
        license=read_license(place.source),
        pipeline_tag=read_pipeline_tag(place.source),
        model_type=report.architecture,
        needs_fla=place.needs_fla,
        trust_remote_code=place.trust_remote_code,
        loading_note=place.loading_note or vision_note(report.architecture),
        method=report.method,
        scoring=report.scoring,
        ratio=report.ratio,
        max_rho=report.worst_rho,
        key_dim_before=report.key_dim.before,
        key_dim_after=report.key_dim.after,
        state_bytes_before=report.state_bytes_per_sequence.before,
        state_bytes_after=report.state_bytes_per_sequence.after,
        parameters_before=report.parameters.before,
        parameters_after=report.parameters.after,
        norm_epsilon=report.norm_epsilon.policy,
        norm_epsilon_before=report.norm_epsilon.before,
        norm_epsilon_after=report.norm_epsilon.after,
        calibration_source=report.calibration.source,
        calibration_tokens=report.calibration.tokens,
        calibration_sequence_length=report.calibration.sequence_length,
        calibration_seed=report.calibration.seed,
        calibration_sha256=report.calibration.sha256,
        calibration_retrieval_share=report.calibration.retrieval_share if report.calibration.retrieval_sequences else 0,
        figures=() if evaluation is None else tuple(comparison_rows(evaluation.before, evaluation.after)),
        recovery=recovery_line(report.recovery),
        engine_notes=tuple(report.engines),
        versions=tuple(report.versions.items()),
    )


def result_table(report: Report) -> Table:
    """What a person reads at the end of a run; after `compress recover` with what it began with."""
    title = escape(f"{report.base_model}: {report.method}, {report.ratio:.1%} removed")
    evaluation = report.evaluation
    untrained = None if evaluation is None else evaluation.untrained
    columns = ("before", "after") if untrained is None else ("teacher", "before", "after")
    headers = ("", *columns, "difference ± s.e.")
    table = Table(*(Column(header, overflow="fold") for header in headers), title=title)

    def add(label: str, original: str, compressed: str | None) -> None:
        table.add_row(label, original, *([compressed] * (len(columns) - 1)))

    add("key width of a head", str(report.key_dim.before), str(report.key_dim.after))
    state, convolution = report.state_bytes_per_sequence, report.convolution_state_bytes_per_sequence
    add("state bytes per sequence", f"{state.before:,}", f"{state.after:,}")
    add("convolution state bytes", f"{convolution.before:,}", f"{convolution.after:,}")
    add("parameters", f"{report.parameters.before:,}", f"{report.parameters.after:,}")
    add("worst max rho", "", f"{report.worst_rho:.3f}")
    for label, value in _selection_rows(report.selection):
        add(label, "", value)
    if untrained is not None:
        table.caption = recovery_line(report.recovery)
    elif report.recovery is not None:
        table.add_row("recovery", "", recovery_line(report.recovery))
    if evaluation is None:
        add("perplexity, KL, memory (retrieval)", "not measured", "not measured")
        return table
    if untrained is not None:
        for label, teacher, before, _, after, change in several_rows([evaluation.before, untrained, evaluation.after]):
            table.add_row(*map(escape, (label, teacher, before, after, change)))
        return table
    for row in comparison_rows(evaluation.before, evaluation.after):
        table.add_row(*map(escape, row))
    for policy, figures in evaluation.by_norm_epsilon.items():
        chosen = " (written)" if policy == report.norm_epsilon.policy else ""
        label = f"with norm epsilon {policy}{chosen}: KL of text, KL of prompts; memory"
        table.add_row(label, "", f"{_divergences(figures)}; {_share(figures.memory)}")
    return table


def _selection_rows(selection: SelectionReport | None) -> list[tuple[str, str]]:
    """What choosing cost where the model was run for it, and every cut where several were tried."""
    rows = []
    if selection is not None and selection.passes:
        cost = f"{selection.passes:g} forward passes of the calibration data, {selection.seconds:.1f} s"
        rows.append(("choice of channels", cost))
    if selection is not None and len(selection.candidates) > 1:
        for cut in selection.candidates:
            written = " (written)" if cut.written else ""
            label = f"tried: {cut.method}, norm epsilon {cut.norm_epsilon}{written}: KL, held-out calibration data"
            rows.append((label, "not measured" if cut.kl_after is None else f"{cut.kl_after:.4f}"))
    return rows


def _divergences(figures: NormEpsilonFigures) -> str:
    values = (figures.kl_text, figures.kl_prompts)
    return ", ".join("not measured" if value is None else f"{value:.4f}" for value in values)


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"


def _norm_epsilon_report(policy: str, cut: CutPlan, policies: Policies) -> NormEpsilonReport:
    smallest = policies.smallest_mean_square if policy == "scaled" else None
    return NormEpsilonReport(policy, *cut.norm_epsilon, smallest)


def plan_table(plan: RunPlan) -> Table:
    """What a run would do, for `--dry-run`."""
    cut, request = plan.cut, plan.recipe.calibration
    table = Table("", "before", "after", title="dry run")
    table.add_row("key width of a head", str(cut.key_dim.before), str(cut.key_dim.after))
    table.add_row("state bytes per sequence", f"{cut.state_bytes.before:,}", f"{cut.state_bytes.after:,}")
    table.add_row("parameters", f"{cut.parameters.before:,}", f"{cut.parameters.after:,}")
    table.add_row("norm epsilon", f"{cut.norm_epsilon[0]:g}", f"{cut.norm_epsilon[1]:g}")
    table.add_row("linear-attention layers", str(len(plan.source.mixers)), str(len(plan.source.mixers)))
    table.add_row("calibration", escape(request.source), f"{request.samples} x {request.sequence_length} tokens")
    retrieval = f"{request.retrieval_samples} of {request.samples} sequences"
    table.add_row("retrieval prompts", f"share {request.retrieval_share or 0:g}", retrieval)
    table.add_row("runs on", str(plan.device), str(plan.dtype).removeprefix("torch."))
    table.add_row("bytes of the output", "", f"{cut.output_bytes:,}")
    return table


def _calibration_report(plan: RunPlan, tokens: PackedTokens) -> CalibrationReport:
    request, runtime = plan.recipe.calibration, plan.recipe.runtime
    return CalibrationReport(
        source=request.source,
        sha256=tokens.sha256,
        tokens=tokens.tokens,
        requested_tokens=tokens.requested_tokens,
        documents=tokens.documents,
        sequence_length=request.sequence_length,
        retrieval_share=request.retrieval_share or 0.0,
        retrieval_sequences=tokens.retrieval_sequences,
        retrieval_prompts=tokens.retrieval_prompts,
        retrieval_tasks=tokens.retrieval_tasks,
        seed=runtime.seed,
        dtype=runtime.dtype,
        device=runtime.device,
    )
