"""Time of cutting many states to rank r: subspace iteration, cold and warm, against a batched SVD in the same run.

    python -m benchmarks.state_truncation --model MODEL --device cuda --output state_truncation.json

Each set is the states of two neighbouring boundaries, of which the first gives the warm start: with --model those that
a trained model holds after 1024 and after 1280 tokens of the bundled text, and made-up ones of known spectra, a third
of which is drawn anew in between. Flat spectra, which no iteration can separate and the SVD takes, come last and are
few. A set meets the bars if the warm cut takes at most 10 ms and the SVD 50 times as long, and if no state keeps less
of its energy than with its exact directions by more than 1e-5. Sets are written as they are measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.environment import write_result
from benchmarks.options import check_options
from benchmarks.output_files import told_in_one_sentence
from compressor.architectures.family import family_of
from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError
from compressor.loading import load_model, resolve_device
from compressor.preparation import open_model, open_source
from compressor.probe.segments import Boundary, read_in_segments
from compressor.probe.states import Probed
from compressor.probe.top_directions import project, retained_energy, top_directions
from compressor.probe_documents import probe_documents

FIRST, SECOND = 1024, 1280
MOST_MILLISECONDS, LEAST_RATIO, MOST_ENERGY = 10.0, 50.0, 1e-5
SECONDS_OF_SVD = 2.0
"""After which a batched SVD is not timed again: on a GPU one can take seconds."""
FEW = 32
DRIVERS = ("gesvd", "gesvdj", "gesvda")
Case = tuple[str, Tensor, Tensor]
Found = TypeVar("Found")


@told_in_one_sentence()
def main() -> None:
    arguments = parse_arguments()
    check_options(arguments)
    device = resolve_device(arguments.device)
    results: list[dict[str, Any]] = []
    print(f"{arguments.states} states, rank {arguments.rank}, {device}")
    print(
        f"{'states':<14}{'number':>7}{'cold ms':>9}{'warm ms':>9}{'SVD ms':>10}{'ratio':>7}{'eigh ms':>9}{'by SVD':>8}"
        f"{'energy missed':>15}  bars"
    )
    for name, before, after in cases(arguments):
        result = measure(name, before.to(device), after.to(device), arguments)
        results.append(result)
        milliseconds = [1000 * result[kind]["median"] for kind in ("cold_s", "warm_s", "svd_s", "eigh_s")]
        print(
            f"{name:<14}{result['shape'][0]:>7}{milliseconds[0]:>9.2f}{milliseconds[1]:>9.2f}{milliseconds[2]:>10.1f}"
            f"{result['ratio']:>7.1f}{milliseconds[3]:>9.1f}{result['by_svd']:>8}{result['energy_missed']:>15.1e}  "
            f"{'met' if all(result['bars'].values()) else 'not met'}",
            flush=True,
        )
        write_result(arguments.output, {"settings": settings(arguments), "results": results})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=288)
    parser.add_argument("--width", type=int, default=128, help="of the made-up states")
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--model", help="a folder; its states are cut first")
    parser.add_argument("--device", default="cpu", help="where states are cut; the model runs on the CPU")
    parser.add_argument("--driver", choices=DRIVERS, help="of cuSOLVER's SVD; default: what torch chooses")
    parser.add_argument("--profile", action="store_true", help="kernels of a warm cut, those with the most time first")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "output"}


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Name and the states of two boundaries, float32 [states, d_v, d_k] on the CPU."""
    refuse_rank(arguments.rank, arguments.width)
    if arguments.model is not None:
        yield Path(arguments.model).name, *trained(arguments.model, arguments.states, arguments.rank)
    order = torch.arange(1, arguments.width + 1, dtype=torch.float64)
    spectra = {"1/i": 1 / order, "0.9^i": 0.9**order, "flat": torch.ones_like(order)}
    for name, values in spectra.items():
        count = min(FEW, arguments.states) if name == "flat" else arguments.states
        before, noise = (made_up(values, count, arguments.seed + number) for number in range(2))
        yield name, before.float(), (0.9 * before + 0.3 * noise).float()


def made_up(values: Tensor, count: int, seed: int) -> Tensor:
    """Random matrices of given singular values, float64 [count, n, n]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, len(values), len(values))
    left, right = (torch.linalg.qr(torch.randn(shape, dtype=torch.float64, generator=generator)).Q for _ in range(2))
    return (left * values) @ right.mT


def refuse_rank(rank: int, width: int) -> None:
    """Raises RequestError where states that wide cannot be cut to the rank."""
    if rank > width:
        raise RequestError(f"--rank {rank} is more than the width {width} of the states; give 1 to {width}.")


def trained(folder: str, count: int, rank: int) -> tuple[Tensor, Tensor]:
    """States of all heads of a model after FIRST and after SECOND tokens, of as many documents as it takes.

    Raises:
        RequestError: no such model, a rank above its width, or fewer states.
    """
    source = open_source(open_model(folder, None))
    refuse_rank(rank, min(min(mixer.head_k_dim, mixer.head_v_dim) for mixer in source.mixers))
    tokenizer, device = load_tokenizer(source.folder, False), torch.device("cpu")
    documents = -(-count // sum(mixer.num_v_heads for mixer in source.mixers))
    texts, _ = probe_documents(open_documents(TextSource("demo")), tokenizer, SECOND, 256, documents)
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, torch.float32, device)
    probed = Probed(model, source.architecture, source.mixers, family_of(source.checkpoint.raw_config))
    held: dict[int, list[Tensor]] = {}

    def look(boundary: Boundary) -> None:
        states = [probed.layout.read(boundary.cache, mixer).flatten(0, 1).clone() for mixer in probed.mixers]
        held.setdefault(boundary.read, []).extend(states)

    read_in_segments(model, list(texts), 256, 8, look)
    first, second = (torch.cat(held[tokens])[:count].float() for tokens in (FIRST, SECOND))
    if len(first) < count:
        raise RequestError(
            f"{folder} holds {len(first)} states in {len(texts)} documents, and --states asks for {count}; lower it."
        )
    return first, second


def measure(name: str, before: Tensor, after: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """Each cut with its projection, on the device of the states; `eigh_s` is the decomposition of S S^T alone."""
    rank, device, repetitions = arguments.rank, after.device, arguments.repetitions
    generator = torch.Generator().manual_seed(arguments.seed)
    start = top_directions(before, rank, generator).subspace

    def cut(subspace: Tensor | None) -> Tensor:
        return project(after, top_directions(after, rank, generator, subspace).basis)

    def cut_by_svd(states: Tensor) -> tuple[Tensor, Tensor]:
        left, values, right = torch.linalg.svd(states.double(), full_matrices=False, driver=arguments.driver)
        return left[..., :rank], (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]

    cold, _ = timed(lambda: cut(None), device, repetitions)
    warm, _ = timed(lambda: cut(start), device, repetitions)
    cut_by_svd(after[:2])  # loads the library
    svd, (best, _) = timed(lambda: cut_by_svd(after), device, repetitions, SECONDS_OF_SVD, warm_up=False)
    eigh, _ = timed(lambda: eigenvectors(after), device, repetitions, SECONDS_OF_SVD)
    found = top_directions(after, rank, generator, start)
    missed = float((retained_energy(after, best) - retained_energy(after, found.basis)).max())
    ratio = svd["median"] / warm["median"]
    bars = {
        "milliseconds": 1000 * warm["median"] <= MOST_MILLISECONDS,
        "ratio": ratio >= LEAST_RATIO,
        "energy": missed <= MOST_ENERGY,
    }
    return {
        "name": name, "shape": list(after.shape), "cold_s": cold, "warm_s": warm, "svd_s": svd, "eigh_s": eigh,
        "ratio": ratio, "by_svd": int(found.exact.sum()), "energy_missed": missed, "bars": bars,
        "kernels": kernels(lambda: cut(start)) if arguments.profile else None,
    }  # fmt: skip


def eigenvectors(states: Tensor) -> Tensor:
    """Of S S^T, the other exact way to left singular directions."""
    matrices = states.double()
    return torch.linalg.eigh(matrices @ matrices.mT).eigenvectors


def timed(
    work: Callable[[], Found], device: torch.device, repetitions: int, most_s: float = 10.0, warm_up: bool = True
) -> tuple[dict[str, Any], Found]:
    """Seconds of each run and their median, and what the last gave; none is begun after `most_s` seconds."""
    seconds: list[float] = []
    for number in range(repetitions + warm_up):
        synchronise(device)
        begin = time.perf_counter()
        found = work()
        synchronise(device)
        if number or not warm_up:
            seconds.append(time.perf_counter() - begin)
        if sum(seconds) > most_s:
            break
    return {"all": seconds, "median": median(seconds)}, found


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels(work: Callable[[], object]) -> list[dict[str, Any]]:
    """The twenty functions of one run with the most time on the device, in milliseconds, and how often each ran."""
    with torch.profiler.profile() as profile:
        work()
    times = ("self_device_time_total", "self_cpu_time_total")
    events = sorted(profile.key_averages(), key=attrgetter(*times), reverse=True)
    return [
        {"name": event.key[:120], "calls": event.count, "device_ms": event.self_device_time_total / 1000,
         "cpu_ms": event.self_cpu_time_total / 1000}
        for event in events[:20]
    ]  # fmt: skip


if __name__ == "__main__":
    main()
