"""Figures of the states of one model, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from compressor.probe.experiment import Loss, RankOnTask, RankOnText
from compressor.probe.results import ProbedModel
from compressor.probe.summary import StateSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "numerical_rank": "numerical rank",
    "entropy_effective_rank": "entropy effective rank",
    "stable_rank": "stable rank",
    "utilisation": "utilisation (stable rank / width)",
    "condition_number": "condition number",
}
_DOTS_PER_INCH = 110


def new_figure(columns: int, width: float = 5.2, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A row of axes. Built from `Figure` itself: no backend with windows is ever chosen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(buffer, dpi=_DOTS_PER_INCH, format="png")
    return buffer.getvalue()


def draw_heat_maps(states: StateSummary) -> Figure:
    """Layers x heads at the end of the texts, medians over documents."""
    names = ("entropy_effective_rank", "stable_rank", "numerical_rank", "utilisation")
    figure, panels = new_figure(len(names), width=3.6)
    layers = sorted({head.layer for head in states.heads})
    width = 1 + max(head.head for head in states.heads)
    for axes, name in zip(panels, names, strict=True):
        table = np.full((len(layers), width), np.nan)
        for head in states.heads:
            value = head.end[name].median
            table[layers.index(head.layer), head.head] = np.nan if value is None else value
        image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0)
        axes.set(xlabel="head", ylabel="layer", title=LABELS[name], xticks=_ticks(width))
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        figure.colorbar(image, ax=axes)
    return figure


def draw_curves(states: StateSummary) -> Figure:
    """Medians over documents and heads of a layer, by tokens read; shaded from the lowest to the highest head."""
    names = ("entropy_effective_rank", "stable_rank", "utilisation")
    figure, panels = new_figure(len(names))
    for axes, name in zip(panels, names, strict=True):
        table = _array(states.curves[name].median)
        for layer, columns in _by_layer(states):
            part = table[:, columns]
            (line,) = axes.plot(states.tokens, np.median(part, axis=1), marker=".", label=f"layer {layer}")
            axes.fill_between(states.tokens, part.min(1), part.max(1), color=line.get_color(), alpha=0.12)
        axes.set(xlabel="tokens read", ylabel=LABELS[name])
        axes.grid(alpha=0.3)
    if len(_by_layer(states)) <= 12:
        panels[-1].legend(fontsize="small")
    return figure


def draw_spectra(states: StateSummary) -> Figure:
    """Singular values at the end over the largest, mean over documents, median over the heads of a layer."""
    figure, (axes,) = new_figure(1, width=6.5)
    for layer, columns in _by_layer(states):
        values = np.array([states.heads[column].singular_values for column in columns])
        axes.semilogy(np.arange(1, values.shape[1] + 1), np.median(values, axis=0).clip(1e-12), label=f"layer {layer}")
    axes.set(xlabel="singular value", ylabel="over the largest")
    axes.grid(alpha=0.3)
    if len(_by_layer(states)) <= 12:
        axes.legend(fontsize="small")
    return figure


def draw_reasons(states: StateSummary) -> Figure:
    """Effective rank against what could explain it, and the condition number against its lower bound."""
    figure, panels = new_figure(3)
    ranks = [head.end["entropy_effective_rank"].median for head in states.heads]
    horizons = [head.horizon for head in states.heads]
    _scatter(panels[0], horizons, ranks, "decay horizon, tokens", "entropy effective rank of the state")
    decayed: list[float | None] = [head.rank_decayed for head in states.heads]
    _scatter(panels[1], decayed, ranks, "effective rank of the decayed key covariance", "of the state")
    bounds = [head.condition_bound for head in states.heads]
    kappas = [head.end["condition_number"].median for head in states.heads]
    _scatter(panels[2], bounds, kappas, "1 / sqrt(utilisation)", "condition number")
    return figure


def draw_truncation(text: Sequence[RankOnText], tasks: Sequence[RankOnTask]) -> Figure:
    """What is lost by the rank that states are cut to."""
    figure, panels = new_figure(3 if tasks else 2)
    cuts = [(each.rank, each.difference) for each in text if each.rank is not None and each.difference is not None]
    for label, kind in (("all tokens", "all"), ("copied tokens", "copied"), ("other tokens", "rest")):
        estimates = [(rank, {"all": loss.all, "copied": loss.copied, "rest": loss.rest}[kind]) for rank, loss in cuts]
        points = [(rank, each.mean, each.standard_error or 0.0) for rank, each in estimates if each.mean is not None]
        if points:
            ranks, means, errors = zip(*points, strict=True)
            panels[0].errorbar(ranks, means, yerr=errors, marker="o", capsize=2, label=label)
    _rank_axis(panels[0], "rise of the loss, nats a token")
    for rank, loss in cuts:
        _draw_positions(panels[1], loss, f"rank {rank}")
    panels[1].set(ylabel="rise of the loss, nats a token")
    if tasks:
        _draw_tasks(panels[2], tasks)
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    return figure


def draw_comparison(before: ProbedModel, after: ProbedModel) -> Figure:
    """Before and after pruning: utilisation by token, of each head, the tail of the spectra, and loss by position."""
    figure, panels = new_figure(4, width=4.4)
    for label, model in (("before", before), ("after", after)):
        states = model.states
        table = _array(states.curves["utilisation"].median)
        panels[0].plot(states.tokens, np.median(table, axis=1), marker=".", label=label)
        width = min(len(head.singular_values) for head in states.heads)
        values = np.median([head.singular_values[:width] for head in states.heads], axis=0).clip(1e-12)
        panels[2].semilogy(np.arange(1, width + 1) / width, values, label=label)
        _draw_positions(panels[3], model.loss, label)
    panels[0].set(xlabel="tokens read", ylabel="utilisation, median over heads")
    old, new = ([head.end["utilisation"].median for head in model.states.heads] for model in (before, after))
    _scatter(panels[1], old, new, "utilisation before", "utilisation after")
    panels[2].set(xlabel="share of the width", ylabel="singular value over the largest")
    panels[3].set(ylabel="loss, nats a token")
    for axes in (panels[0], panels[2], panels[3]):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _draw_positions(axes: Axes, loss: Loss, label: str) -> None:
    buckets = [(bucket.stop, bucket.loss.mean) for bucket in loss.by_position if bucket.loss.mean is not None]
    axes.plot([stop for stop, _ in buckets], [mean for _, mean in buckets], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens read, up to")


def _draw_tasks(axes: Axes, tasks: Sequence[RankOnTask]) -> None:
    for name in dict.fromkeys(each.task for each in tasks):
        points = [(each.rank, each.score) for each in tasks if each.task == name and each.rank is not None]
        errors = [score.standard_error or 0.0 for _, score in points]
        (line, *_) = axes.errorbar(
            [rank for rank, _ in points], [score.mean for _, score in points], yerr=errors, marker="o", capsize=2,
            label=name,
        )  # fmt: skip
        dense = next(each.score.mean for each in tasks if each.task == name and each.rank is None)
        axes.axhline(dense, color=line.get_color(), linestyle=":", alpha=0.6)
    _rank_axis(axes, "score (dotted: nothing cut)")
    axes.set_ylim(-0.03, 1.03)


def _rank_axis(axes: Axes, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rank that states are cut to", ylabel=label)


def _scatter(axes: Axes, x: Sequence[float | None], y: Sequence[float | None], x_label: str, y_label: str) -> None:
    """Log-log with y = x; heads with an infinite value are counted in the title."""
    points = [(one, other) for one, other in zip(x, y, strict=True) if one and other]
    if points:
        from matplotlib.ticker import NullFormatter

        xs, ys = (np.array(values, dtype=float) for values in zip(*points, strict=True))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.scatter(xs, ys, s=18, alpha=0.8)
        limits = axes.get_xlim(), axes.get_ylim()
        axes.plot(limits[0], limits[0], color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlim=limits[0], ylim=limits[1])
        for axis in (axes.xaxis, axes.yaxis):
            if max(axis.get_view_interval()) > 20 * min(axis.get_view_interval()):
                axis.set_minor_formatter(NullFormatter())
    missing = len(x) - len(points)
    axes.set(xlabel=x_label, ylabel=y_label, title=f"{missing} heads without a finite value" if missing else "")
    axes.grid(alpha=0.3)


def _by_layer(states: StateSummary) -> list[tuple[int, list[int]]]:
    columns: dict[int, list[int]] = {}
    for column, head in enumerate(states.heads):
        columns.setdefault(head.layer, []).append(column)
    return list(columns.items())


def _array(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=float)


def _ticks(width: int) -> list[int]:
    return list(range(0, width, max(1, width // 8)))
