"""Recovery training: a compressed model learns from the unpruned one, or from text alone.

The work folder holds the log and the two newest checkpoints; the last step has one. Ctrl-C, and SIGTERM where it raises
SystemExit, leave a checkpoint of the last finished step and are raised on. With several processes, an interrupt of any
stops all of them, after the step in progress.

Source of AdamW: Loshchilov, Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.naming import Naming
from compressor.recovery.checkpoints import RUN_KEY, newest_checkpoint, refuse_without_resume, settle_leftovers
from compressor.recovery.faults import field_of
from compressor.recovery.kernel_width import at_trusted_width
from compressor.recovery.log import StepRecord
from compressor.recovery.loop import Batches, Evaluate, TrainingLoop
from compressor.recovery.objective import HiddenStates, Objective, recomputed_layers
from compressor.recovery.parallel import averaging_gradients, refuse_different_starts, refuse_other_engines
from compressor.recovery.settings import Identity, TrainingSettings
from compressor.recovery.sharding import bring_back, quiet_views, shard, sharding
from compressor.recovery.tracking import tracked


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A run that did all its steps.

    Attributes:
        resumed_step: finished steps of the checkpoint that it went on from; 0 without one.
        last: record of the last step, read from its checkpoint where none was left to do.
        evaluations: figures by the number of finished steps, of this process's part of the run.
        log: the file of `TrainingLog`.
    """

    resumed_step: int
    last: StepRecord
    evaluations: Mapping[int, Mapping[str, float]]
    log: Path


def train(
    student_model: PreTrainedModel,
    trainable: Mapping[str, nn.Parameter],
    teacher: PreTrainedModel | None,
    architecture: Architecture,
    mixers: Sequence[Mixer],
    batches: Batches,
    settings: TrainingSettings,
    work_folder: Path,
    resume: bool,
    accelerator: Accelerator,
    on_step: Callable[[StepRecord], None],
    evaluate: Evaluate | None,
    *,
    run_key: str,
    on_note: Callable[[str], None],
    decided: Identity | None = None,
    name: Naming = field_of,
) -> TrainingResult:
    """Train `trainable` in place; the student is left in evaluation mode, without gradients.

    Under FSDP 2 it is left split, of use to all processes together alone; `trainable` is whole again at the end.

    `trainable` are the parameters of the student's decoder that require a gradient, all of them, in float32 (or
    float64). `teacher` None trains on text alone. `evaluate` is called in every process, before the first step, every
    `evaluate_every` steps and after the last, under the autocast of the training; `on_step` and `on_note` (one
    sentence) in the main process alone.

    With `resume` the newest checkpoint in `work_folder` that can be read is gone on from, if there is one. `run_key`
    tells runs of other models or data apart, and `decided` those of other settings than `settings` has, by name.
    Messages on memory call a setting `name(setting)`.

    Raises:
        RequestError: settings that do not fit together, checkpoints of another run, or some without `resume`.
        RunError: see `faults`, `checkpoints` and `log`; or the batches end early.
        ValueError: `trainable` or a batch is not as described.
    """
    _check_request(settings, architecture.decoder(student_model), trainable, teacher, accelerator)
    identity = settings.identity() | (decided or {}) | {RUN_KEY: run_key, "teacher": teacher is not None}
    held = _held(student_model, trainable, architecture, accelerator)
    optimizer = _optimizer(held, settings)
    record = _resumed(work_folder, resume, identity, held, optimizer, accelerator, on_note)
    objective = _objective(student_model, teacher, architecture, mixers, settings, accelerator)
    loop = TrainingLoop(
        student=student_model, objective=objective, trainable=held, optimizer=optimizer, batches=batches,
        settings=settings, folder=work_folder, identity=identity, accelerator=accelerator, on_step=on_step,
        evaluate=evaluate, name=name, record=record,
    )  # fmt: skip
    modes = _prepared(student_model, teacher, architecture, mixers, settings)
    with tracked(accelerator, settings.tracker, asdict(settings)), modes:
        last = loop.run()
    if held is not trainable:
        bring_back(held, trainable)
    return TrainingResult(0 if record is None else record.step, last, loop.evaluations, loop.log.path)


def _check_request(
    settings: TrainingSettings,
    decoder: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    teacher: PreTrainedModel | None,
    accelerator: Accelerator,
) -> None:
    refuse_other_engines(accelerator)
    settings.refuse_impossible(teacher is not None, accelerator.num_processes)
    required = {id(parameter) for parameter in decoder.parameters() if parameter.requires_grad}
    if not trainable or required != {id(parameter) for parameter in trainable.values()}:
        raise ValueError(
            f"{len(trainable)} tensors are to be trained and {len(required)} of the decoder require a gradient; they "
            "must be the same, and some."
        )
    narrow = [name for name, parameter in trainable.items() if parameter.dtype not in (torch.float32, torch.float64)]
    if narrow:
        raise ValueError(f"{narrow[0]} is trained in {trainable[narrow[0]].dtype}, in which small updates are lost.")


def _held(
    student: PreTrainedModel,
    trainable: Mapping[str, nn.Parameter],
    architecture: Architecture,
    accelerator: Accelerator,
) -> Mapping[str, nn.Parameter]:
    """What this process trains of `trainable`: the same, or a part of each."""
    plugin = sharding(accelerator)
    if plugin is None:
        return trainable
    return shard(student, architecture.decoder(student), trainable, plugin, accelerator.num_processes)


def _objective(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    architecture: Architecture,
    mixers: Sequence[Mixer],
    settings: TrainingSettings,
    accelerator: Accelerator,
) -> Objective:
    states = averaging_gradients(HiddenStates(architecture.decoder(student)), accelerator, student.device)
    return Objective(student, states, teacher, architecture, mixers, settings)


def _optimizer(trainable: Mapping[str, nn.Parameter], settings: TrainingSettings) -> AdamW:
    """Norms, decays and biases are not pulled to zero."""
    matrices = [parameter for parameter in trainable.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in trainable.values() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW([group for group in groups if group["params"]], lr=settings.learning_rate)


def _resumed(
    folder: Path,
    resume: bool,
    identity: Identity,
    trainable: Mapping[str, nn.Parameter],
    optimizer: AdamW,
    accelerator: Accelerator,
    on_note: Callable[[str], None],
) -> StepRecord | None:
    """Put the newest checkpoint's state back; the record of its step, None for a run that begins."""
    refuse_without_resume(folder, resume)
    unreadable: list[Path] = []
    checkpoint = newest_checkpoint(folder, identity, trainable, unreadable.append)
    record = None if checkpoint is None else checkpoint.record
    refuse_different_starts(0 if record is None else record.step, accelerator, next(iter(trainable.values())).device)
    if checkpoint is not None:
        checkpoint.restore(trainable, optimizer)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        settle_leftovers(folder, unreadable)
        if checkpoint is not None:
            for path in unreadable:
                on_note(f"{path} cannot be read and was set aside: going on from {checkpoint.path.name} before it.")
    return record


@contextmanager
def _prepared(
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    architecture: Architecture,
    mixers: Sequence[Mixer],
    settings: TrainingSettings,
) -> Iterator[None]:
    """Modes of the models while training; afterwards the student has no gradients, and random draws go on as before."""
    device = student.device
    with ExitStack() as stack:
        stack.enter_context(quiet_views())
        stack.enter_context(at_trusted_width(architecture, student, mixers, device))
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if settings.gradient_checkpointing:
            stack.enter_context(recomputed_layers(architecture.decoder(student)))
        stack.callback(student.zero_grad)
        stack.callback(student.eval)
        student.train()
        if teacher is not None:
            teacher.eval()
        yield
