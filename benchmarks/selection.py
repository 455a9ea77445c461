"""Time of selection over all heads of a model: of every method, and of strong RRQR on hard Gram matrices.

    python -m benchmarks.selection --output selection.json

What the methods read is made up; the passes that collect it are not timed. Prints two tables; `--output` also writes
every repetition with hardware, versions and commit as JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.environment import write_result
from benchmarks.options import check_options
from benchmarks.output_files import told_in_one_sentence
from compressor.errors import RequestError
from compressor.selection.base import HeadStatistics
from compressor.selection.registry import build_selector
from compressor.selection.rrqr import strong_rrqr

METHODS = ("drrqr", "l1", "energy", "s-wanda", "gradient", "random")
Case = tuple[str, Tensor, float]
LEAST_WIDTH = 4
"""Four blocks make the hardest matrices."""


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    keep = arguments.width - round(arguments.ratio * arguments.width)
    if arguments.width < LEAST_WIDTH or keep < 1:
        raise RequestError(
            f"--width {arguments.width} at --ratio {arguments.ratio:g} keeps {keep} channels; give a width of at least "
            f"{LEAST_WIDTH} of which a channel stays."
        )
    torch.set_num_threads(arguments.threads)
    results = []
    print(f"{arguments.heads} heads of {arguments.width}, keep {keep}, {arguments.threads} threads")
    print(
        f"{'Gram matrices':<24}{'f':>5}{'seconds':>10}{'certified':>12}{'max rho':>10}{'swaps':>8}{'rank < keep':>13}"
    )
    for name, grams, f in cases(arguments.heads, arguments.width, arguments.f, arguments.seed):
        result = measure(name, grams, keep, f, arguments.repetitions)
        results.append(result)
        print(
            f"{name:<24}{f:>5g}{result['seconds_median']:>10.3f}{result['certified']:>12}{result['max_rho']:>10.4f}"
            f"{result['swaps']:>8}{result['rank_deficient']:>13}"
        )
    methods = time_methods(arguments, keep)
    result = {"settings": {**settings(arguments), "keep": keep}, "results": results, "methods": methods}
    write_result(arguments.output, result)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=288)
    parser.add_argument("--width", type=int, default=128, help="key/query channels of one head")
    parser.add_argument("--ratio", type=float, default=0.5, help="share of channels removed")
    parser.add_argument("--f", type=float, default=1.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def measure(name: str, grams: Tensor, keep: int, f: float, repetitions: int) -> dict[str, object]:
    """Selection of every head, after one run to warm up; strong_rrqr raises when a head cannot be certified."""
    diagnostics = strong_rrqr(grams, keep, f).diagnostics
    seconds = repeated(lambda: strong_rrqr(grams, keep, f), repetitions)
    return {
        "name": name,
        "f": f,
        "seconds": seconds,
        "seconds_median": median(seconds),
        "certified": int((diagnostics.max_rho <= f * (1 + 1e-9)).sum()),
        "max_rho": float(diagnostics.max_rho.max()),
        "swaps": int(diagnostics.swaps.sum()),
        "swaps_of_one_head": int(diagnostics.swaps.max()),
        "rank_deficient": int(diagnostics.rank_deficient.sum()),
    }


def repeated(work: Callable[[], object], repetitions: int) -> list[float]:
    """Seconds of each repetition."""
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def time_methods(arguments: argparse.Namespace, keep: int) -> list[dict[str, object]]:
    """Every method on the same made-up statistics."""
    statistics = made_up_statistics(arguments.heads, arguments.width, arguments.seed)
    results: list[dict[str, object]] = []
    print(f"{'method':<24}{'seconds':>10}")
    for method in METHODS:
        selector = build_selector(method, "qk", arguments.f)
        generator = torch.Generator().manual_seed(arguments.seed)
        selector.select(statistics, keep, generator)
        seconds = repeated(partial(selector.select, statistics, keep, generator), arguments.repetitions)
        results.append({"method": method, "seconds": seconds, "seconds_median": median(seconds)})
        print(f"{method:<24}{median(seconds):>10.3f}")
    return results


def made_up_statistics(heads: int, width: int, seed: int) -> HeadStatistics:
    """Gram matrices of correlated activations, and a random score of every channel for each kind of score."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(rows: int, columns: int) -> Tensor:
        return torch.randn(heads, rows, columns, generator=generator, dtype=torch.float64)

    def scores() -> Tensor:
        return torch.rand(heads, width, generator=generator, dtype=torch.float64)

    grams = [matrices.mT @ matrices for matrices in (correlated(gaussian, width), correlated(gaussian, width))]
    return HeadStatistics(
        gram_q=grams[0],
        gram_k=grams[1],
        weight_l1_q=scores(),
        weight_l1_k=scores(),
        tokens=4 * width,
        energy_q=scores(),
        energy_k=scores(),
        wanda_q=scores(),
        wanda_k=scores(),
        gradient_q=scores(),
        gradient_k=scores(),
    )


def cases(heads: int, width: int, f: float, seed: int) -> list[Case]:
    """Name, Gram matrices [heads, width, width] and f."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(rows: int, columns: int) -> Tensor:
        return torch.randn(heads, rows, columns, generator=generator, dtype=torch.float64)

    made = {
        "correlated": correlated(gaussian, width),
        "decay to 1e-5": decaying(gaussian, width),
        "Kahan": kahan(width, torch.linspace(0.9, 0.99, heads, dtype=torch.float64)),
        "Kahan blocks": kahan_blocks(width, torch.linspace(0.6, 0.95, heads, dtype=torch.float64), generator),
        "rank width/4": gaussian(2 * width, width // 4) @ gaussian(width // 4, width),
    }
    grams = {name: matrices.mT @ matrices for name, matrices in made.items()}
    strict = [(name, grams[name], 1.0) for name in ("correlated", "decay to 1e-5")]
    return [(name, gram, f) for name, gram in grams.items()] + strict


def correlated(gaussian: Callable[[int, int], Tensor], width: int) -> Tensor:
    """Random activations through a random mixing of channels."""
    return gaussian(4 * width, width) @ gaussian(width, width)


def decaying(gaussian: Callable[[int, int], Tensor], width: int) -> Tensor:
    """Singular values from 1 to 1e-5 in random directions."""
    left, _ = torch.linalg.qr(gaussian(2 * width, width))
    right, _ = torch.linalg.qr(gaussian(width, width))
    return left * torch.logspace(0, -5, width, dtype=torch.float64) @ right.mT


def kahan(width: int, sines: Tensor) -> Tensor:
    """Kahan's matrices, on which column pivoting fails."""
    cosines = (1 - sines**2).sqrt()[:, None, None]
    powers = torch.arange(width, dtype=torch.float64)
    above = torch.ones(width, width, dtype=torch.float64).triu(1)
    unit = torch.eye(width, dtype=torch.float64)
    return (sines[:, None] ** powers)[:, :, None] * (unit - cosines * above) * (1 - 1e-6) ** powers


def kahan_blocks(width: int, sines: Tensor, generator: torch.Generator) -> Tensor:
    """Four of Kahan's matrices on the diagonal, channels shuffled: several exchanges a head."""
    size = width // 4
    matrices = torch.zeros(len(sines), width, width, dtype=torch.float64)
    for block in range(4):
        channels = slice(block * size, (block + 1) * size)
        matrices[:, channels, channels] = kahan(size, sines)
    return matrices[:, :, torch.randperm(width, generator=generator)]


def settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(arguments).items() if name != "output"}


if __name__ == "__main__":
    main()
