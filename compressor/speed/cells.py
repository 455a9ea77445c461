"""Cells of a measurement: what each is of, its figures or why there are none, kept as soon as they are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from compressor.speed.kernels import Kernel

Part = Literal["decode", "prefill", "mixer", "mixer with backward", "largest batch"]
PARTS: tuple[Part, ...] = ("decode", "mixer", "prefill", "mixer with backward", "largest batch")
"""The most telling first."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One part of one model at one size.

    Attributes:
        model: its name; two models of one cell were timed in turns.
        batch: sequences; of the part `largest batch`, as many as fit.
        length: tokens of the prompt, or of each sequence of a pass.
        seconds: the median of `rounds`, mean seconds of a step in each: a decoded token of every sequence, or a pass.
        peak_bytes: most device memory with the model's (or the mixer's) own parameters; None on a CPU.
        state_bytes_per_sequence: of everything in the cache.
        mode: `graph`, `direct` (fixed buffers, no graph) or `plain`.
        note: why the mode is not what was asked for, and whatever else a reader should know.
        replay_error: relative error of the logits against the plain loop's; `replay_agrees` whether that is within the
            dtype's tolerance, `picked_alike` the share of tokens picked alike. None without fixed buffers.
        failed: why there is no figure; None where there is one.
    """

    part: Part
    model: str
    key_width: int
    batch: int | None
    length: int
    seconds: float | None = None
    rounds: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    state_bytes_per_sequence: int | None = None
    mode: str = ""
    note: str = ""
    replay_error: float | None = None
    replay_agrees: bool | None = None
    picked_alike: float | None = None
    kernels: tuple[Kernel, ...] = ()
    failed: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Recorder:
    """Keeps cells; `on_cells` is called with all of them after each new one, `say` with a line about it.

    After `budget_seconds`, counted from the making of the recorder, cells are recorded as not measured.
    """

    on_cells: Callable[[Sequence[Cell]], None] = lambda cells: None
    say: Callable[[str], None] = lambda line: None
    budget_seconds: float | None = None
    cells: list[Cell] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def out_of_time(self) -> bool:
        return self.budget_seconds is not None and time.monotonic() - self.started > self.budget_seconds

    def keep(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            self.cells.append(cell)
            self.say(f"[{time.monotonic() - self.started:.0f} s] {described(cell)}")
            for kernel in cell.kernels:
                self.say(f"    {kernel.microseconds:>10,.0f} us in {kernel.calls:>5} calls of {kernel.name}")
        self.on_cells(self.cells)


def described(cell: Cell) -> str:
    """A line about a cell."""
    batch = "" if cell.batch is None else f" batch {cell.batch}"
    where = f"{cell.part}: {cell.model}{batch} length {cell.length}"
    if cell.failed is not None:
        return f"{where}: not measured: {cell.failed}"
    figures = [] if cell.seconds is None else [f"{1000 * cell.seconds:.3f} ms"]
    if cell.tokens_per_second is not None:
        figures.append(f"{cell.tokens_per_second:,.0f} tokens/s")
    if cell.peak_bytes is not None:
        figures.append(f"peak {cell.peak_bytes / 1e9:.3f} GB")
    if cell.replay_error is not None:
        verdict = "agrees" if cell.replay_agrees else "DISAGREES"
        figures.append(f"{verdict} with the plain loop (error {cell.replay_error:.1e}, picked {cell.picked_alike:.3f})")
    if cell.note:
        figures.append(cell.note)
    return f"{where}: {cell.mode + ': ' if cell.mode else ''}{', '.join(figures)}"
