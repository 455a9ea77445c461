"""Figures of the states of one model, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from compressor.probe.axes import draw_positions, draw_rises, draw_scores, scatter
from compressor.probe.experiment import RankOnTask, RankOnText
from compressor.probe.results import ProbedModel
from compressor.probe.summary import StateSummary
from compressor.probe.terms import CONDITION_BOUND, LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 110
_LABELLED_LAYERS = 4
"""Of more layers, bands hide each other and a legend hides the data: they get a scale of colours instead."""


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
    """Medians over documents and heads of a layer, by tokens read; of a few layers also the range of their heads."""
    names = ("entropy_effective_rank", "stable_rank", "utilisation")
    figure, panels = new_figure(len(names))
    layers = _by_layer(states)
    colors = _colors([layer for layer, _ in layers])
    for axes, name in zip(panels, names, strict=True):
        table = _array(states.curves[name].median)
        for layer, columns in layers:
            part = table[:, columns]
            axes.plot(
                states.tokens, np.median(part, axis=1), marker=".", color=colors[layer], label=f"layer {layer}"
            )  # fmt: skip
            if len(layers) <= _LABELLED_LAYERS:
                axes.fill_between(states.tokens, part.min(1), part.max(1), color=colors[layer], alpha=0.12)
        axes.set(xlabel="tokens read", ylabel=LABELS[name])
        axes.grid(alpha=0.3)
    _name_layers(figure, panels, [layer for layer, _ in layers])
    return figure


def draw_spectra(states: StateSummary) -> Figure:
    """Singular values at the end over the largest, mean over documents, median over the heads of a layer."""
    figure, panels = new_figure(1, width=6.5)
    axes, layers = panels[0], _by_layer(states)
    colors = _colors([layer for layer, _ in layers])
    for layer, columns in layers:
        values = np.median([states.heads[column].singular_values for column in columns], axis=0).clip(1e-12)
        axes.semilogy(np.arange(1, len(values) + 1), values, color=colors[layer], label=f"layer {layer}")
    axes.set(xlabel="singular value", ylabel="over the largest")
    axes.grid(alpha=0.3)
    _name_layers(figure, panels, [layer for layer, _ in layers])
    return figure


def draw_reasons(states: StateSummary) -> Figure:
    """Effective rank against what could explain it, and the condition number against its lower bound."""
    figure, panels = new_figure(3)
    ranks = [head.end["entropy_effective_rank"].median for head in states.heads]
    horizons = [head.horizon for head in states.heads]
    scatter(panels[0], horizons, ranks, "decay horizon, tokens", "entropy effective rank of the state")
    decayed: list[float | None] = [head.rank_decayed for head in states.heads]
    scatter(panels[1], decayed, ranks, "effective rank of the decayed key covariance", "of the state")
    bounds = [head.condition_bound for head in states.heads]
    kappas = [head.end["condition_number"].median for head in states.heads]
    scatter(panels[2], bounds, kappas, CONDITION_BOUND, "condition number")
    return figure


def draw_truncation(text: Sequence[RankOnText], tasks: Sequence[RankOnTask]) -> Figure:
    """What is lost by the rank that states are cut to, on text, by position in it, and on tasks."""
    figure, panels = new_figure((2 if text else 0) + (1 if tasks else 0))
    cuts = [(each.rank, each.difference) for each in text if each.rank is not None and each.difference is not None]
    if text:
        draw_rises(panels[0], cuts)
        for rank, loss in cuts:
            draw_positions(panels[1], loss, f"rank {rank}")
        panels[1].set(ylabel="rise of the loss, nats a token")
    if tasks:
        draw_scores(panels[-1], tasks)
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    return figure


def draw_comparison(before: ProbedModel, after: ProbedModel) -> Figure:
    """Baseline and model: utilisation by token, of each head, the tail of the spectra, and loss by position."""
    figure, panels = new_figure(4, width=4.4)
    for label, model in (("baseline", before), ("model", after)):
        states = model.states
        table = _array(states.curves["utilisation"].median)
        panels[0].plot(states.tokens, np.median(table, axis=1), marker=".", label=label)
        width = min(len(head.singular_values) for head in states.heads)
        values = np.median([head.singular_values[:width] for head in states.heads], axis=0).clip(1e-12)
        panels[2].semilogy(np.arange(1, width + 1) / width, values, label=label)
        draw_positions(panels[3], model.loss, label)
    panels[0].set(xlabel="tokens read", ylabel="utilisation, median over heads")
    old, new = ([head.end["utilisation"].median for head in model.states.heads] for model in (before, after))
    scatter(panels[1], old, new, "utilisation of the baseline", "utilisation of the model")
    panels[2].set(xlabel="share of the width", ylabel="singular value over the largest")
    panels[3].set(ylabel="loss, nats a token")
    for axes in (panels[0], panels[2], panels[3]):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _colors(layers: Sequence[int]) -> dict[int, tuple[float, ...]]:
    """Of a few layers, colours that are easy to tell apart; of many, a scale from the first to the last."""
    from matplotlib import colormaps

    if len(layers) <= _LABELLED_LAYERS:
        return {layer: colormaps["tab10"](place) for place, layer in enumerate(layers)}
    span = max(1, max(layers) - min(layers))
    return {layer: colormaps["viridis"]((layer - min(layers)) / span) for layer in layers}


def _name_layers(figure: Figure, panels: Sequence[Axes], layers: Sequence[int]) -> None:
    """What the colours stand for, beside the panels."""
    if len(layers) <= _LABELLED_LAYERS:
        figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(min(layers), max(layers)), "viridis")
    figure.colorbar(scale, ax=list(panels), label="layer")


def _by_layer(states: StateSummary) -> list[tuple[int, list[int]]]:
    columns: dict[int, list[int]] = {}
    for column, head in enumerate(states.heads):
        columns.setdefault(head.layer, []).append(column)
    return list(columns.items())


def _array(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=float)


def _ticks(width: int) -> list[int]:
    return list(range(0, width, max(1, width // 8)))
