"""The cells of several models, measured side by side: at each size all of them are made ready, then timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from compressor.architectures.base import Mixer
from compressor.speed.cells import Cell, Part, Recorder
from compressor.speed.decoding import DecodePlan, Decoding, prepare_decoding
from compressor.speed.failures import MEASURING_ERRORS, reason
from compressor.speed.kernels import Kernel, top_kernels
from compressor.speed.largest_batch import find_largest_batch
from compressor.speed.memory import module_bytes, peak_memory, release, with_parameters
from compressor.speed.passes import MixerWork, Passes, mixer_call, mixer_input, mixer_work, prefill_work
from compressor.speed.timing import Schedule, Timing, Work, time_interleaved

PREFILL_SHORTENED = 20
"""Passes over thousands of tokens are timed that many times less often than decoding steps."""
_BACKWARD_SHORTENED = 5

Ready = TypeVar("Ready")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is measured; the first of several is what ratios are against."""

    name: str
    model: PreTrainedModel
    mixers: Sequence[Mixer]

    @property
    def key_width(self) -> int:
        return self.mixers[0].head_k_dim


@dataclass(frozen=True, slots=True)
class Bench:
    """The subjects, where they are, how often each step is timed, and where the cells go."""

    subjects: Sequence[Subject]
    device: torch.device
    schedule: Schedule
    recorder: Recorder
    profiled: bool = False

    def kernels(self, work: Work) -> tuple[Kernel, ...]:
        """Those of one call; none where no profile is asked for or the machine gives none."""
        if not self.profiled:
            return ()
        try:
            if work.begin is not None:
                work.begin()
            return tuple(top_kernels(work.call, self.device))
        except MEASURING_ERRORS as error:
            self.recorder.say(f"no profile: {reason(error)}")
            return ()


def measure_decode(bench: Bench, batch: int, plan: DecodePlan) -> None:
    """Seconds of a step behind a prompt. Peak memory is that of prompt and steps."""
    blank = _blanks(bench, "decode", batch, plan.prompt_length)

    def prepare(subject: Subject) -> tuple[Decoding, Cell]:
        with peak_memory(bench.device) as peak:
            decoding = prepare_decoding(subject.model, batch, plan, bench.schedule, bench.device)
        cell = replace(
            blank[subject.name],
            peak_bytes=with_parameters(peak, subject.model),
            state_bytes_per_sequence=decoding.state_bytes // batch,
            mode=decoding.mode,
            note=decoding.note,
        )
        if decoding.agreement is not None:
            error, alike = decoding.agreement.error, decoding.agreement.picked_alike
            agrees = decoding.agreement.agrees
            cell = replace(cell, replay_error=error, picked_alike=alike, replay_agrees=agrees)
        return decoding, cell

    def finish(subject: Subject, decoding: Decoding, timing: Timing, cell: Cell) -> Cell:
        return replace(_timed(cell, timing, batch), kernels=bench.kernels(decoding.work))

    _measure(bench, blank, prepare, lambda ready: ready.work, bench.schedule, finish)


def measure_prefill(bench: Bench, batch: int, length: int) -> None:
    """Seconds of reading `length` tokens of `batch` sequences, once with the peak memory."""
    blank = _blanks(bench, "prefill", batch, length)

    def prepare(subject: Subject) -> tuple[Work, Cell]:
        work = prefill_work(subject.model, batch, length, 0, bench.device)
        work.call()
        with peak_memory(bench.device) as peak:
            work.call()
        return work, replace(blank[subject.name], peak_bytes=with_parameters(peak, subject.model), mode="plain")

    def finish(subject: Subject, work: Work, timing: Timing, cell: Cell) -> Cell:
        return _timed(cell, timing, batch * length)

    _measure(bench, blank, prepare, lambda ready: ready, bench.schedule.shortened(PREFILL_SHORTENED), finish)


def measure_mixer(bench: Bench, batch: int, length: int, passes: Passes, graph: bool) -> None:
    """The first mixer alone. Peak memory is of one pass, with its parameters and its input."""
    part: Part = "mixer" if passes == "forward" else "mixer with backward"
    blank = _blanks(bench, part, batch, length)

    def prepare(subject: Subject) -> tuple[MixerWork, Cell]:
        mixer = subject.mixers[0]
        hidden = mixer_input(subject.model, batch, length, 0, bench.device)
        call = mixer_call(subject.model, mixer, hidden, passes)
        call()
        with peak_memory(bench.device) as peak:
            call()
        own = module_bytes(subject.model.get_submodule(mixer.module)) + hidden.numel() * hidden.element_size()
        ready = mixer_work(call, graph and passes == "forward" and bench.device.type == "cuda")
        cell = replace(blank[subject.name], mode="graph" if ready.graph else "plain", note=ready.note)
        return ready, cell if peak.added is None else replace(cell, peak_bytes=peak.added + own)

    def finish(subject: Subject, ready: MixerWork, timing: Timing, cell: Cell) -> Cell:
        return replace(_timed(cell, timing, batch * length), kernels=bench.kernels(ready.work))

    schedule = bench.schedule if passes == "forward" else bench.schedule.shortened(_BACKWARD_SHORTENED)
    _measure(bench, blank, prepare, lambda ready: ready.work, schedule, finish)


def measure_largest_batch(bench: Bench, length: int) -> None:
    """How many sequences decode at once, one model after the other; the others wait on the CPU."""
    for name, blank in _blanks(bench, "largest batch", None, length).items():
        subject = next(subject for subject in bench.subjects if subject.name == name)
        if bench.recorder.out_of_time:
            bench.recorder.keep([replace(blank, failed="the time was up")])
            continue
        for other in bench.subjects:
            other.model.to(bench.device if other is subject else "cpu")  # type: ignore[arg-type]
        release(bench.device, cycles=True)
        try:
            found = find_largest_batch(subject.model, length, bench.device)
        except MEASURING_ERRORS as error:
            bench.recorder.keep([replace(blank, failed=reason(error))])
            continue
        limit = "no limit was met" if found.failed is None else f"{found.failed} do not fit"
        cell = replace(
            blank,
            batch=found.batch,
            tokens_per_second=found.tokens_per_second,
            state_bytes_per_sequence=found.state_bytes_per_sequence,
            mode="plain",
            note=limit,
        )
        bench.recorder.keep([cell])
    for subject in bench.subjects:
        subject.model.to(bench.device)  # type: ignore[arg-type]
    release(bench.device)


def _measure(
    bench: Bench,
    blanks: Mapping[str, Cell],
    prepare: Callable[[Subject], tuple[Ready, Cell]],
    work_of: Callable[[Ready], Work],
    schedule: Schedule,
    finish: Callable[[Subject, Ready, Timing, Cell], Cell],
) -> None:
    """Prepare every subject, time them in turns, and keep a cell of each, with why where there is no figure."""
    if bench.recorder.out_of_time:
        bench.recorder.keep([replace(blank, failed="the time was up") for blank in blanks.values()])
        return
    release(bench.device)
    ready: dict[str, tuple[Ready, Cell]] = {}
    cells: dict[str, Cell] = {}
    for subject in bench.subjects:
        try:
            ready[subject.name] = prepare(subject)
        except MEASURING_ERRORS as error:
            cells[subject.name] = replace(blanks[subject.name], failed=reason(error))
        if subject.name in cells:
            release(bench.device, cycles=True)
    works = {name: work_of(one) for name, (one, _) in ready.items()}
    timings = time_interleaved(works, schedule, bench.device)
    for subject in bench.subjects:
        timing = timings.get(subject.name)
        if isinstance(timing, str):
            cells[subject.name] = replace(ready[subject.name][1], failed=timing)
        elif timing is not None:
            one, cell = ready[subject.name]
            cells[subject.name] = finish(subject, one, timing, cell)
    bench.recorder.keep([cells[subject.name] for subject in bench.subjects])


def _blanks(bench: Bench, part: Part, batch: int | None, length: int) -> dict[str, Cell]:
    return {subject.name: Cell(part, subject.name, subject.key_width, batch, length) for subject in bench.subjects}


def _timed(cell: Cell, timing: Timing, tokens: int) -> Cell:
    """`tokens` are of one step."""
    seconds = timing.seconds
    return replace(cell, seconds=seconds, rounds=timing.rounds, tokens_per_second=tokens / seconds if seconds else None)
