"""Seconds of a step of several pieces of work, taken in turns so that their ratios are of one moment of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from compressor.speed.failures import MEASURING_ERRORS, reason


@dataclass(frozen=True, slots=True)
class Schedule:
    """In each of `repeats` rounds, `warm_up` steps that are not timed and then `steps` that are."""

    steps: int = 100
    warm_up: int = 10
    repeats: int = 3

    def shortened(self, factor: int) -> Schedule:
        """For work that takes that many times longer: at least one step of each kind."""
        return Schedule(max(1, self.steps // factor), max(1, self.warm_up // factor), self.repeats)


@dataclass(frozen=True, slots=True)
class Work:
    """`call` does `steps` steps. `begin` is called, untimed, at the start of each round."""

    call: Callable[[], object]
    steps: int = 1
    begin: Callable[[], None] | None = None

    def calls_for(self, steps: int) -> int:
        """As many calls as do at least `steps` steps."""
        return -(-steps // self.steps)


@dataclass(frozen=True, slots=True)
class Timing:
    """Mean seconds of a step in each round."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)


def time_interleaved(works: Mapping[str, Work], schedule: Schedule, device: torch.device) -> dict[str, Timing | str]:
    """Time every work once in each round, one after the other; for one that fails, why."""
    rounds: dict[str, list[float]] = {name: [] for name in works}
    failed: dict[str, str] = {}
    for _ in range(schedule.repeats):
        for name, work in works.items():
            if name in failed:
                continue
            try:
                rounds[name].append(_round(work, schedule, device))
            except MEASURING_ERRORS as error:
                failed[name] = reason(error)
    return {name: failed[name] if name in failed else Timing(tuple(rounds[name])) for name in works}


def _round(work: Work, schedule: Schedule, device: torch.device) -> float:
    """Mean seconds of a step."""
    if work.begin is not None:
        work.begin()
    for _ in range(work.calls_for(schedule.warm_up)):
        work.call()
    calls = work.calls_for(schedule.steps)
    seconds = _cuda_seconds(work, calls) if device.type == "cuda" else _wall_seconds(work, calls)
    return seconds / (calls * work.steps)


def _wall_seconds(work: Work, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        work.call()
    return time.perf_counter() - started


def _cuda_seconds(work: Work, calls: int) -> float:
    """By events on the stream, which leave out what the host does after the last launch."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work.call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000
