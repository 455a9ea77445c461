"""Speed and memory of dense and cut models with random weights, side by side on one GPU.

    python -m benchmarks.speed --shape gated_deltanet-1.3b --key-widths 128 64 32 --output speed.json

The widths of a shape are made ready at each size and then timed in turns, in every round, so ratios are of one moment.
Decoding is a captured CUDA graph (see compressor.speed.decoding), which is held against the plain loop before it is
timed. Each cell is written as soon as it is there; one that fails is written with the reason. fla tunes its kernels for
every width, which takes longer than all measuring: run the same command in several processes first, each with one
width, `--mode plain --steps 1 --warm-up 0 --repeats 1` and FLA_CACHE_RESULTS=0, and what they compile is on disk.

`--results FILES --figure FILE` draws results and measures nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.environment import write_result
from benchmarks.options import check_options
from benchmarks.output_files import draw_figure, told_in_one_sentence
from benchmarks.resumable import Row
from benchmarks.speed_bars import bars_of
from benchmarks.speed_figure import draw, read_rows
from benchmarks.speed_shapes import SHAPES, check_key_widths, random_subject
from compressor.errors import RequestError
from compressor.loading import resolve_device
from compressor.speed.cells import Cell, Recorder
from compressor.speed.decoding import DecodePlan
from compressor.speed.measure import (
    Bench,
    measure_decode,
    measure_largest_batch,
    measure_mixer,
    measure_prefill,
)
from compressor.speed.memory import release
from compressor.speed.tables import DISAGREEMENT, speed_table
from compressor.speed.timing import Schedule

PARTS = ("decode", "mixer", "prefill", "mixer-backward", "largest-batch", "widths")
MAIN_DECODE_BATCH, MAIN_MIXER_BATCH = 64, 16
"""The sizes of the bars; they come first, and are what the widths are compared at."""
WIDTHS = tuple(range(128, 0, -16))
WIDTHS_PREFILL = 8192
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@told_in_one_sentence()
def main(words: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(words)
    check_options(arguments)
    if arguments.results:
        if arguments.figure is None:
            raise RequestError("--results needs --figure, the file that they are drawn into; name one.")
        draw_rows(read_rows(arguments.results), arguments.figure)
        return
    for shape, (_, widths, _) in product(arguments.shape, parts_of(arguments)):
        check_key_widths(shape, widths)
    device = resolve_device(arguments.device)
    started = time.monotonic()
    rows: list[Row] = []
    not_begun: list[str] = []

    def write() -> None:
        settings = {name: value for name, value in vars(arguments).items() if name not in _PATHS}
        result = {"settings": settings, "bars": bars_of(rows), "not_begun": not_begun, "rows": rows}
        write_result(arguments.output, result)

    console = Console(width=200)
    for shape, (group, widths, work) in product(arguments.shape, parts_of(arguments)):
        done = len(rows)

        def keep(cells: Sequence[Cell], shape: str = shape, group: str = group, done: int = done) -> None:
            rows[done:] = [{"shape": shape, "group": group, **cell.to_json()} for cell in cells]
            write()

        recorder = Recorder(keep, lambda line: print(line, flush=True), arguments.budget_seconds, started=started)
        if recorder.out_of_time:
            not_begun.append(f"{shape}: {group}")
            print(f"{not_begun[-1]}: not measured: the time was up", flush=True)
            write()
            continue
        _with_models(shape, widths, device, arguments, recorder, work)
        console.print(speed_table(recorder.cells, f"{shape} k={widths[0]}"))
        if any(cell.replay_agrees is False for cell in recorder.cells):
            print(DISAGREEMENT)
    for bar in bars_of(rows):
        print("bar:", bar)
    draw_rows(rows, arguments.figure)


def draw_rows(rows: Sequence[Row], path: Path | None) -> None:
    draw_figure(path, rows, lambda partial: draw(rows, partial))


def parts_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Sequence[int], Callable[[Bench], None]]]:
    """(name, widths, what is measured of the models of these widths), in the order in which it is measured."""
    main = [part for part in arguments.parts if part != "widths"]
    if main:
        yield "main", arguments.key_widths, lambda bench: measure_parts(bench, arguments, main)
    if "widths" in arguments.parts:
        yield "widths", arguments.all_widths, lambda bench: measure_widths(bench, arguments)


def measure_parts(bench: Bench, arguments: argparse.Namespace, parts: Sequence[str]) -> None:
    """The sizes of the bars first, and what may crash last."""
    plan, graph = _plan(arguments), arguments.mode == "graph"
    profiled = replace(bench, profiled=arguments.profile)
    decode = _main_first(arguments.batch_sizes, MAIN_DECODE_BATCH) if "decode" in parts else []
    mixer = _main_first(arguments.mixer_batch_sizes, MAIN_MIXER_BATCH)
    for batch in decode[:1]:
        measure_decode(profiled, batch, plan)
    for batch in mixer if "mixer" in parts else ():
        measure_mixer(profiled if batch == mixer[0] else bench, batch, arguments.mixer_length, "forward", graph)
    for batch in decode[1:]:
        measure_decode(bench, batch, plan)
    for length in arguments.prefill_lengths if "prefill" in parts else ():
        measure_prefill(bench, 1, length)
    if "largest-batch" in parts and bench.device.type == "cuda":
        measure_largest_batch(bench, arguments.prompt_length)
    for batch in mixer[:1] if "mixer-backward" in parts else ():
        measure_mixer(bench, batch, arguments.mixer_length, "forward and backward", False)


def measure_widths(bench: Bench, arguments: argparse.Namespace) -> None:
    """Decoding, the mixer and a prompt at one size each, for every width side by side."""
    decode = _main_first(arguments.batch_sizes, MAIN_DECODE_BATCH)[0]
    mixer = _main_first(arguments.mixer_batch_sizes, MAIN_MIXER_BATCH)[0]
    measure_decode(bench, decode, _plan(arguments))
    measure_mixer(bench, mixer, arguments.mixer_length, "forward", arguments.mode == "graph")
    if arguments.widths_prefill:
        measure_prefill(bench, 1, arguments.widths_prefill)


def _with_models(
    shape: str,
    widths: Sequence[int],
    device: torch.device,
    arguments: argparse.Namespace,
    recorder: Recorder,
    work: Callable[[Bench], None],
) -> None:
    """Make the models, do the work, and give their memory back."""
    dtype = _DTYPES[arguments.dtype]
    schedule = Schedule(arguments.steps, arguments.warm_up, arguments.repeats)
    subjects = [random_subject(shape, width, device, dtype, arguments.seed) for width in widths]
    work(Bench(subjects, device, schedule, recorder))
    del subjects
    release(device, cycles=True)


def _plan(arguments: argparse.Namespace) -> DecodePlan:
    steps = min(arguments.call_steps, arguments.steps)
    return DecodePlan(arguments.prompt_length, steps, arguments.mode, arguments.prompt_piece, arguments.seed)


def _main_first(sizes: Sequence[int], main: int) -> list[int]:
    return sorted(sizes, key=lambda size: size != main)


_PATHS = ("output", "figure", "results")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", nargs="+", choices=list(SHAPES), default=["gated_deltanet-1.3b"])
    add("--key-widths", nargs="+", type=int, default=[128, 64, 32], help="the first is what ratios are against")
    add("--all-widths", nargs="+", type=int, default=list(WIDTHS), help="of the part widths")
    add("--parts", nargs="+", choices=PARTS, default=["decode", "mixer", "prefill"])
    add("--batch-sizes", nargs="+", type=int, default=[1, 16, 64, 256], help="of decoding")
    add("--prompt-length", type=int, default=512)
    add(
        "--prompt-piece", type=int, default=64, help="tokens of the prompt at once: up to 64, fla tunes no chunk kernel"
    )
    add("--prefill-lengths", nargs="+", type=int, default=[8192, 2048, 16384])
    add("--widths-prefill", type=int, default=WIDTHS_PREFILL, help="0 leaves it out")
    add("--mixer-length", type=int, default=2048)
    add("--mixer-batch-sizes", nargs="+", type=int, default=[8, 16, 32])
    add("--steps", type=int, default=100, help="timed in a round; passes over prompts a 20th of it")
    add("--warm-up", type=int, default=10)
    add("--repeats", type=int, default=3)
    add("--call-steps", type=int, default=20, help="steps in one graph")
    add("--mode", choices=("graph", "direct", "plain"), default="graph", help="direct: the graph's function, called")
    add("--no-graphs", dest="mode", action="store_const", const="plain", help="the same as --mode plain")
    add("--dtype", choices=list(_DTYPES), default="bfloat16")
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    add("--profile", action="store_true", help="the longest kernels of decoding and of the mixer, at the bars' sizes")
    add("--budget-seconds", type=float, help="after which no further cell is begun")
    add("--output", type=Path)
    add("--results", nargs="+", type=Path, help="draw these files; measure nothing")
    add("--figure", type=Path)
    return parser


if __name__ == "__main__":
    main()
