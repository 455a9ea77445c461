"""Fit one model to one task."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmarks.state_tracking.pace import Pace, TrainingSettings
from compressor.evaluation.state_tracking.base import IGNORED, LabelledBatch, StateTrackingTask
from compressor.progress import StageReporter


@dataclass(frozen=True)
class TrainingRecord:
    """history: (step, loss in nats, accuracy) of about 20 training batches; stages: (length, first step, from 0)."""

    seconds: float
    history: list[tuple[int, float, float]]
    stages: list[tuple[int, int]]


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
    pace = Pace(settings)
    history: list[tuple[int, float, float]] = []
    interval = max(1, settings.steps // 20)
    started = time.perf_counter()
    model.train()
    with reporter.stage("train", settings.steps, unit="steps") as advance:
        for step in range(settings.steps):
            if pace.is_over(step):
                break
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * pace.learning_rate_factor(step)
            batch = task.draw(pace.batch_size, pace.shortest, pace.longest, generator)
            loss, accuracy = _loss(model, batch, task.num_classes)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            advance(1)
            if (step + 1) % interval == 0 or pace.is_over(step + 1):
                history.append((step + 1, round(loss.item(), 5), round(accuracy.item(), 5)))
                reporter.say(
                    f"step {step + 1}, length {pace.longest}: loss {loss.item():.4f}, accuracy {accuracy.item():.4f}"
                )
            pace.record(step, accuracy, time.perf_counter() - started)
    model.eval()
    return TrainingRecord(time.perf_counter() - started, history, pace.stages)


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
