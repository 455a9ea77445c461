"""First-order importance of key and query channels: weights times the gradient of the language-model loss.

Notation: L mixers, H_k key heads, d_k channels; B sequences of T tokens; V words, d hidden channels. W are the rows of
the query or key projection that make a channel, `copies` of them, each of `inputs` weights; the loss is the mean, in
nats, over all next tokens of the calibration set. A backward pass through a batch gives the gradient of the sum over
its tokens, in the model's dtype; sums over batches are float32, and the products |W dloss/dW| are summed in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from compressor.architectures.base import Architecture, Mixer, Stream
from compressor.architectures.projections import projections
from compressor.errors import NOT_FINITE_REMEDY, RunError
from compressor.recovery.capture import Batch
from compressor.recovery.kernel_width import at_trusted_width
from compressor.recovery.losses import IGNORED, distillation_loss
from compressor.recovery.objective import head_weight, recomputed_layers

STREAMS: tuple[Stream, ...] = ("query", "key")


@dataclass(frozen=True, slots=True, eq=False)
class LossGradients:
    """Sums over `predicted` next tokens of the gradients of their losses, which add up over parts of a calibration set.

    query, key: float32 [L, H_k, d_k, copies, inputs] on the CPU.
    """

    query: Tensor
    key: Tensor
    predicted: int


def loss_gradients(
    architecture: Architecture,
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    batches: Sequence[Batch],
    on_batch: Callable[[int], None],
) -> LossGradients:
    """Run every batch forward and backward.

    Memory does not grow with the number of batches: a layer's activations are computed anew in the backward pass. The
    model is as it was afterwards. `on_batch` gets the tokens of the batch just done.
    """
    weights = _projection_weights(architecture, model, mixers)
    decoder, head = architecture.decoder(model), head_weight(model, architecture)
    predicted = 0
    with (
        torch.enable_grad(),
        _accumulated(model, weights) as sums,
        _recomputed(decoder, [model.get_submodule(mixer.module) for mixer in mixers]),
        at_trusted_width(architecture, model, mixers, model.device),
    ):
        for batch in batches:
            predicted += _backward(decoder, head, batch)
            on_batch(batch.num_tokens)
    on_cpu = {path: total.cpu() for path, total in sums.items()}
    query, key = (_channel_rows(architecture, mixers, on_cpu, stream) for stream in STREAMS)
    return LossGradients(query, key, predicted)


def gradient_scores(
    architecture: Architecture, model: PreTrainedModel, mixers: Sequence[Mixer], gradients: LossGradients
) -> Tensor:
    """Sum of |W dloss/dW| of every channel: float64 [2, L, H_k, d_k] on the CPU, queries first.

    Raises:
        RunError: a gradient is NaN or infinite (layer and head named).
    """
    weights = _projection_weights(architecture, model, mixers)
    on_cpu = {path: weight.detach().cpu() for path, weight in weights.items()}
    scores = torch.stack(
        [
            (_channel_rows(architecture, mixers, on_cpu, stream).double() * gradient.double()).abs().sum((-2, -1))
            for stream, gradient in zip(STREAMS, (gradients.query, gradients.key), strict=True)
        ]
    )
    _refuse_not_finite(scores, mixers)
    return scores / max(gradients.predicted, 1)


def _projection_weights(
    architecture: Architecture, model: nn.Module, mixers: Sequence[Mixer]
) -> dict[str, nn.Parameter]:
    """By the path of the module; one module can make both streams."""
    paths = {projection.module for mixer in mixers for projection in projections(architecture, mixer)}
    return {path: model.get_submodule(path).get_parameter("weight") for path in sorted(paths)}


def _channel_rows(
    architecture: Architecture, mixers: Sequence[Mixer], tensors: Mapping[str, Tensor], stream: Stream
) -> Tensor:
    """The rows, by channel, of one stream's tensors [rows, inputs] of all mixers: [L, H_k, d_k, copies, inputs]."""
    return torch.stack(
        [
            tensors[projection.module][projection.rows]
            for mixer in mixers
            for projection in projections(architecture, mixer)
            if projection.stream == stream
        ]
    )


def _backward(decoder: nn.Module, head: Tensor, batch: Batch) -> int:
    """Run the gradient of the summed loss of a batch back; the number of tokens that the sum is over."""
    ids = batch.input_ids.to(head.device)
    mask = None if batch.attention_mask is None else batch.attention_mask.to(head.device)
    targets = ids[:, 1:]
    if mask is not None:
        targets = torch.where(mask[:, 1:] & mask[:, :-1], targets, IGNORED)
    predicted = int((targets != IGNORED).sum())
    if predicted == 0:
        return 0
    hidden = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state  # [B, T, d]
    loss = distillation_loss(
        student_hidden=hidden[:, :-1].flatten(0, 1),
        student_head=head,
        teacher_hidden=None,
        teacher_head=None,
        targets=targets.flatten(),
        kl_weight=0.0,
        cross_entropy_weight=1.0,
    )
    (loss.total * predicted).backward()
    return predicted


@contextmanager
def _accumulated(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """Inside, backward passes add the gradients of `weights` alone to the float32 tensors that are given."""
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    sums = {path: torch.zeros_like(weight, dtype=torch.float32) for path, weight in weights.items()}
    with ExitStack() as stack:
        for parameter, was_required in required.items():
            stack.callback(parameter.requires_grad_, was_required)
            parameter.requires_grad_(False)
        for path, weight in weights.items():
            weight.requires_grad_(True)
            stack.callback(weight.register_post_accumulate_grad_hook(_move_gradient(sums[path])).remove)
        yield sums


def _move_gradient(total: Tensor) -> Callable[[Tensor], None]:
    def hook(weight: Tensor) -> None:
        if weight.grad is not None:
            total.add_(weight.grad)
        weight.grad = None

    return hook


@contextmanager
def _recomputed(decoder: nn.Module, mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, layers recompute their activations, which they do in training mode alone, and mixers take the kernels
    that have a backward pass. The modules inside them, dropout among them, stay in evaluation mode.
    """
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    with ExitStack() as stack:
        for module in (*layers, *mixers):
            stack.callback(setattr, module, "training", module.training)
            module.training = True
        stack.enter_context(recomputed_layers(decoder))
        yield


def _refuse_not_finite(scores: Tensor, mixers: Sequence[Mixer]) -> None:
    finite = scores.isfinite().all(-1)
    if not bool(finite.all()):
        stream, position, head = (int(index) for index in (~finite).nonzero()[0])
        raise RunError(
            f"layer {mixers[position].layer}, head {head}: the gradient of the loss by the {STREAMS[stream]} "
            f"projection is NaN or infinite; {NOT_FINITE_REMEDY}."
        )
