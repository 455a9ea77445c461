"""Cells as a table, with ratios to the first model of each size."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from compressor.speed.cells import Cell

_MARK = " (!)"
DISAGREEMENT = "(!) the captured steps did not give the plain loop's logits: do not trust this figure."


def speed_table(cells: Sequence[Cell], baseline: str | None) -> Table:
    """A row a cell. Time is of a step; `speed` and `memory` are times the baseline's, above 1 faster and below 1 less.

    `baseline` names the model that the others are set against; None leaves the ratios out.
    """
    ratios = () if baseline is None else ("speed", "memory")
    table = Table(
        "part", "batch", "length", "model", "key width", "ms a step", "tokens/s", "peak memory", "state bytes"
    )
    for name in ratios:
        table.add_column(f"{name} ratio")
    for cell in cells:
        row = [
            cell.part,
            "none" if cell.batch is None else f"{cell.batch:,}",
            f"{cell.length:,}",
            cell.model,
            str(cell.key_width),
        ]
        if cell.failed is not None:
            table.add_row(*row, f"not measured: {cell.failed}")
            continue
        row += [_milliseconds(cell), _count(cell.tokens_per_second), _gigabytes(cell.peak_bytes)]
        row.append(_count(cell.state_bytes_per_sequence))
        if baseline is not None:
            row += [_ratio(each) for each in ratios_to(cell, cells, baseline)]
        table.add_row(*row)
    return table


def ratios_to(cell: Cell, cells: Sequence[Cell], baseline: str) -> tuple[float | None, float | None]:
    """Speed and peak memory as multiples of the baseline's; of the largest batch, its size instead of speed."""
    of_size = None if cell.part == "largest batch" else cell.batch
    other = next(
        (
            each
            for each in cells
            if each.model == baseline
            and (each.part, each.length) == (cell.part, cell.length)
            and (of_size is None or each.batch == of_size)
            and each.failed is None
        ),
        None,
    )
    if other is None or cell.failed is not None:
        return None, None
    if cell.part == "largest batch":
        return (None if not cell.batch or not other.batch else cell.batch / other.batch), None
    speed = other.seconds / cell.seconds if cell.seconds and other.seconds else None
    memory = cell.peak_bytes / other.peak_bytes if cell.peak_bytes and other.peak_bytes else None
    return speed, memory


def _milliseconds(cell: Cell) -> str:
    if cell.seconds is None:
        return "not timed"
    return f"{1000 * cell.seconds:.3f}" + (_MARK if cell.replay_agrees is False else "")


def _count(number: float | None) -> str:
    return "not measured" if number is None else f"{number:,.0f}"


def _gigabytes(number: int | None) -> str:
    return "not measured" if number is None else f"{number / 1e9:.2f} GB"


def _ratio(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"
