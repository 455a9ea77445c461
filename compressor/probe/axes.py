"""Single panels of the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from compressor.probe.experiment import Loss, RankOnTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


def draw_rises(axes: Axes, cuts: Sequence[tuple[int, Loss]]) -> None:
    """Rise of the loss by rank, for copied tokens and others; bars where there is one rank."""
    kinds = {
        "all tokens": [(rank, loss.all) for rank, loss in cuts],
        "copied tokens": [(rank, loss.copied) for rank, loss in cuts],
        "other tokens": [(rank, loss.rest) for rank, loss in cuts],
    }
    points = {
        label: [(rank, each.mean, _bar(each.standard_error)) for rank, each in estimates if each.mean is not None]
        for label, estimates in kinds.items()
    }
    draw_points(axes, {label: values for label, values in points.items() if values}, "rise of the loss, nats a token")


def draw_scores(axes: Axes, tasks: Sequence[RankOnTask]) -> None:
    """Scores by rank; bars where there is one. Dotted: nothing cut."""
    points = {
        name: [
            (each.rank, each.score.mean, _bar(each.score.standard_error))
            for each in tasks
            if each.task == name and each.rank is not None
        ]
        for name in dict.fromkeys(each.task for each in tasks)
    }
    drawn = {name: values for name, values in points.items() if values}
    colors = draw_points(axes, drawn, "score (dotted: nothing cut)")
    for name, color in zip(drawn, colors, strict=True):
        dense = next(each.score.mean for each in tasks if each.task == name and each.rank is None)
        axes.axhline(dense, color=color, linestyle=":", alpha=0.6)
    axes.set_ylim(-0.03, 1.03)


def draw_points(axes: Axes, lines: dict[str, list[tuple[int, float, float]]], label: str) -> list[str]:
    """Lines of (rank, mean, standard error), NaN where there is no error; the colours in the order of the lines."""
    axes.set_ylabel(label)
    colors = [f"C{number}" for number in range(len(lines))]
    ranks = sorted({rank for points in lines.values() for rank, _, _ in points})
    if len(ranks) == 1:
        means, errors = zip(*((mean, error) for ((_, mean, error),) in lines.values()), strict=True)
        axes.bar(range(len(lines)), means, yerr=errors, color=colors, capsize=3, width=0.6)
        axes.set_xticks(range(len(lines)), list(lines))
        axes.set_xlabel(f"states cut to rank {ranks[0]}")
        axes.axhline(0, color="grey", linewidth=0.8)
        return colors
    for number, ((name, points), color) in enumerate(zip(lines.items(), colors, strict=True)):
        xs, means, errors = zip(*points, strict=True)
        # Later lines are thinner: one that lies on another hides nothing.
        size = max(4.0, 9.0 - 2 * number)
        axes.errorbar(
            xs, means, yerr=errors, color=color, marker="o", capsize=2, label=name, markersize=size, linewidth=size / 3
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.minorticks_off()
    axes.set_xlabel("rank that states are cut to")
    return colors


def draw_positions(axes: Axes, loss: Loss, label: str) -> None:
    buckets = [(bucket.stop, bucket.loss.mean) for bucket in loss.by_position if bucket.loss.mean is not None]
    axes.plot([stop for stop, _ in buckets], [mean for _, mean in buckets], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens read, up to")


def scatter(axes: Axes, x: Sequence[float | None], y: Sequence[float | None], x_label: str, y_label: str) -> None:
    """Log-log with y = x; heads with an infinite value are counted in the title."""
    points = [(one, other) for one, other in zip(x, y, strict=True) if one and other]
    if points:
        xs, ys = (np.array(values, dtype=float) for values in zip(*points, strict=True))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.scatter(xs, ys, s=18, alpha=0.8)
        limits = axes.get_xlim(), axes.get_ylim()
        axes.plot(limits[0], limits[0], color="grey", linewidth=0.8, linestyle="--")
        axes.set(xlim=limits[0], ylim=limits[1])
        for axis in (axes.xaxis, axes.yaxis):
            _label_few(axis)
    missing = len(x) - len(points)
    axes.set(xlabel=x_label, ylabel=y_label, title=f"{missing} heads without a finite value" if missing else "")
    axes.grid(alpha=0.3)


def _label_few(axis: Axis) -> None:
    """Powers of ten alone; where fewer than two are in view a few round numbers."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

    low, high = sorted(axis.get_view_interval())
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if sum(low <= 10.0**exponent <= high for exponent in exponents) >= 2:
        axis.set_minor_formatter(NullFormatter())
        return
    values = [step * 10.0**exponent for exponent in exponents for step in (1, 2, 5)]
    values = [value for value in values if low <= value <= high]
    if len(values) < 3:
        values = [value for value in MaxNLocator(4).tick_values(low, high) if low <= value <= high]
    axis.set_minor_locator(NullLocator())
    axis.set_ticks(values, [f"{value:.6g}" for value in values])


def _bar(error: float | None) -> float:
    """No bar where the error is unknown: one of no length would say that it is 0."""
    return np.nan if error is None else error
