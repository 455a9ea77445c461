"""Quality against state size, drawn: one line a task, and text loss beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import RequestError
from compressor.evaluation.results import ModelFigures
from compressor.evaluation.text_names import shortly_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_quality(models: Sequence[ModelFigures], path: Path) -> None:
    """Write a PNG, SVG or PDF: scores (left) and perplexity a token relative to the largest state (right).

    Raises:
        RequestError: the file's name has another ending, or it cannot be written.
    """
    check_figure_path(path)
    from matplotlib.figure import Figure

    ordered = sorted(models, key=lambda model: model.state_bytes_per_sequence)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    scores, perplexities = figure.subplots(1, 2)
    _draw_scores(scores, ordered)
    _draw_perplexities(perplexities, ordered)
    for axes in (scores, perplexities):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}; give another --figure.") from None


def _draw_scores(axes: Axes, ordered: Sequence[ModelFigures]) -> None:
    tasks = dict.fromkeys((task.task, task.length, task.mode) for model in ordered for task in model.tasks)
    several = len({mode for _, _, mode in tasks}) > 1
    for form in tasks:
        points = [
            (model.state_bytes_per_sequence / 1024, task.score)
            for model in ordered
            for task in model.tasks
            if (task.task, task.length, task.mode) == form
        ]
        errors = [score.standard_error or 0.0 for _, score in points]
        sizes, means = [size for size, _ in points], [score.mean for _, score in points]
        name, length, mode = form
        label = f"{name}, {length}, {mode}" if several else f"{name}, {length}"
        axes.errorbar(sizes, means, yerr=errors, marker="o", capsize=2, label=_plain(label))
    axes.set(xlabel="state of a sequence, KiB", ylabel="score", ylim=(-0.03, 1.03))


def _draw_perplexities(axes: Axes, ordered: Sequence[ModelFigures]) -> None:
    named = shortly_named(ordered)
    for name in dict.fromkeys(text.name for model in named for text in model.texts):
        measured = [
            (model.state_bytes_per_sequence / 1024, text.figures.token_perplexity)
            for model in named
            for text in model.texts
            if text.name == name and text.figures.token_perplexity is not None
        ]
        if measured:
            dense = measured[-1][1]
            sizes, values = [size for size, _ in measured], [value / dense for _, value in measured]
            axes.plot(sizes, values, marker="o", label=_plain(f"text {name}"))
    axes.set(xlabel="state of a sequence, KiB", ylabel="perplexity a token, over that of the largest state")


def _plain(label: str) -> str:
    """Dollar signs begin a formula otherwise."""
    return label.replace("$", r"\$")


def check_figure_path(path: Path) -> None:
    """Refuse what `draw_quality` could not write, before anything is measured.

    Raises:
        RequestError: another ending than .png, .svg or .pdf, or no such folder.
    """
    if path.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise RequestError(f'--figure {path}: "{path.suffix}" is not drawn; use .png, .svg or .pdf.')
    if not path.absolute().parent.is_dir():
        raise RequestError(f"--figure {path}: there is no folder {path.absolute().parent}; make it first.")
