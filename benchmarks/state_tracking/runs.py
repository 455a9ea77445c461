"""One run: train, measure by position, look inside, prune. Results grow as they come in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.state_tracking.inspection import (
    ActivationRecorder,
    HeadSilenced,
    beta_distributions,
    choose_channels,
    masked,
    record_activations,
)
from benchmarks.state_tracking.models import ModelSettings, build_model, tapped
from benchmarks.state_tracking.pace import TrainingSettings
from benchmarks.state_tracking.training import mixed_precision, train
from compressor.evaluation.state_tracking.accuracy import PositionCounts, accuracy_by_position, scaled_accuracy
from compressor.evaluation.state_tracking.base import StateTrackingTask
from compressor.evaluation.state_tracking.registry import find_task
from compressor.progress import StageReporter

BUCKET = 16
"""Positions that one figure of accuracy by position is the mean of."""
KEPT_SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
METHODS = ("rrqr", "energy", "random")
_EVALUATION_SEED_OFFSET = 10**6


@dataclass(frozen=True)
class RunSettings:
    """`test_lengths` ascending; sequences of the task are drawn from test_shortest to the longest of them.

    `first_position` is where the accuracy of a test length begins to count: 1 for tasks that ask at every position.
    """

    task: str
    model: ModelSettings
    training: TrainingSettings
    test_lengths: tuple[int, ...]
    test_shortest: int
    first_position: int
    test_samples: int
    pruning_samples: int
    test_batch_size: int
    seed: int

    @property
    def label(self) -> str:
        return f"{self.task} {self.model.label} seed={self.seed}"


def run(
    settings: RunSettings, device: torch.device, reporter: StageReporter, checkpoints: Path | None
) -> Iterator[dict[str, Any]]:
    """The result so far, after training and measuring, after the head search and after pruning."""
    task = find_task(settings.task)
    model = build_model(settings.model, max(task.vocab_size, task.num_classes), settings.seed, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    record = train(model, task, settings.training, torch.Generator().manual_seed(settings.seed), reporter)
    if checkpoints is not None:
        model.save_pretrained(checkpoints / settings.label.replace(" ", "_").replace(",_", "_"))
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "parameters": parameters,
        "training_seconds": round(record.seconds, 2),
        "history": record.history,
        "stages": record.stages,
        "chance": task.chance,
        "test": figures(measure(model, task, settings, settings.test_samples), task, settings),
    }
    yield result
    with mixed_precision(device):
        tokens = _inspection_tokens(task, settings)
        recorder = record_activations(model, settings.model, tokens)
        result["betas"] = [asdict(betas) for betas in beta_distributions(model, settings.model, tokens)]
    result["heads"] = search_heads(model, task, settings, reporter)
    solver = solving_head(result["heads"])
    result["solving_head"] = solver | recorder.principal_components(solver["layer"], solver["head"])
    yield result
    result["pruning"] = prune(model, task, settings, recorder, reporter)
    yield result


def _inspection_tokens(task: StateTrackingTask, settings: RunSettings) -> torch.Tensor:
    generator = torch.Generator().manual_seed(settings.seed + 2 * _EVALUATION_SEED_OFFSET)
    return task.draw(settings.pruning_samples, settings.training.shortest, settings.training.longest, generator).tokens


def measure(
    model: PreTrainedModel,
    task: StateTrackingTask,
    settings: RunSettings,
    samples: int,
    change: AbstractContextManager[None] | None = None,
) -> PositionCounts:
    """Accuracy by position while `change` is active; the same sequences each time."""
    generator = torch.Generator().manual_seed(settings.seed + _EVALUATION_SEED_OFFSET)
    with change or nullcontext(), mixed_precision(model.device):
        return accuracy_by_position(
            model, task, settings.test_shortest, settings.test_lengths[-1], samples, settings.test_batch_size, generator
        )


def figures(counts: PositionCounts, task: StateTrackingTask, settings: RunSettings) -> dict[str, Any]:
    """JSON values. A length's accuracy is over all positions up to it, and over its last bucket alone."""
    first = settings.first_position
    accuracy = {length: counts.accuracy(first, length) for length in settings.test_lengths}
    return {
        "sequences": counts.sequences,
        "accuracy": {str(length): round(value, 5) for length, value in accuracy.items()},
        "scaled_accuracy": {
            str(length): round(scaled_accuracy(value, task.chance), 5) for length, value in accuracy.items()
        },
        "accuracy_at_the_end": {
            str(length): round(counts.accuracy(max(first, length - BUCKET + 1), length), 5) for length in accuracy
        },
        "sequence_accuracy": {str(length): round(counts.sequence_accuracy(length), 5) for length in accuracy},
        "constant_accuracy": round(counts.constant_accuracy(), 5),
        "bucket": BUCKET,
        "accuracy_by_bucket": [round(value, 4) if value == value else None for value in counts.by_bucket(BUCKET)],
    }


def search_heads(
    model: PreTrainedModel, task: StateTrackingTask, settings: RunSettings, reporter: StageReporter
) -> list[dict[str, Any]]:
    """Accuracy at the trained lengths without one head of a layer, and with that head alone in its layer."""
    heads = [(layer, head) for layer in range(settings.model.depth) for head in range(settings.model.num_heads)]
    found = []
    with reporter.stage("heads", len(heads), unit="heads") as advance:
        for layer, head in heads:
            without, alone = (
                _accuracy_silenced(model, task, settings, layer, head, others) for others in (False, True)
            )
            found.append({"layer": layer, "head": head, "accuracy_without": without, "accuracy_alone": alone})
            advance(1)
    return found


def solving_head(heads: list[dict[str, Any]]) -> dict[str, Any]:
    """The head that is missed most and needs the others least. Several heads may solve a task side by side."""
    return max(heads, key=lambda head: head["accuracy_alone"] - head["accuracy_without"])


def _accuracy_silenced(
    model: PreTrainedModel, task: StateTrackingTask, settings: RunSettings, layer: int, head: int, others: bool
) -> float:
    training = settings.training
    generator = torch.Generator().manual_seed(settings.seed + _EVALUATION_SEED_OFFSET)
    silenced = tapped(model, settings.model, HeadSilenced(layer, head, others))
    with silenced, mixed_precision(model.device):
        counts = accuracy_by_position(
            model, task, training.shortest, training.longest, settings.pruning_samples,
            settings.test_batch_size, generator,
        )  # fmt: skip
    return round(counts.accuracy(1, training.longest), 5)


def prune(
    model: PreTrainedModel,
    task: StateTrackingTask,
    settings: RunSettings,
    recorder: ActivationRecorder,
    reporter: StageReporter,
) -> list[dict[str, Any]]:
    """Figures of every method and kept width, all heads cut alike, without any recovery."""
    widths = sorted({max(1, round(share * settings.model.head_dim)) for share in KEPT_SHARES}, reverse=True)
    cells = []
    with reporter.stage("prune", len(widths) * len(METHODS), unit="cuts") as advance:
        for keep in widths:
            for method in METHODS:
                kept = choose_channels(recorder, method, keep, settings.seed)
                change = masked(model, settings.model, kept)
                counts = measure(model, task, settings, settings.pruning_samples, change)
                cells.append({"method": method, "keep": keep, **figures(counts, task, settings)})
                advance(1)
    return cells
