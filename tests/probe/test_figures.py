"""Panels say what is known and no more, and can be read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from compressor.evaluation.estimates import Estimate
from compressor.probe.axes import draw_rises, scatter
from compressor.probe.experiment import Loss
from compressor.probe.figures import draw_curves, new_figure
from compressor.probe.horizons import HorizonSummary
from compressor.probe.spectra import FIGURES
from compressor.probe.summary import Curve, HeadSummary, Range, StateSummary


def loss(mean: float, error: float | None) -> Loss:
    value = Estimate(10, mean, error)
    return Loss(value, (), Estimate(0, None, None), value)


def tick_boxes(figure: Figure, axis: str) -> list[tuple[float, float]]:
    """Left and right edge, in pixels, of every label of the x axis, or lower and upper edge of the y axis."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes = figure.axes[0]
    ticks = axes.xaxis if axis == "x" else axes.yaxis
    low, high = ticks.get_view_interval()
    boxes = []
    for tick in (*ticks.get_major_ticks(), *ticks.get_minor_ticks()):
        box = tick.label1.get_window_extent(canvas.get_renderer())
        if tick.label1.get_text() and low <= tick.get_loc() <= high:
            boxes.append((box.x0, box.x1) if axis == "x" else (box.y0, box.y1))
    return sorted(boxes)


@pytest.mark.parametrize("high", [1.004, 1.5, 4.0, 9.0, 30.0, 99.0, 2000.0, 1e7])
@pytest.mark.parametrize("low", [1.0, 3.1, 0.0625])
def test_labels_of_an_axis_do_not_collide(low: float, high: float) -> None:
    figure, (axes,) = new_figure(1)
    values = list(np.geomspace(low, low * high, 9))
    scatter(axes, values, values, "x", "y")
    for axis in ("x", "y"):
        boxes = tick_boxes(figure, axis)
        assert len(boxes) >= 2
        assert all(one[1] < other[0] for one, other in pairwise(boxes))


@pytest.mark.parametrize("ranks", [(4,), (8, 4, 1)])
def test_an_unknown_error_has_no_bar(ranks: tuple[int, ...]) -> None:
    for error, bars in ((None, 0), (0.1, 1)):
        figure, (axes,) = new_figure(1)
        draw_rises(axes, [(rank, loss(1.0, error)) for rank in ranks])
        FigureCanvasAgg(figure).draw()
        segments = [segment for container in axes.containers for segment in _segments(container)]
        assert bool(segments) == bool(bars)
        assert all(abs(segment[1, 1] - segment[0, 1]) == pytest.approx(0.2) for segment in segments)


def _segments(container: object) -> list[np.ndarray]:
    """Vertical bars, from lower to upper end, that can be seen."""
    from matplotlib.container import BarContainer, ErrorbarContainer

    if isinstance(container, BarContainer):
        return [] if container.errorbar is None else _segments(container.errorbar)
    if not isinstance(container, ErrorbarContainer):
        return []
    found = [segment for bars in container.lines[2] for segment in bars.get_segments()]
    return [segment for segment in found if len(segment) == 2 and np.isfinite(segment).all()]


def test_one_rank_is_drawn_as_bars() -> None:
    figure, (axes,) = new_figure(1)
    draw_rises(axes, [(4, loss(0.5, 0.1))])
    FigureCanvasAgg(figure).draw()
    assert [patch.get_height() for patch in axes.patches] == [0.5, 0.5]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["all tokens", "other tokens"]


@pytest.mark.parametrize(("layers", "legends", "bars"), [(3, 1, 0), (12, 0, 1)])
def test_many_layers_get_a_scale_of_colours_beside_the_data(layers: int, legends: int, bars: int) -> None:
    figure = draw_curves(summary(layers))
    panels = figure.axes[:3]
    assert len(figure.axes) == 3 + bars
    assert len(figure.legends) == legends
    assert all(axes.get_legend() is None and len(axes.lines) == layers for axes in panels)
    assert all(bool(axes.collections) == bool(legends) for axes in panels)
    assert len({line.get_color() for line in panels[0].lines}) == layers


def summary(layers: int) -> StateSummary:
    """Two heads a layer, two boundaries."""
    none = dict.fromkeys(FIGURES, Range(1.0, 1.0, 1.0))
    heads = tuple(
        HeadSummary(layer, head, none, 1.0, (1.0, 0.5), 3.0, 0.5, 2.0, 2.0)
        for layer in range(layers)
        for head in (0, 1)
    )
    rows = tuple(tuple(float(number + row) for number in range(len(heads))) for row in (1, 2))
    curves = {name: Curve(rows, rows, rows) for name in FIGURES}
    return StateSummary((64, 128), (1, 1), heads, curves, HorizonSummary(None, 1.0, ()))
