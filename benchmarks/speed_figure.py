"""The figure of `benchmarks.speed`: milliseconds of a decoded step by batch, and what a cut gains, by shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.resumable import Columns, Row, stored_rows
from benchmarks.speed_bars import BARS, DENSE_WIDTHS
from compressor.errors import RequestError

NUMBER = int | float
COLUMNS: Columns = {
    "shape": str, "group": str, "part": str, "batch": int | None, "length": int, "key_width": int,
    "seconds": NUMBER | None, "peak_bytes": NUMBER | None, "failed": str | None,
}  # fmt: skip
"""What the figure reads."""
_GAINS = (
    ("decode", 64, "seconds", "decode, batch 64"),
    ("decode", 256, "seconds", "decode, batch 256"),
    ("prefill", 1, "seconds", "prefill, 8K"),
    ("mixer", 16, "seconds", "mixer, batch 16"),
    ("mixer", 16, "peak_bytes", "mixer memory"),
    ("largest batch", None, "batch", "largest batch"),
)
_PREFILL_LENGTH = 8192


def read_rows(files: Sequence[Path]) -> list[Row]:
    """The rows of result files that have figures; of a cell that several have, the first.

    Raises:
        RequestError: a file is no result of benchmarks.speed.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    for row in stored_rows(files, COLUMNS, "benchmarks.speed"):
        batch = None if row["part"] == "largest batch" else row["batch"]
        if row["failed"] is None:
            rows.setdefault((row["shape"], row["group"], row["part"], batch, row["length"], row["key_width"]), row)
    return list(rows.values())


def gain(rows: Sequence[Row], part: str, batch: int | None, figure: str, width: int) -> float | None:
    """How many times better the rows of `width` are than those of the widest: faster, smaller, or more sequences."""
    found = {
        row["key_width"]: row[figure]
        for row in rows
        if row["part"] == part
        and (batch is None or row["batch"] == batch)
        and (part != "prefill" or row["length"] == _PREFILL_LENGTH)
        and row[figure] is not None
    }
    if width not in found or len(found) < 2:
        return None
    widest = float(found[max(found)])
    return float(found[width]) / widest if part == "largest batch" else widest / float(found[width])


def draw(rows: Sequence[Row], path: Path) -> None:
    """A row of panels a shape: decoding, gains, and every width where those were measured.

    Raises:
        RequestError: there is no cell with figures.
    """
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    usable = [row for row in rows if row["failed"] is None]
    shapes = list(dict.fromkeys(row["shape"] for row in usable))
    if not shapes:
        raise RequestError("the results have no figure to draw; measure again.")
    columns = 3 if any(row["group"] == "widths" for row in usable) else 2
    size = (6 * columns, 3.8 * len(shapes))
    figure, axes = plt.subplots(len(shapes), columns, figsize=size, layout="constrained", squeeze=False)
    for panels, shape in zip(axes, shapes, strict=True):
        of_shape = [row for row in usable if row["shape"] == shape]
        main = [row for row in of_shape if row["group"] == "main"]
        _draw_decoding(panels[0], main, shape)
        _draw_gains(panels[1], main, shape)
        if columns == 3:
            _draw_widths(panels[2], [row for row in of_shape if row["group"] == "widths"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_decoding(axis: Any, rows: Sequence[Row], shape: str) -> None:
    decoded = [row for row in rows if row["part"] == "decode"]
    for width in sorted({row["key_width"] for row in decoded}, reverse=True):
        points = sorted((row["batch"], 1000 * row["seconds"]) for row in decoded if row["key_width"] == width)
        if len(points) > 1 or len({row["batch"] for row in decoded}) == 1:
            axis.plot(*zip(*points, strict=True), marker="o", label=f"key width {width}")
    axis.set_title(f"{shape}: decoding")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("sequences")
    axis.set_ylabel("ms a step")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _draw_gains(axis: Any, rows: Sequence[Row], shape: str) -> None:
    widths = sorted({row["key_width"] for row in rows}, reverse=True)[1:]
    labels = [label for part, batch, name, label in _GAINS if any(gain(rows, part, batch, name, w) for w in widths)]
    thickness = 0.8 / max(1, len(widths))
    for place, width in enumerate(widths):
        for part, batch, name, label in _GAINS:
            value = gain(rows, part, batch, name, width)
            if value is None:
                continue
            position = labels.index(label) + thickness * (place - (len(widths) - 1) / 2)
            first = labels.index(label) == 0
            axis.barh(position, value, thickness, color=f"C{place + 1}", label=f"{width}" if first else None)
            axis.text(value, position, f" {value:.2f}", va="center", fontsize=7)
    if shape in DENSE_WIDTHS:
        for bar in BARS:
            axis.axvline(bar.value if bar.more_is_better else 1 / bar.value, color="0.6", linestyle=":", linewidth=1)
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set_xlim(left=0)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_title("times better than the widest (dotted: the bars at half the width)")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(title="key width", fontsize=8)


def _draw_widths(axis: Any, rows: Sequence[Row]) -> None:
    """Time of each part by width, as a share of the widest's."""
    if not rows:
        axis.set_axis_off()
        return
    for part in dict.fromkeys(row["part"] for row in rows):
        times = sorted((row["key_width"], row["seconds"]) for row in rows if row["part"] == part)
        shares = [seconds / times[-1][1] for _, seconds in times]
        batch = next(row["batch"] for row in rows if row["part"] == part)
        axis.plot([width for width, _ in times], shares, marker="o", label=f"{part}, batch {batch}")
    axis.set_xticks(sorted({row["key_width"] for row in rows}))
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.set_title("time by key width, share of the widest's")
    axis.legend(fontsize=8)
