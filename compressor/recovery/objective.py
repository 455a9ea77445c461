"""The loss of some sequences: passes through student and teacher, and the terms that compare the two.

Notation used for tensor shapes:
    B   sequences      T   tokens of a sequence      d   hidden size      V   vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from compressor.architectures.base import Architecture, Mixer
from compressor.errors import RequestError
from compressor.recovery.losses import distillation_loss
from compressor.recovery.matching import captured_outputs, matching_error
from compressor.recovery.settings import TrainingSettings


class HiddenStates(nn.Module):
    """A decoder that gives its last hidden states alone: what a wrapper for several processes can wrap."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, d], after the final norm."""
        states: Tensor = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        return states


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """Means over the predicted tokens, in nats a token.

    Attributes:
        total: scalar, differentiable where a trained tensor was used.
        terms: [4], detached: total, KL, cross-entropy, matching error.
    """

    total: Tensor
    terms: Tensor


class Objective:
    """kl_weight * KL + cross_entropy_weight * cross-entropy + matching_weight * matching error.

    Products are bfloat16 on a GPU (autocast), in the models' dtypes elsewhere. The teacher may be on another device;
    its head is copied to the student's once.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        student_states: nn.Module,
        teacher: PreTrainedModel | None,
        architecture: Architecture,
        mixers: Sequence[Mixer],
        settings: TrainingSettings,
    ) -> None:
        """`student_states` gives the hidden states of `student`, as `HiddenStates` does."""
        self._student = student
        self.student_states = student_states
        self._student_head = head_weight(student, architecture)
        self._device = self._student_head.device
        self._settings = settings
        self._matched = [architecture.output_projection(mixer) for mixer in mixers] if settings.matching_weight else []
        self._teacher = teacher
        self._teacher_head: Tensor | None = None
        if teacher is not None:
            self._teacher_states = HiddenStates(architecture.decoder(teacher))
            self._teacher_head = head_weight(teacher, architecture).to(self._device)

    def __call__(self, ids: Tensor) -> Loss:
        """`ids`: int64 [B, T] on the student's device; each token but the first of a sequence is predicted."""
        settings = self._settings
        teacher_hidden, targets = self._run_teacher(ids)
        with training_precision(self._device):
            with captured_outputs(self._student, self._matched) as outputs:
                hidden = self.student_states(ids)
            loss = distillation_loss(
                _predicting(hidden),
                self._student_head,
                None if teacher_hidden is None else _predicting(teacher_hidden),
                self._teacher_head,
                ids[:, 1:].flatten(),
                settings.kl_weight,
                settings.cross_entropy_weight,
                settings.temperature,
            )
        total, error = loss.total, torch.zeros_like(loss.kl)
        if self._matched:
            error = matching_error(outputs, targets)
            total = total + settings.matching_weight * error
        return Loss(total, torch.stack([total.detach(), loss.kl, loss.cross_entropy, error.detach()]))

    def _run_teacher(self, ids: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Hidden states [B, T, d] on the student's device, and what is to be matched, where it was made."""
        if self._teacher is None:
            return None, []
        with (
            torch.inference_mode(),
            training_precision(self._teacher.device),
            captured_outputs(self._teacher, self._matched) as outputs,
        ):
            hidden = self._teacher_states(ids.to(self._teacher.device))
        return hidden.to(self._device), outputs


def training_precision(device: torch.device) -> torch.autocast:
    """Products in bfloat16 on a GPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def head_weight(model: PreTrainedModel, architecture: Architecture) -> Tensor:
    """What gives logits of the last hidden states, [V, d] without gradient: the head times the class's own factor.

    Raises:
        RequestError: the head is not a linear module without bias.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise RequestError(
            f"the language-model head of {type(model).__name__} is {head} and must be a linear module without bias "
            "for the distillation loss; recover a model with such a head."
        )
    factor = architecture.logit_factor(model.config)
    return head.weight.detach() if factor == 1 else head.weight.detach() * factor


@contextmanager
def recomputed_layers(decoder: nn.Module) -> Iterator[None]:
    """Inside, the backward pass computes each layer's activations anew instead of keeping them.

    Raises:
        RequestError: the stock class has no layers that can.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise RequestError(
            f"{type(decoder).__name__} has no layers that support gradient checkpointing; turn gradient_checkpointing "
            "off and lower micro_batch_size."
        )
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        layer.gradient_checkpointing = True
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = False


def _predicting(hidden: Tensor) -> Tensor:
    """[B, T, d] -> [B * (T - 1), d]: the last token of a sequence predicts nothing that is known."""
    return hidden[:, :-1].flatten(0, 1)
