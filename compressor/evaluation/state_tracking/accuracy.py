"""Accuracy by position.

Notation used for tensor shapes: B sequences, T positions, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import RequestError
from compressor.evaluation.state_tracking.base import IGNORED, StateTrackingTask


@dataclass(frozen=True)
class PositionCounts:
    """Counts over sequences, int64 on the CPU.

    asked, correct: [T], sequences with a label at a position, and of those the ones answered right.
    flawless: [T], sequences whose every label up to and at a position was answered right.
    labels: [C], how often each class was the answer.
    sequences: how many.
    """

    asked: Tensor
    correct: Tensor
    flawless: Tensor
    labels: Tensor
    sequences: int

    def accuracy(self, first: int, last: int) -> float:
        """Share of right answers at positions first .. last, counted from 1, both included; nan if none is asked."""
        part = slice(first - 1, last)
        return float(self.correct[part].sum() / self.asked[part].sum())

    def sequence_accuracy(self, length: int) -> float:
        """Share of sequences without a wrong answer in their first `length` positions."""
        return float(self.flawless[length - 1] / self.sequences)

    def constant_accuracy(self) -> float:
        """Accuracy of always giving the most frequent answer."""
        return float(self.labels.max() / self.labels.sum())

    def by_bucket(self, width: int) -> list[float]:
        """Accuracy of the positions 1 .. width, width + 1 .. 2 width, and so on."""
        positions = len(self.asked)
        return [self.accuracy(first, min(first + width - 1, positions)) for first in range(1, positions + 1, width)]


def scaled_accuracy(accuracy: float, chance: float) -> float:
    """(accuracy - chance) / (1 - chance): 0 for guessing, 1 for no mistake (Grazzi et al., arXiv:2411.12537)."""
    return (accuracy - chance) / (1 - chance)


def count_answers(predictions: Tensor, labels: Tensor, num_classes: int) -> PositionCounts:
    """predictions, labels: int64 [B, T]."""
    asked = labels != IGNORED
    correct = asked & (predictions == labels)
    flawless = (correct | ~asked).cumprod(1)
    frequency = torch.bincount(labels[asked], minlength=num_classes)
    return PositionCounts(asked.sum(0), correct.sum(0), flawless.sum(0), frequency, len(labels))


@torch.no_grad()
def accuracy_by_position(
    model: PreTrainedModel,
    task: StateTrackingTask,
    shortest: int,
    longest: int,
    samples: int,
    batch_size: int,
    generator: torch.Generator,
) -> PositionCounts:
    """Run `samples` sequences through a causal language model whose first C logits are the task's classes.

    Raises:
        RequestError: no samples, or lengths that the task does not have.
    """
    if samples < 1:
        raise RequestError(f"{samples} samples give no accuracy; ask for at least 1.")
    predictions, labels = [], []
    for start in range(0, samples, batch_size):
        batch = task.draw(min(batch_size, samples - start), shortest, longest, generator)
        logits: Tensor = model(input_ids=batch.tokens.to(model.device), use_cache=False).logits
        predictions.append(logits[..., : task.num_classes].argmax(-1).cpu())
        labels.append(batch.labels)
    return count_answers(torch.cat(predictions), torch.cat(labels), task.num_classes)
