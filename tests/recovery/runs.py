"""Short training runs of tiny students, each the random cut of a tiny teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from compressor.recovery.log import StepRecord
from compressor.recovery.loop import Evaluate
from compressor.recovery.settings import TrainingSettings
from compressor.recovery.training import TrainingResult, train
from tests.families import TinyCheckpoint, open_tiny
from tests.recovery.pairs import tiny_pair

SETTINGS = TrainingSettings(
    steps=10,
    batch_size=4,
    micro_batch_size=4,
    sequence_length=32,
    learning_rate=5e-3,
    final_learning_rate=5e-4,
    warmup_share=0.1,
    weight_decay=0.01,
    gradient_norm=1.0,
    kl_weight=1.0,
    cross_entropy_weight=0.1,
    temperature=1.0,
    matching_weight=0.0,
    checkpoint_every=100,
    evaluate_every=0,
    gradient_checkpointing=False,
    seed=0,
    tracker=None,
)


@dataclass(frozen=True, slots=True, eq=False)
class TinyRun:
    """A teacher and its student, whose mixers are trained whole."""

    teacher: TinyCheckpoint
    student: TinyCheckpoint
    trainable: dict[str, nn.Parameter]

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.student.model.state_dict().items()}

    def trained(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trainable.items()}


def make_folders(name: str, folder: Path, width: int = 8) -> Path:
    """A teacher in `folder`/source and its cut to `width` of 16 channels in `folder`/cut."""
    tiny_pair(name, folder, width)
    return folder


def open_run(folder: Path) -> TinyRun:
    teacher, student = open_tiny(folder / "source"), open_tiny(folder / "cut")
    student.model.requires_grad_(False)
    trainable = {
        f"{mixer.module}.{name}": parameter.requires_grad_()
        for mixer in student.mixers
        for name, parameter in student.model.get_submodule(mixer.module).named_parameters()
    }
    return TinyRun(teacher, student, trainable)


def text_batch(step: int, settings: TrainingSettings) -> Tensor:
    """The batch of the step after `step` finished ones: a walk over 64 tokens, so that text alone teaches something."""
    generator = torch.Generator().manual_seed(step)
    shape = (settings.batch_size, settings.sequence_length)
    return torch.randint(0, 3, shape, generator=generator).cumsum(-1) % 64


def text_batches(settings: TrainingSettings, drawn: list[int] | None = None) -> Callable[[int], Iterator[Tensor]]:
    def batches(first_step: int) -> Iterator[Tensor]:
        for step in range(first_step, settings.steps):
            if drawn is not None:
                drawn.append(step)
            yield text_batch(step, settings)

    return batches


def train_run(
    run: TinyRun,
    work: Path,
    settings: TrainingSettings = SETTINGS,
    *,
    resume: bool = False,
    teacher: bool = True,
    batches: Callable[[int], Iterator[Tensor]] | None = None,
    accelerator: Accelerator | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    evaluate: Evaluate | None = None,
    run_key: str = "tiny",
    on_note: Callable[[str], None] = lambda note: None,
) -> TrainingResult:
    return train(
        run.student.model,
        run.trainable,
        run.teacher.model if teacher else None,
        run.student.architecture,
        run.student.mixers,
        text_batches(settings) if batches is None else batches,
        settings,
        work,
        resume,
        Accelerator(cpu=True) if accelerator is None else accelerator,
        on_step,
        evaluate,
        run_key=run_key,
        on_note=on_note,
    )


def trained(folder: Path, work: Path, settings: TrainingSettings = SETTINGS, **options: Any) -> dict[str, Tensor]:
    """The weights after a run of freshly opened models."""
    run = open_run(folder)
    train_run(run, work, settings, **options)
    return run.weights()


def records_of(run: TinyRun, work: Path, settings: TrainingSettings = SETTINGS, **options: Any) -> list[StepRecord]:
    records: list[StepRecord] = []
    train_run(run, work, settings, on_step=records.append, **options)
    return records


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def with_steps(steps: int, **changes: Any) -> TrainingSettings:
    return replace(SETTINGS, steps=steps, **changes)
