"""Time of cutting many states to rank r: subspace iteration, cold and warm, against a batched SVD in the same run.

    python -m benchmarks.state_truncation --model MODEL --device cuda --output state_truncation.json

Two sets of states that differ as those of two neighbouring boundaries: made-up ones of known spectra, and with --model
those that a trained model holds after 1024 and after 1280 tokens of the bundled text, repeated to the number asked for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import write_result
from compressor.architectures.family import family_of
from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.loading import load_model
from compressor.preparation import open_model, open_source
from compressor.probe.segments import Boundary, read_in_segments
from compressor.probe.states import Probed
from compressor.probe.top_directions import project, retained_energy, top_directions
from compressor.probe_documents import probe_documents

FIRST, SECOND = 1024, 1280
Case = tuple[str, Tensor, Tensor]


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    results = []
    print(f"{arguments.states} states, rank {arguments.rank}, {device}")
    print(f"{'states':<24}{'cold ms':>10}{'warm ms':>10}{'SVD ms':>10}{'ratio':>8}{'by SVD':>8}{'energy missed':>16}")
    for name, before, after in cases(arguments, device):
        result = measure(name, before, after, arguments.rank, arguments.repetitions)
        results.append(result)
        milliseconds = [1000 * result[kind]["median"] for kind in ("cold_s", "warm_s", "svd_s")]
        print(
            f"{name:<24}{milliseconds[0]:>10.2f}{milliseconds[1]:>10.2f}{milliseconds[2]:>10.1f}"
            f"{milliseconds[2] / milliseconds[1]:>8.1f}{result['by_svd']:>8}{result['energy_missed']:>16.1e}"
        )
    write_result(arguments.output, {"settings": settings(arguments), "results": results})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=288)
    parser.add_argument("--width", type=int, default=128, help="of the made-up states")
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--model", help="a folder; its states are cut too")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "output"}


def cases(arguments: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Name and the states of two boundaries, float32 [states, d_v, d_k]."""
    order = torch.arange(1, arguments.width + 1, dtype=torch.float64)
    for name, values in (("1/i", 1 / order), ("0.9^i", 0.9**order), ("flat", torch.ones_like(order))):
        before = made_up(values, arguments.states, arguments.seed)
        noise = made_up(values, arguments.states, arguments.seed + 1)
        yield name, before.float().to(device), (0.9 * before + 0.3 * noise).float().to(device)
    if arguments.model is not None:
        before, after = trained(arguments.model, arguments.states, device)
        yield Path(arguments.model).name, before, after


def made_up(values: Tensor, count: int, seed: int) -> Tensor:
    """Random matrices of given singular values, float64 [count, n, n]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, len(values), len(values))
    left, right = (torch.linalg.qr(torch.randn(shape, dtype=torch.float64, generator=generator)).Q for _ in range(2))
    return (left * values) @ right.mT


def trained(folder: str, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """States of all heads of a model, after FIRST and after SECOND tokens, in its own dtype."""
    configured = open_model(folder, None)
    source = open_source(configured)
    tokenizer = load_tokenizer(source.folder, False)
    documents, _ = probe_documents(open_documents(TextSource("demo")), tokenizer, SECOND, 256, 8)
    model = load_model(source.architecture, source.folder, source.checkpoint.raw_config, torch.float32, device)
    probed = Probed(model, source.architecture, source.mixers, family_of(source.checkpoint.raw_config))
    held: dict[int, Tensor] = {}

    def look(boundary: Boundary) -> None:
        states = [probed.layout.read(boundary.cache, mixer).flatten(0, 1).clone() for mixer in probed.mixers]
        held[boundary.read] = torch.cat(states)

    read_in_segments(model, list(documents), 256, 8, look)
    first, second = (held[tokens][torch.arange(count) % len(held[tokens])] for tokens in (FIRST, SECOND))
    return first.clone(), second.clone()


def measure(name: str, before: Tensor, after: Tensor, rank: int, repetitions: int) -> dict[str, Any]:
    """Each with its projection, after one run to warm up."""
    generator = torch.Generator().manual_seed(0)
    start = top_directions(before, rank, generator).subspace

    def cut(subspace: Tensor | None) -> Tensor:
        return project(after, top_directions(after, rank, generator, subspace).basis)

    def cut_by_svd() -> Tensor:
        left, values, right = torch.linalg.svd(after.double(), full_matrices=False)
        return (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]

    found = top_directions(after, rank, generator, start)
    best = torch.linalg.svd(after.double(), full_matrices=False).U[..., :rank]
    missed = retained_energy(after, best) - retained_energy(after, found.basis)
    return {
        "name": name,
        "shape": list(after.shape),
        "cold_s": timed(lambda: cut(None), after.device, repetitions),
        "warm_s": timed(lambda: cut(start), after.device, repetitions),
        "svd_s": timed(cut_by_svd, after.device, repetitions),
        "by_svd": int(found.exact.sum()),
        "energy_missed": float(missed.max()),
    }


def timed(work: Callable[[], object], device: torch.device, repetitions: int) -> dict[str, Any]:
    seconds = []
    for _ in range(repetitions + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return {"all": seconds[1:], "median": median(seconds[1:])}


if __name__ == "__main__":
    main()
