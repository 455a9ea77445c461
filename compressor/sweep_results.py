"""What a sweep found: one record a cut, as JSON, a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from compressor.artifacts import Selection
from compressor.evaluation.results import ModelFigures, mean_of_scores
from compressor.report import CalibrationReport, Report, installed_hardware, installed_versions

SWEEP_SCHEMA = 1
RESULT_FILE = "sweep.json"
FIGURE_FILE = "sweep.png"


@dataclass(frozen=True)
class SweepFigures:
    """One model of a sweep. Divergences are to the original, in nats a token; None where not measured.

    `perplexity` is that of the first text, a token; `memory` the mean score over the retrieval prompts.
    """

    key_dim: int
    state_bytes_per_sequence: int
    parameters: int
    perplexity: float | None
    kl_text: float | None
    kl_prompts: float | None
    memory: float | None


@dataclass(frozen=True)
class SweepCut:
    """`passes` and `seconds` are what the choice of channels cost beside the calibration, see `CandidateReport`;
    `folder` is None where no checkpoint was kept."""

    method: str
    norm_epsilon: str
    ratio: float
    figures: SweepFigures
    passes: float
    seconds: float
    folder: str | None


@dataclass(frozen=True)
class SweepBase:
    """What is the same for all cuts of a sweep."""

    model: str
    revision: str | None
    base_sha256: str
    calibration: CalibrationReport
    refit: bool
    original: SweepFigures


@dataclass(frozen=True)
class SweepRecord(SweepBase):
    """All that a sweep needs of one finished cut.

    `kept` maps a layer to the kept channels of each of its key heads.
    """

    cut: SweepCut
    kept: dict[int, list[list[int]]]


@dataclass(frozen=True)
class Sweep(SweepBase):
    """`nested` says of each method of several widths whether every cut's channels are among those of the next."""

    cuts: list[SweepCut]
    nested: dict[str, bool]
    output_dir: str
    timings_s: dict[str, float]
    versions: dict[str, str]
    hardware: dict[str, str | int | None]
    schema: int = SWEEP_SCHEMA

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {"schema": data.pop("schema"), **data}


def record_cut(report: Report, selection: Selection, table_only: bool) -> SweepRecord:
    """From the report of a cut, which was measured, and its kept channels."""
    return SweepRecord(
        model=report.base_model,
        revision=report.base_revision,
        base_sha256=report.base_sha256,
        calibration=report.calibration,
        refit=report.recovery is not None,
        original=_figures(report, before=True),
        cut=_cut(report, None if table_only else Path(report.output_dir).name),
        kept={layer: indices.tolist() for layer, indices in selection.kept.items()},
    )


def collect_sweep(records: Sequence[SweepRecord], output: Path, seconds: Mapping[str, float]) -> Sweep:
    """From the records of all cuts, at least one."""
    first = records[0]
    return Sweep(
        model=first.model,
        revision=first.revision,
        base_sha256=first.base_sha256,
        calibration=first.calibration,
        refit=first.refit,
        original=first.original,
        cuts=[record.cut for record in records],
        nested=_nested(records),
        output_dir=str(output),
        timings_s={name: round(value, 3) for name, value in seconds.items()},
        versions=installed_versions(),
        hardware=installed_hardware(),
    )


def sweep_table(sweep: Sweep) -> Table:
    """One row a cut, the original's first."""
    title = escape(f"{sweep.model}: {len(sweep.cuts)} cuts, {'refitted' if sweep.refit else 'not refitted'}")
    columns = ("method", "width", "state bytes", "perplexity", "KL text", "KL prompts", "memory", "choice, s")
    table = Table(*(Column(header, overflow="fold") for header in columns), title=title)
    table.add_row("original", *_cells(sweep.original), "")
    for cut in sweep.cuts:
        table.add_row(escape(cut.method), *_cells(cut.figures), f"{cut.seconds:.1f}")
    nested = [method for method, value in sweep.nested.items() if value]
    if nested:
        table.caption = f"channels of narrower cuts are among those of wider ones: {', '.join(nested)}"
    return table


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """A PNG: KL on text (left) and on prompts (right) against the state's size, one line a method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("kl_text", "kl_prompts"), strict=True):
        for method in dict.fromkeys(cut.method for cut in sweep.cuts):
            points = [
                (cut.figures.state_bytes_per_sequence / 1024, value)
                for cut in sweep.cuts
                if cut.method == method and (value := asdict(cut.figures)[name]) is not None
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=method)
        axes.set(xlabel="state of a sequence, KiB", ylabel=f"KL to the original, {name.removeprefix('kl_')}, nats")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _cut(report: Report, folder: str | None) -> SweepCut:
    choice = report.selection
    return SweepCut(
        method=report.method,
        norm_epsilon=report.norm_epsilon.policy,
        ratio=report.ratio,
        figures=_figures(report, before=False),
        passes=0.0 if choice is None else choice.passes,
        seconds=0.0 if choice is None else choice.seconds,
        folder=folder,
    )


def _figures(report: Report, before: bool) -> SweepFigures:
    evaluation = report.evaluation
    if evaluation is None:
        raise ValueError("a sweep measures every cut")
    measured: ModelFigures = evaluation.before if before else evaluation.after
    sizes = [
        size.before if before else size.after
        for size in (report.key_dim, report.state_bytes_per_sequence, report.parameters)
    ]
    memory = mean_of_scores([task.score for task in measured.tasks])
    return SweepFigures(
        key_dim=sizes[0],
        state_bytes_per_sequence=sizes[1],
        parameters=sizes[2],
        perplexity=measured.texts[0].figures.token_perplexity if measured.texts else None,
        kl_text=measured.kl_text,
        kl_prompts=measured.kl_prompts,
        memory=None if memory is None else memory.mean,
    )


def _nested(records: Sequence[SweepRecord]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for method in dict.fromkeys(record.cut.method for record in records):
        of_method = [record for record in records if record.cut.method == method]
        ordered = sorted(of_method, key=lambda each: each.cut.figures.key_dim)
        if len(ordered) > 1:
            found[method] = all(_is_within(narrow, wide) for narrow, wide in pairwise(ordered))
    return found


def _is_within(narrow: SweepRecord, wide: SweepRecord) -> bool:
    return all(
        set(own) <= set(others)
        for layer, heads in narrow.kept.items()
        for own, others in zip(heads, wide.kept[layer], strict=True)
    )


def _cells(figures: SweepFigures) -> list[str]:
    def number(value: float | None, digits: int) -> str:
        return "not measured" if value is None else f"{value:.{digits}f}"

    return [
        str(figures.key_dim),
        f"{figures.state_bytes_per_sequence:,}",
        number(figures.perplexity, 2),
        number(figures.kl_text, 4),
        number(figures.kl_prompts, 4),
        number(figures.memory, 3),
    ]
