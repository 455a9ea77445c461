"""The steps of a training run, and what is saved and reported between them.

Everything that a step depends on beside the weights and AdamW's state is a function of the step's number: the batch,
the learning rate and, through `step_seed`, dropout. So a run that is stopped anywhere goes on to the same weights.

Notation used for tensor shapes:
    B   sequences of a step, over all processes      T   tokens of a sequence
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import PreTrainedModel

from compressor.errors import RunError
from compressor.naming import Naming
from compressor.recovery.checkpoints import CheckpointError, save_checkpoint, training_state
from compressor.recovery.faults import explained_memory, refuse_dead, refuse_unusable
from compressor.recovery.log import LOG_FILE, StepRecord, TrainingLog
from compressor.recovery.objective import Objective, training_precision
from compressor.recovery.parallel import own_gradients, own_rows
from compressor.recovery.schedule import learning_rate
from compressor.recovery.settings import Identity, TrainingSettings
from compressor.recovery.sharding import whole
from compressor.recovery.signals import deferred_signals

Batches = Callable[[int], Iterator[Tensor]]
"""From the number of finished steps to the batches of the following ones: int64 [B, T] each, on the CPU."""

Evaluate = Callable[[int], Mapping[str, float]]
"""From the number of finished steps to held-out figures by name."""


@dataclass(slots=True, eq=False)
class TrainingLoop:
    """See `training.train`. `record` is that of the last finished step, None before the first."""

    student: PreTrainedModel
    objective: Objective
    trainable: Mapping[str, nn.Parameter]
    optimizer: AdamW
    batches: Batches
    settings: TrainingSettings
    folder: Path
    identity: Identity
    accelerator: Accelerator
    on_step: Callable[[StepRecord], None]
    evaluate: Evaluate | None
    name: Naming
    record: StepRecord | None
    evaluations: dict[int, Mapping[str, float]] = field(default_factory=dict)
    saved_step: int = 0
    steps_without_gradient: int | None = 0  # None from the first gradient on
    arrived: list[int] = field(default_factory=list)

    @property
    def finished(self) -> int:
        return 0 if self.record is None else self.record.step

    @property
    def log(self) -> TrainingLog:
        return TrainingLog(self.folder / LOG_FILE)

    def run(self) -> StepRecord:
        """Do the steps that are left; the record of the last.

        Where there are several processes, an interrupt of one stops all of them after the step in progress: one that
        left the step would leave the others waiting for its gradient.
        """
        if self.accelerator.num_processes == 1:
            return self._run()
        with deferred_signals() as self.arrived:
            return self._run()

    def _run(self) -> StepRecord:
        self.saved_step = self.finished
        if self.accelerator.is_main_process:
            self.log.begin(self.finished)
        try:
            batches = self.batches(self.finished)
            self._evaluate_if_due()
            while self.record is None or self.record.step < self.settings.steps:
                self._report(self._step(batches))
                if self._is_due(self.settings.checkpoint_every):
                    self._save_due()
                self._evaluate_if_due()
        except (KeyboardInterrupt, SystemExit):
            self._save()
            raise
        return self.record

    def _step(self, batches: Iterator[Tensor]) -> StepRecord:
        """Take the next step whole, or leave everything as it was."""
        started = time.perf_counter()
        step = self.finished + 1
        _seed_generators(self.student.device, step_seed(self.settings.seed, step, self.accelerator.process_index))
        rows = self._next_rows(batches)
        with explained_memory(
            step, min(len(rows), self.settings.micro_batch_size), rows.shape[1], self.settings.gradient_checkpointing,
            self._kept(), self.name,
        ):  # fmt: skip
            terms = self._mean(self._accumulate(rows))
        norm = whole(nn.utils.clip_grad_norm_(self.trainable.values(), self.settings.gradient_norm))
        # The one time in a step that the host waits for the device, but for what the losses ask.
        loss, kl, cross_entropy, matching, stop, gradient_norm = torch.cat([terms, norm[None].to(terms)]).tolist()
        record = StepRecord(
            step=step,
            loss=loss,
            kl=kl,
            cross_entropy=cross_entropy,
            matching=matching,
            learning_rate=self._learning_rate(step),
            gradient_norm=gradient_norm,
            tokens=step * self.settings.batch_size * self.settings.sequence_length,
            seconds=0.0 if self.record is None else self.record.seconds,
            tokens_per_second=0.0,
        )
        self._refuse_faults(record)
        with deferred_signals():
            self._update(record.learning_rate)
            self.record = self._timed(record, time.perf_counter() - started)
            if self.accelerator.is_main_process:
                self.log.append(self.record)
        if stop > 0:
            raise KeyboardInterrupt
        return self.record

    def _next_rows(self, batches: Iterator[Tensor]) -> Tensor:
        """This process's rows of the next batch."""
        settings = self.settings
        batch = next(batches, None)
        if batch is None:
            raise RunError(
                f"the training data ended after {self.finished} of {settings.steps} steps; give more text or lower the "
                "steps."
            )
        if batch.shape != (settings.batch_size, settings.sequence_length):
            raise ValueError(
                f"a batch is {tuple(batch.shape)}, not {(settings.batch_size, settings.sequence_length)} as in the "
                "settings."
            )
        return own_rows(batch, self.accelerator)

    def _accumulate(self, rows: Tensor) -> Tensor:
        """Leave the gradient of the mean over all tokens of the step; the terms [4] of the mean over this process's."""
        for parameter in self.trainable.values():
            parameter.grad = None
        terms = []
        pieces = rows.split(self.settings.micro_batch_size)
        for number, piece in enumerate(pieces, start=1):
            share = len(piece) / len(rows)
            with nullcontext() if number == len(pieces) else own_gradients(self.objective.student_states):
                loss = self.objective(piece.to(self.student.device))
                if loss.total.requires_grad:
                    (share * loss.total).backward()
            terms.append(share * loss.terms)
        return torch.stack(terms).sum(0)

    def _mean(self, terms: Tensor) -> Tensor:
        """Over the processes, and behind it the share of those that are to stop: [4] -> [5]."""
        mean: Tensor = self.accelerator.reduce(torch.cat([terms, terms.new_tensor([bool(self.arrived)])]), "mean")
        return mean

    def _refuse_faults(self, record: StepRecord) -> None:
        refuse_unusable(record, self._kept(), self.name)
        if record.gradient_norm > 0:
            self.steps_without_gradient = None
        elif self.steps_without_gradient is not None:
            self.steps_without_gradient += 1
            refuse_dead(record.step, self.steps_without_gradient, len(self.trainable), self.settings.steps)

    def _kept(self) -> str:
        return f"checkpoint-{self.saved_step} is kept" if self.saved_step else "no checkpoint was written yet"

    def _update(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _timed(self, record: StepRecord, seconds: float) -> StepRecord:
        tokens = self.settings.batch_size * self.settings.sequence_length
        return replace(record, seconds=record.seconds + seconds, tokens_per_second=tokens / seconds)

    def _report(self, record: StepRecord) -> None:
        if self.accelerator.is_main_process:
            self.on_step(record)
        self.accelerator.log({f"train/{name}": value for name, value in asdict(record).items()}, step=record.step)

    def _evaluate_if_due(self) -> None:
        if self.evaluate is None or self.settings.evaluate_every == 0 or not self._is_due(self.settings.evaluate_every):
            return
        self.student.eval()
        try:
            with training_precision(self.student.device):
                figures = dict(self.evaluate(self.finished))
        finally:
            self.student.train()
        self.evaluations[self.finished] = figures
        if self.accelerator.is_main_process:
            self.log.append_evaluation(self.finished, figures)
        self.accelerator.log({f"evaluation/{name}": value for name, value in figures.items()}, step=self.finished)

    def _is_due(self, every: int) -> bool:
        return self.finished % every == 0 or self.finished == self.settings.steps

    def _save(self) -> None:
        if self.record is None or self.record.step == self.saved_step:
            return
        with deferred_signals():
            if self.accelerator.is_main_process:
                self.log.sync()
            state = training_state(self.trainable, self.optimizer)
            if self.accelerator.is_main_process:
                save_checkpoint(self.folder, self.identity, state, self.record)
            self.saved_step = self.record.step

    def _save_due(self) -> None:
        """The last may fail: the result is what is wanted, and needs no checkpoint to be written from."""
        try:
            self._save()
        except CheckpointError:
            if self.finished < self.settings.steps:
                raise

    def _learning_rate(self, step: int) -> float:
        settings = self.settings
        return learning_rate(
            step - 1, settings.steps, settings.warmup_share, settings.learning_rate, settings.final_learning_rate
        )


def step_seed(seed: int, step: int, process: int) -> int:
    """Seed of all that a process draws in a step; below 2^63."""
    digest = hashlib.sha256(f"{seed} {step} {process}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _seed_generators(device: torch.device, seed: int) -> None:
    """Those that dropout on `device` draws from. torch.manual_seed would change those of all GPUs."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
