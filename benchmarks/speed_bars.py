"""What `benchmarks.speed` has to reach: what the study of DRRQR gives for Gated DeltaNet 1.3B on an H100."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.resumable import Row

DENSE_WIDTHS = {"gated_deltanet-1.3b": 128, "gated_deltanet-1.3b-narrow": 128, "gated_deltanet-1.3b-wide": 256}
"""Of the shapes that have bars."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio of dense to half width: of `figure` in the cells of `part`; at `batch`, or at every one for None."""

    name: str
    part: str
    figure: str
    batch: int | None
    value: float
    more_is_better: bool


BARS = (
    Bar("decode speed at batch 64", "decode", "seconds", 64, 1.47, True),
    Bar("mixer speed", "mixer", "seconds", None, 1.26, True),
    Bar("mixer peak memory", "mixer", "peak_bytes", None, 0.73, False),
)


def bars_of(rows: Sequence[Row]) -> list[Row]:
    """Every bar at every shape and size that the rows have both widths of; the first cell of a size counts."""
    found = []
    for shape, width in DENSE_WIDTHS.items():
        for bar in BARS:
            sizes = {
                (row["batch"], row["length"]): None
                for row in rows
                if (row["shape"], row["part"]) == (shape, bar.part) and bar.batch in (None, row["batch"])
            }
            for batch, length in sizes:
                dense, half = (_figure(rows, shape, bar, batch, length, kept) for kept in (width, width // 2))
                if dense and half:
                    ratio = dense / half if bar.more_is_better else half / dense
                    met = ratio >= bar.value if bar.more_is_better else ratio <= bar.value
                    size = {"shape": shape, "batch": batch, "length": length}
                    found.append({"bar": bar.name, **size, "asked": bar.value, "ratio": round(ratio, 4), "met": met})
    return found


def _figure(rows: Sequence[Row], shape: str, bar: Bar, batch: int, length: int, width: int) -> float | None:
    wanted = (shape, bar.part, batch, length, width)
    for row in rows:
        named = (row["shape"], row["part"], row["batch"], row["length"], row["key_width"])
        if named == wanted and row["failed"] is None:
            value: float | None = row[bar.figure]
            return value
    return None
