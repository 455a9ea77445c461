"""Fit one model to one task."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from compressor.evaluation.state_tracking.base import IGNORED, LabelledBatch, StateTrackingTask
from compressor.progress import StageReporter


@dataclass(frozen=True)
class TrainingSettings:
    """Lengths are uniform on shortest .. longest; the learning rate warms up linearly and falls to 0 as a cosine."""

    steps: int
    batch_size: int
    shortest: int
    longest: int
    learning_rate: float
    weight_decay: float
    warmup: float = 0.05
    gradient_norm: float = 1.0


@dataclass(frozen=True)
class TrainingRecord:
    """history: (step, loss in nats, accuracy) of about 20 training batches."""

    seconds: float
    history: list[tuple[int, float, float]]


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 where kernels need it: on a GPU. float32 on a CPU."""
    return nullcontext() if device.type == "cpu" else torch.autocast(device.type, dtype=torch.bfloat16)


def train(
    model: PreTrainedModel,
    task: StateTrackingTask,
    settings: TrainingSettings,
    generator: torch.Generator,
    reporter: StageReporter,
) -> TrainingRecord:
    """AdamW on the mean cross-entropy of the labels that are asked; leaves the model in evaluation mode."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.999)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
    history: list[tuple[int, float, float]] = []
    interval = max(1, settings.steps // 20)
    started = time.perf_counter()
    model.train()
    with reporter.stage("train", settings.steps, unit="steps") as advance:
        for step in range(1, settings.steps + 1):
            batch = task.draw(settings.batch_size, settings.shortest, settings.longest, generator)
            loss, accuracy = _loss(model, batch, task.num_classes)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            advance(1)
            if step % interval == 0 or step == settings.steps:
                history.append((step, round(loss.item(), 5), round(accuracy.item(), 5)))
                reporter.say(f"step {step}: loss {loss.item():.4f}, accuracy {accuracy.item():.4f}")
    model.eval()
    return TrainingRecord(time.perf_counter() - started, history)


def learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    """Share of the full learning rate at a step, counted from 0."""
    warmup_steps = max(1, round(settings.warmup * settings.steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, settings.steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def _loss(model: PreTrainedModel, batch: LabelledBatch, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats and accuracy, over the labels that are asked."""
    device = model.device
    labels = batch.labels.to(device, non_blocking=True).flatten()
    with mixed_precision(device):
        logits = model(input_ids=batch.tokens.to(device, non_blocking=True), use_cache=False).logits
    logits = logits[..., :num_classes].float().flatten(0, 1)
    asked = labels != IGNORED
    correct = (logits.detach().argmax(-1) == labels) & asked
    return F.cross_entropy(logits, labels, ignore_index=IGNORED), correct.sum() / asked.sum()
