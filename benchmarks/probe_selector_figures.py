"""Table and figure of benchmarks.probe_selectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import torch

from benchmarks.resumable import Row
from benchmarks.selector_figures import COLORS
from compressor.errors import RequestError
from compressor.evaluation.results import Score, score_of
from compressor.probe.horizons import pearson, spearman

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "os^Dv*"


@dataclass(frozen=True, slots=True)
class HeadUse:
    """A cut beside the model as it is.

    Attributes:
        rise: nats a token, over documents; None for the model itself.
        utilisation, effective_rank: means over heads.
        pearson, spearman: of the utilisation of each head, cut and not; None for the model itself.
        condition, bound: medians over heads of the condition number and of 1/sqrt(utilisation); None is infinite.
        least_margin: the least condition number over its bound of any head.
    """

    rise: Score | None
    utilisation: float
    effective_rank: float
    pearson: float | None
    spearman: float | None
    condition: float | None
    bound: float
    least_margin: float


def head_use(row: Row, dense: Row) -> HeadUse:
    heads = row["heads"]
    used, before = (torch.tensor(each["heads"]["utilisation"], dtype=torch.float64) for each in (row, dense))
    bounds = used.rsqrt().tolist()
    conditions = [float("inf") if value is None else value for value in heads["condition_number"]]
    middle = median(conditions)
    own = row["method"] == "dense"
    return HeadUse(
        rise=None if own else score_of([a - b for a, b in zip(row["losses"], dense["losses"], strict=True)]),
        utilisation=float(used.mean()),
        effective_rank=fmean(heads["entropy_effective_rank"]),
        pearson=None if own else pearson(before, used),
        spearman=None if own else spearman(before, used),
        condition=None if middle == float("inf") else middle,
        bound=median(bounds),
        least_margin=min(condition / bound for condition, bound in zip(conditions, bounds, strict=True)),
    )


def dense_of(rows: Sequence[Row], model: str) -> Row:
    """Raises RequestError where the model as it is was not measured."""
    for row in rows:
        if (row["model"], row["method"]) == (model, "dense"):
            return row
    raise RequestError(
        f"no row of {model} as it is, which cuts are compared with; measure again with another --output."
    )


def print_probes(rows: Sequence[Row]) -> None:
    """One line a cut."""
    print(
        f"{'model':<14}{'method':<11}{'keep':>5} {'epsilon':<8}{'rise, nats':>19}{'utilisation':>12}{'Pearson':>9}"
        f"{'Spearman':>9}{'eff. rank':>10}{'kappa(S)':>11}{'1/sqrt(u)':>10}{'least ratio':>12}"
    )
    for row in rows:
        use = head_use(row, dense_of(rows, row["model"]))
        rise = "" if use.rise is None else f"{use.rise.mean:+.4f} +- {use.rise.standard_error or float('nan'):.4f}"
        condition = "infinite" if use.condition is None else f"{use.condition:.4g}"
        print(
            f"{row['model']:<14}{row['method']:<11}{row['key_dim']:>5} {row['norm_epsilon']:<8}{rise:>19}"
            f"{use.utilisation:>12.4f}{_number(use.pearson):>9}{_number(use.spearman):>9}{use.effective_rank:>10.2f}"
            f"{condition:>11}{use.bound:>10.3g}{use.least_margin:>12.3g}"
        )


def draw_probes(rows: Sequence[Row], path: Path) -> None:
    """Utilisation of each head, dense against pruned, a panel a method; kappa(S) against its bound; utilisation along
    the text; the tail of the spectra. A row of panels a model and norm epsilon."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cuts = [row for row in rows if row["method"] != "dense"]
    lines = list(dict.fromkeys((row["model"], row["norm_epsilon"]) for row in cuts))
    methods = list(dict.fromkeys(row["method"] for row in cuts))
    columns = len(methods) + 3
    figure = Figure(figsize=(3.3 * columns, 3.4 * len(lines)), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False)
    for panels, (model, epsilon) in zip(grid, lines, strict=False):
        dense = dense_of(rows, model)
        made = [row for row in cuts if (row["model"], row["norm_epsilon"]) == (model, epsilon)]
        for axes, method in zip(panels, methods, strict=False):
            _draw_heads(axes, [row for row in made if row["method"] == method], dense, method)
        panels[0].set_ylabel(f"{model}, epsilon {epsilon}\nutilisation, pruned")
        # The narrowest cuts say most: one line a method stays readable.
        narrowest = [row for row in made if row["ratio"] == max(each["ratio"] for each in made)]
        _draw_conditions(panels[-3], [dense, *narrowest])
        _draw_along(panels[-2], panels[-1], [dense, *narrowest])
    FigureCanvasAgg(figure).print_figure(str(path), dpi=90)


def _draw_heads(axes: Axes, rows: Sequence[Row], dense: Row, method: str) -> None:
    before = dense["heads"]["utilisation"]
    for number, row in enumerate(rows):
        use = head_use(row, dense)
        label = f"{row['key_dim']} kept: Pearson {_number(use.pearson)}, Spearman {_number(use.spearman)}"
        marker = MARKERS[number % len(MARKERS)]
        axes.scatter(before, row["heads"]["utilisation"], s=16, alpha=0.7, marker=marker, label=label)
    everything = [value for row in (dense, *rows) for value in row["heads"]["utilisation"]]
    limits = (0.8 * min(everything), 1.25 * max(everything))
    axes.plot(limits, limits, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", title=method, xlabel="utilisation, dense")
    axes.legend(fontsize=6)
    axes.grid(alpha=0.3)


def _draw_conditions(axes: Axes, rows: Sequence[Row]) -> None:
    lowest = 1.0
    highest = 1.0
    for row in rows:
        points = [
            (used**-0.5, condition)
            for used, condition in zip(
                row["heads"]["utilisation"], row["heads"]["condition_number"], strict=True
            )
            if condition is not None and used
        ]  # fmt: skip
        bounds, conditions = [bound for bound, _ in points], [condition for _, condition in points]
        highest = max([highest, *bounds])
        axes.scatter(bounds, conditions, s=14, alpha=0.7, color=_color(row), label=_label(row))
    axes.plot((lowest, highest), (lowest, highest), color="grey", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="1/sqrt(utilisation)", ylabel="condition number of the state")
    axes.legend(fontsize=6)
    axes.grid(alpha=0.3)


def _draw_along(tokens: Axes, tail: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        tokens.plot(row["tokens"], row["utilisation"], marker=".", color=_color(row), label=_label(row))
        values = row["singular_values"]
        shares = [(number + 1) / len(values) for number in range(len(values))]
        tail.semilogy(shares, values, color=_color(row), label=_label(row))
    tokens.set(xlabel="tokens read", ylabel="utilisation, mean over heads")
    tail.set(xlabel="share of the width", ylabel="singular value over the largest")
    for axes in (tokens, tail):
        axes.legend(fontsize=6)
        axes.grid(alpha=0.3)


def _color(row: Row) -> str:
    return "black" if row["method"] == "dense" else COLORS.get(row["method"], "tab:olive")


def _label(row: Row) -> str:
    return "dense" if row["method"] == "dense" else f"{row['method']}, {row['key_dim']} kept"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
