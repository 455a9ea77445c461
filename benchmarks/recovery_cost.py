"""Time and memory of a distillation step beside a plain LoRA step of the same model and batch, on random weights.

    python -m benchmarks.recovery_cost --shape qwen3.5-0.8b --output docs/results/recovery_cost.json

The student has half the key width. `plain` trains by cross-entropy without a teacher, `distilled` by KL with the uncut
model as teacher; both also with recomputed layers, and in pieces of `--micro-batch-size` sequences. Median of `--steps`
steps after `--warm-up`, in which Triton compiles and tunes kernels: the first step takes minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, PreTrainedModel

from benchmarks.environment import write_result
from benchmarks.options import check_options
from benchmarks.output_files import told_in_one_sentence
from benchmarks.shapes import QWEN35_08B
from compressor.architectures.base import Architecture
from compressor.architectures.registry import find_architecture
from compressor.loading import release_memory, resolve_device
from compressor.recovery.objective import HiddenStates, Objective, recomputed_layers
from compressor.recovery.settings import TrainingSettings
from compressor.recovery.student import StudentSettings, prepare_student

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **QWEN35_08B},
    "tiny": {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, slots=True)
class Variant:
    distilled: bool
    checkpointing: bool = False
    in_pieces: bool = False


VARIANTS = {
    "distilled": Variant(True),
    "plain": Variant(False),
    "distilled, recomputed": Variant(True, checkpointing=True),
    "plain, recomputed": Variant(False, checkpointing=True),
    "distilled, in pieces": Variant(True, in_pieces=True),
    "plain, in pieces": Variant(False, in_pieces=True),
}


@told_in_one_sentence()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3.5-0.8b")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="of the variants in pieces")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    check_options(arguments)
    rows = []
    for name in arguments.variants:
        print(f"{name}: building", flush=True)
        try:
            rows.append(measure(arguments, name, VARIANTS[name]))
        except torch.OutOfMemoryError as error:
            rows.append({"variant": name, "failed": str(error).splitlines()[0]})
        release_memory(resolve_device(arguments.device))
        print(rows[-1], flush=True)
        settings = {key: value for key, value in vars(arguments).items() if key != "output"}
        write_result(arguments.output, {"settings": settings, "rows": rows, "ratios": ratios(rows)})
    print(ratios(rows))


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a distilled step over those of the plain step that differs in nothing else."""
    seconds = {row["variant"]: row["seconds_per_step"] for row in rows if "seconds_per_step" in row}
    pairs = [(name, name.replace("distilled", "plain")) for name in seconds if name.startswith("distilled")]
    return {name: seconds[name] / seconds[plain] for name, plain in pairs if plain in seconds}


def measure(arguments: argparse.Namespace, name: str, variant: Variant) -> dict[str, Any]:
    """Seconds a step and the peak of allocated memory of one variant; memory None on a CPU."""
    device = resolve_device(arguments.device)
    objective, trainable, decoder = prepare(arguments, variant, device)
    optimizer = AdamW(trainable, lr=1e-4)
    ids = torch.randint(
        0, SHAPES[arguments.shape]["vocab_size"], (arguments.batch_size, arguments.sequence_length),
        generator=torch.Generator().manual_seed(0),
    ).to(device)  # fmt: skip
    pieces = ids.split(arguments.micro_batch_size if variant.in_pieces else arguments.batch_size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    with recomputed_layers(decoder.train()) if variant.checkpointing else nullcontext():
        for number in range(arguments.warm_up + arguments.steps):
            seconds.append(step(objective, optimizer, pieces))
            print(f"{name}: step {number + 1}: {seconds[-1]:.3f} s", flush=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    measured = statistics.median(seconds[arguments.warm_up :])
    return {
        "variant": name,
        "seconds_per_step": measured,
        "tokens_per_second": ids.numel() / measured,
        "all_seconds": [round(value, 4) for value in seconds],
        "peak_gib": peak,
    }


def prepare(
    arguments: argparse.Namespace, variant: Variant, device: torch.device
) -> tuple[Objective, list[nn.Parameter], nn.Module]:
    """The loss, what is trained of the student, and the student's decoder; frozen weights are in bfloat16 on a GPU."""
    raw_config = SHAPES[arguments.shape]
    architecture = find_architecture(raw_config["model_type"])
    architecture.import_stock_classes()
    if device.type == "cpu":
        architecture.enable_cpu_backend()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cut = {**raw_config, "linear_key_head_dim": raw_config["linear_key_head_dim"] // 2}
    model = build(architecture, cut, dtype, device)
    mixers = architecture.mixers(model.config, [name for name, _ in model.named_parameters()])
    lora = StudentSettings("lora", arguments.rank, 2.0 * arguments.rank, None, 0)
    student = prepare_student(architecture, model, mixers, lora)
    decoder = architecture.decoder(model)
    teacher = build(architecture, raw_config, dtype, device).eval() if variant.distilled else None
    settings = replace(
        training_settings(arguments), kl_weight=float(variant.distilled),
        cross_entropy_weight=float(not variant.distilled), gradient_checkpointing=variant.checkpointing,
    )  # fmt: skip
    objective = Objective(model, HiddenStates(decoder), teacher, architecture, mixers, settings)
    return objective, list(student.trainable_parameters().values()), decoder


def step(objective: Objective, optimizer: AdamW, pieces: Sequence[Tensor]) -> float:
    started = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    for piece in pieces:
        (objective(piece).total / len(pieces)).backward()
    optimizer.step()
    if pieces[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def build(
    architecture: Architecture, raw_config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    config = AutoConfig.for_model(**raw_config)
    with device:
        model = architecture.model_class(raw_config)(config)
    model.to(dtype)  # type: ignore[arg-type]
    return model


def training_settings(arguments: argparse.Namespace) -> TrainingSettings:
    return TrainingSettings(
        steps=arguments.steps, batch_size=arguments.batch_size, micro_batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length, learning_rate=1e-4, final_learning_rate=1e-5, warmup_share=0.05,
        weight_decay=0.0, gradient_norm=1.0, kl_weight=1.0, cross_entropy_weight=0.0, temperature=1.0,
        matching_weight=0.0, checkpoint_every=10**6, evaluate_every=0, gradient_checkpointing=False, seed=0,
        tracker=None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
