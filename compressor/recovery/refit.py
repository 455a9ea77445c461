"""Closed-form refit of the mixers' output projections, layer by layer, from forward passes alone.

After a cut, the normed and gated output of a mixer's recurrence differs from the unpruned one's. The
projection behind it is linear, so the weights that best give the unpruned layer's outputs again, from
what the pruned model now computes, are a least-squares fit (see `ridge`). Layers are fitted in order:
each sees the inputs that the layers before it, already refitted, give it. What a layer should give is
the unpruned residual stream behind the mixer, so that it also makes up for what the layers before it
still miss: Y + (R - R'), with Y the unpruned mixer's output and R, R' the residual streams of the
unpruned and the pruned model in front of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.errors import NOT_FINITE_REMEDY, RequestError, RunError
from compressor.recovery.capture import Batch, Point, activations_at
from compressor.recovery.ridge import NormalEquations, fit

Divergence = Callable[[PreTrainedModel], float]
"""KL of a model to the unpruned one on held-out tokens, in nats a token."""
AddUp = Callable[[NormalEquations], None]
"""Makes the sums of one process those of all, in place."""


@dataclass(frozen=True, slots=True)
class LayerRefit:
    """One layer's fit; `ridge` is None where the old weights stay.

    The errors are |T - X W^T| / |T| on the held-out tokens, T what the projection should give and X
    what the compressed model gives to it.
    """

    layer: int
    ridge: float | None
    error_before: float
    error_after: float


@dataclass(frozen=True, slots=True, eq=False)
class Refit:
    """What a refit did.

    Attributes:
        layers: one entry a mixer, in order.
        tensors: the new tensors by their names in the files, in the files' dtypes; empty when `kept_old`.
        kl_before: divergence of the model as it was given.
        kl_after: divergence of the refitted model, also when it was not kept.
        kept_old: whether every weight was put back, because the refitted model diverges more.
    """

    layers: tuple[LayerRefit, ...]
    tensors: Mapping[str, Tensor]
    kl_before: float
    kl_after: float
    kept_old: bool


@dataclass(frozen=True, slots=True, eq=False)
class RefitPair:
    """The unpruned model and the compressed one, which the refit changes in place; devices and dtypes may differ.

    `mixers` are the compressed model's; the unpruned model has modules of the same paths. `dtypes` are
    those of the checkpoint's tensors, by name: new weights are rounded to them before they are judged.
    """

    architecture: Architecture
    original: PreTrainedModel
    compressed: PreTrainedModel
    mixers: Sequence[Mixer]
    dtypes: Mapping[str, torch.dtype]


def refuse_too_few_tokens(
    tokens: int,
    held_out_tokens: int,
    mixers: Sequence[Mixer],
    remedy: str = "raise --calibration-samples, or give --no-refit",
) -> None:
    """Refuse a refit whose normal equations cannot have full rank, or whose ridge cannot be chosen.

    `remedy` is what the user is told to do.

    Raises:
        RequestError: fewer tokens than an output projection has inputs, or none held out.
    """
    inputs = max(mixer.num_v_heads * mixer.head_v_dim for mixer in mixers)
    if tokens < inputs:
        raise RequestError(
            f"the refit has {tokens:,} tokens for output projections of {inputs:,} inputs and needs at least as many; "
            f"{remedy}."
        )
    if held_out_tokens < 1:
        raise RequestError(f"the refit has 0 held-out tokens and needs at least 1 to choose its ridge by; {remedy}.")


def layer_tokens(mixers: Sequence[Mixer], tokens: int) -> int:
    """What `refit` reports in all for `tokens` fitting and held-out tokens together.

    The unit is one token through one layer of both models: a mixer in layer l costs l + 1 of them a
    token, so that the rate stays the same from the first layer to the last.
    """
    return sum(mixer.layer + 1 for mixer in mixers) * tokens


def refit(
    pair: RefitPair,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    divergence: Divergence,
    on_layer_tokens: Callable[[int], None],
    add_up: AddUp | None = None,
) -> Refit:
    """Refit every output projection of `pair.compressed` in place, and keep that only if the model gets no worse.

    Fitted on `batches`; the ridge of a layer is chosen on `held_out`, and a layer that does not err less
    there keeps its weights. `divergence` is measured before and after: where it rose, and where an
    exception ends the refit, all weights are put back to the bit. Memory does not grow with the number of
    tokens. `on_layer_tokens` gets the units of `layer_tokens` just done.

    With `add_up`, `batches` and `held_out` are the share of one of several processes, which all call this, and
    `divergence` is to be that of all of them; whether their tokens are enough is then for the caller to ask.

    Raises:
        RequestError: too few tokens, see `refuse_too_few_tokens`.
        RunError: activations are NaN or infinite (the layer is named), or a projection was not run.
    """
    if add_up is None:
        refuse_too_few_tokens(_count(batches), _count(held_out), pair.mixers)
    replaced: list[tuple[Tensor, Tensor]] = []
    kept = False
    try:
        kl_before = kl_after = divergence(pair.compressed)
        layers, tensors = [], {}
        for mixer in pair.mixers:
            layer, weight = _refit_layer(pair, mixer, batches, held_out, on_layer_tokens, add_up)
            layers.append(layer)
            if weight is not None:
                parameter = _projection(pair, mixer).weight
                replaced.append((parameter, parameter.detach().clone()))
                _set(parameter, weight)
                tensors[pair.architecture.output_projection_tensor(mixer)] = weight.cpu()
        if replaced:
            kl_after = divergence(pair.compressed)
        kept = kl_after <= kl_before
    finally:
        if not kept:
            for parameter, old in replaced:
                _set(parameter, old)
    return Refit(tuple(layers), tensors if kept else {}, kl_before, kl_after, not kept)


def _refit_layer(
    pair: RefitPair,
    mixer: Mixer,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    on_layer_tokens: Callable[[int], None],
    add_up: AddUp | None,
) -> tuple[LayerRefit, Tensor | None]:
    """The fit of one layer, and its new weights in the checkpoint's dtype where they err less."""
    train = _normal_equations(pair, mixer, batches, on_layer_tokens, add_up)
    unseen = _normal_equations(pair, mixer, held_out, on_layer_tokens, add_up)
    result = fit(train, unseen, pair.dtypes[pair.architecture.output_projection_tensor(mixer)])
    energy = float(unseen.energy)
    before, after = (
        math.sqrt(max(error, 0.0) / energy) if energy else 0.0 for error in (result.error_before, result.error_after)
    )
    return LayerRefit(mixer.layer, result.ridge, before, after), result.weight


@torch.no_grad()
def _normal_equations(
    pair: RefitPair,
    mixer: Mixer,
    batches: Sequence[Batch],
    on_layer_tokens: Callable[[int], None],
    add_up: AddUp | None,
) -> NormalEquations:
    """The sums of one layer over `batches`: what the compressed projection reads, what it should give."""
    projection = _projection(pair, mixer)
    sums = NormalEquations(projection.weight)
    for batch in batches:
        inputs, targets = _inputs_and_targets(pair, mixer, batch)
        if projection.bias is not None:
            targets = targets - projection.bias
        sums.add(inputs, targets)
        on_layer_tokens(batch.num_tokens * (mixer.layer + 1))
    if add_up is not None:
        add_up(sums)
    if not sums.finite:
        raise RunError(
            f"layer {mixer.layer}: what the output projection reads or gives is NaN or infinite; {NOT_FINITE_REMEDY}."
        )
    return sums


def _inputs_and_targets(pair: RefitPair, mixer: Mixer, batch: Batch) -> tuple[Tensor, Tensor]:
    """X [N, n] of the compressed projection, and float32 [N, m] that it should give, on its device."""
    architecture = pair.architecture
    block = architecture.residual_block(pair.compressed.config, mixer)
    residual = [] if block is None else [Point(block, "input")]
    path = architecture.output_projection(mixer)
    *before, outputs = activations_at(
        pair.original, architecture.decoder(pair.original), [*residual, Point(path, "output")], batch
    )
    *after, inputs = activations_at(
        pair.compressed, architecture.decoder(pair.compressed), [*residual, Point(path, "input")], batch
    )
    targets = outputs.float().to(inputs.device)
    for unpruned, pruned in zip(before, after, strict=True):
        targets = targets + (unpruned.float().to(inputs.device) - pruned.float().to(inputs.device))
    return inputs, targets


def _projection(pair: RefitPair, mixer: Mixer) -> nn.Linear:
    module = pair.compressed.get_submodule(pair.architecture.output_projection(mixer))
    if not isinstance(module, nn.Linear):
        raise RunError(
            f"layer {mixer.layer}: the output projection is a {type(module).__name__} and not a linear module; load "
            "the checkpoint without quantisation or adapters."
        )
    return module


def _set(parameter: Tensor, weight: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(weight)


def _count(batches: Sequence[Batch]) -> int:
    return sum(batch.num_tokens for batch in batches)
