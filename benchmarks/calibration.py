"""What calibration costs beside the bare forward pass of the same batches.

    python -m benchmarks.calibration --output calibration.json

A random-weight model of the shape of Qwen3.5-0.8B (24 layers, 18 of them linear with 16 key heads
of 128), 128 sequences of 2048 tokens, both without the language-model head. On a CPU give
`--samples 2 --sequence-length 256`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.environment import write_result
from benchmarks.options import check_options
from benchmarks.output_files import told_in_one_sentence
from benchmarks.shapes import QWEN35_08B
from compressor.architectures.qwen3_5 import Qwen35
from compressor.calibration.run import calibrate
from compressor.calibration.tokens import TokenBatch, batches
from compressor.loading import resolve_device, resolve_dtype

ROUNDS = 3


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    check_options(arguments)
    architecture = Qwen35()
    device = resolve_device(arguments.device)
    if device.type == "cpu":
        architecture.enable_cpu_backend()
    model = random_model(device, resolve_dtype("auto", device, architecture))
    everything = random_batches(arguments.samples, arguments.sequence_length, arguments.batch_size)
    few = everything[: max(1, len(everything) // 16)]
    forward(architecture, model, few)
    statistics_pass(architecture, model, few)
    forward_s, calibration_s = [], []
    for _ in range(ROUNDS):
        forward_s.append(timed(lambda: forward(architecture, model, everything), device))
        calibration_s.append(timed(lambda: statistics_pass(architecture, model, everything), device))
    ratios = [calibration / bare for bare, calibration in zip(forward_s, calibration_s, strict=True)]
    result = {
        "tokens": arguments.samples * arguments.sequence_length,
        "forward_s": forward_s,
        "calibration_s": calibration_s,
        "ratio": median(ratios),
        "gram_set_bytes": 18 * 16 * 128 * 128 * 8,
        "extra_memory_bytes_all_samples": extra_memory(architecture, model, everything, device),
        "extra_memory_bytes_few_samples": extra_memory(architecture, model, few, device),
        "few_samples": sum(batch.input_ids.shape[0] for batch in few),
    }
    print(f"forward {median(forward_s):.3f} s, calibration {median(calibration_s):.3f} s, ratio {result['ratio']:.3f}")
    for name in ("few", "all"):
        sets = result[f"extra_memory_bytes_{name}_samples"] / result["gram_set_bytes"]
        print(f"extra memory, {name} samples: {sets:.2f} Gram sets")
    write_result(arguments.output, result)


def random_model(device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The shape with drawn weights, made where it will run."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            torch.manual_seed(0)
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig.from_dict(QWEN35_08B))
    finally:
        torch.set_default_dtype(previous)
    return model.eval()


def random_batches(samples: int, sequence_length: int, batch_size: int) -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, QWEN35_08B["vocab_size"], (samples, sequence_length), generator=generator)
    return list(batches(list(ids), batch_size))


@torch.inference_mode()
def forward(architecture: Qwen35, model: PreTrainedModel, token_batches: Sequence[TokenBatch]) -> None:
    """The bare forward pass: decoder without head, no cache."""
    for batch in token_batches:
        architecture.decoder(model)(input_ids=batch.input_ids.to(model.device), use_cache=False)


def statistics_pass(architecture: Qwen35, model: PreTrainedModel, token_batches: Sequence[TokenBatch]) -> None:
    mixers = architecture.mixers(model.config, ())
    calibrate(architecture, model, mixers, token_batches, None, lambda progress, tokens: None)


def timed(work: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def extra_memory(
    architecture: Qwen35, model: PreTrainedModel, token_batches: Sequence[TokenBatch], device: torch.device
) -> int:
    """Peak allocation of the statistics pass above that of the bare forward pass, in bytes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    peaks = []
    for work in (forward, statistics_pass):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        work(architecture, model, token_batches)
        peaks.append(torch.cuda.max_memory_allocated(device))
    return peaks[1] - peaks[0]


if __name__ == "__main__":
    main()
