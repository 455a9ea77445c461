"""What is timed, how often, in which order; bisection; ratios; budget."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from compressor.out_of_memory import is_out_of_memory
from compressor.speed.cells import Cell, Recorder, described
from compressor.speed.failures import reason
from compressor.speed.kernels import Kernel, top_kernels
from compressor.speed.largest_batch import bisect_batch
from compressor.speed.memory import module_bytes, peak_memory, with_parameters
from compressor.speed.tables import ratios_to, speed_table
from compressor.speed.timing import Schedule, Timing, Work, time_interleaved

CPU = torch.device("cpu")


def test_works_are_taken_in_turns() -> None:
    calls: list[str] = []
    works = {
        name: Work(lambda name=name: calls.append(name), steps=2, begin=lambda name=name: calls.append(f"begin {name}"))
        for name in "ab"
    }
    timings = time_interleaved(works, Schedule(steps=3, warm_up=1, repeats=2), CPU)
    # One call for a warm-up step and two for three timed steps, of two steps each.
    assert calls == ["begin a", "a", "a", "a", "begin b", "b", "b", "b"] * 2
    assert all(isinstance(timing, Timing) and len(timing.rounds) == 2 for timing in timings.values())


def test_seconds_are_of_one_step() -> None:
    timing = time_interleaved({"": Work(lambda: time.sleep(0.02), steps=4)}, Schedule(8, 0, 1), CPU)[""]
    assert isinstance(timing, Timing)
    assert 0.005 <= timing.seconds < 0.02


def test_the_median_round_counts() -> None:
    assert Timing((3.0, 1.0, 2.0)).seconds == 2.0


def test_a_work_that_fails_leaves_the_others() -> None:
    def fail() -> None:
        raise RuntimeError("no kernel\n for this")

    timings = time_interleaved({"bad": Work(fail), "good": Work(lambda: None)}, Schedule(1, 0, 2), CPU)
    assert timings["bad"] == "RuntimeError: no kernel for this"
    assert isinstance(timings["good"], Timing)


def test_reasons() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    assert reason(error) == "out of memory"
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("illegal memory access"))


@pytest.mark.parametrize("limit", [1, 2, 3, 100, 101, 2600, 5000])
@pytest.mark.parametrize("guess", [1, 100, 4000])
def test_the_largest_batch_is_found(limit: int, guess: int) -> None:
    batch, failed = bisect_batch(lambda size: size <= limit, guess)
    assert batch <= limit
    assert failed is not None
    assert limit < failed <= batch + max(1, batch // 64)


def test_no_limit_is_said_to_be_none() -> None:
    assert bisect_batch(lambda size: True, 1)[1] is None


def test_bytes_of_a_module_count_tied_parameters_once() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("scale", torch.zeros(2, dtype=torch.float64))
    assert module_bytes(module) == 9 * 4 + 2 * 8


def test_no_peak_is_made_up_on_a_cpu() -> None:
    with peak_memory(CPU) as peak:
        torch.zeros(1000)
    assert peak.added is None
    assert with_parameters(peak, torch.nn.Linear(2, 2)) is None


DENSE = Cell("decode", "dense", 128, 64, 512, seconds=0.003, peak_bytes=400, rounds=(0.003,))


def test_ratios() -> None:
    cut = replace(DENSE, model="cut", key_width=64, seconds=0.002, peak_bytes=300)
    other_batch = replace(cut, batch=1)
    cells = [DENSE, cut, other_batch]
    assert ratios_to(cut, cells, "dense") == (pytest.approx(1.5), 0.75)
    assert ratios_to(other_batch, cells, "dense") == (None, None)
    assert ratios_to(replace(cut, failed="out of memory"), cells, "dense") == (None, None)
    largest = [replace(cell, part="largest batch", batch=batch) for cell, batch in ((DENSE, 100), (cut, 180))]
    assert ratios_to(largest[1], largest, "dense") == (1.8, None)


def test_the_table_marks_what_disagrees_and_says_what_failed() -> None:
    cells = [replace(DENSE, replay_agrees=False), replace(DENSE, failed="out of memory", seconds=None)]
    table = speed_table(cells, None)
    assert list(table.columns[5].cells) == ["3.000 (!)", "not measured: out of memory"]
    assert len(speed_table(cells, "dense").columns) == len(table.columns) + 2


def test_lines_about_cells() -> None:
    known = replace(DENSE, mode="graph", replay_error=0.25, replay_agrees=False, picked_alike=0.5)
    assert "graph: 3.000 ms" in described(known)
    assert "DISAGREES with the plain loop (error 2.5e-01, picked 0.500)" in described(known)
    assert described(replace(DENSE, failed="out of memory")).endswith("not measured: out of memory")


def test_kernels_are_said_behind_their_cell() -> None:
    lines: list[str] = []
    Recorder(say=lines.append).keep([replace(DENSE, kernels=(Kernel("gemm", 24, 1234.4),))])
    assert lines[1].split() == ["1,234", "us", "in", "24", "calls", "of", "gemm"]


def test_the_longest_operators_come_first() -> None:
    matrix = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    kernels = top_kernels(lambda: matrix @ matrix @ matrix + 1, CPU, count=2)
    assert kernels[0].name in ("aten::mm", "aten::matmul")
    assert [kernel.microseconds for kernel in kernels] == sorted((k.microseconds for k in kernels), reverse=True)
    assert len(kernels) == 2


def test_the_recorder_hands_all_cells_on_after_each() -> None:
    seen: list[int] = []
    recorder = Recorder(on_cells=lambda cells: seen.append(len(cells)))
    recorder.keep([DENSE])
    recorder.keep([DENSE, DENSE])
    assert seen == [1, 3]
    assert not recorder.out_of_time
    assert Recorder(budget_seconds=-1.0).out_of_time
