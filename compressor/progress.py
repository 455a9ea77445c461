"""Progress of long stages: a bar with stage, rate and time left on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Advance = Callable[[int], None]


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s")


class StageReporter:
    """Shows stages on `console`, or nothing when it is None; keeps the seconds each one took."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self.seconds: dict[str, float] = {}

    def say(self, message: str) -> None:
        if self._console is not None:
            self._console.print(message, highlight=False, soft_wrap=True, markup=False)

    def for_part(self) -> StageReporter:
        """One that shows on the same console and begins with the seconds so far: those that a part shares with all."""
        part = StageReporter(self._console)
        part.seconds = dict(self.seconds)
        return part

    @contextmanager
    def stage(self, name: str, total: int, unit: str = "tokens") -> Iterator[Advance]:
        """Time a stage; the yielded function takes the units just done, of `total`."""
        started = time.perf_counter()
        if self._console is not None and self._console.is_terminal:
            columns = (TextColumn("{task.description:<12}"), BarColumn(), _RateColumn(), TimeRemainingColumn())
            with Progress(*columns, console=self._console) as progress:
                task = progress.add_task(name, total=total, unit=unit)
                yield lambda done: progress.advance(task, done)
        else:
            self.say(f"{name}: {total:,} {unit}")
            yield lambda done: None
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
