"""Masks on key and query channels with a gradient of their own for every segment of every sequence.

A mask s multiplies what a channel adds to inner products of keys and queries, and to their norms: sqrt(s) multiplies
the channel in both. A model is a smooth function of s and, since a flipped sign of a channel of queries and keys
changes nothing, an even one of sqrt(s): at a dropped channel the gradient to sqrt(s) is always 0, that to s is not.
(Norms that divide by a sum of channels, which DeltaNet can be configured for, are no functions of s at 0.)

Behind these masks stands a norm. Removing a channel that holds the share p of the squares of a token's vector turns the
normalised vector by an angle whose sine is sqrt(p); the gradient to the mask's root says sqrt(p (1 - p)) instead, next
to nothing for a vector that stands nearly in one channel and loses all it had. With the removal "chord" gradients are
1 / sqrt(1 - p) times as long, that of the way across that the vector goes; with "arc" asin(sqrt(p)) / sqrt(p (1 - p))
times, that of its angle: to first order in the normalised vector still, and the same for small p.

The value of a mask is the same in all segments. One backward pass then gives the gradient of each segment, whose sum
is that of the mask: of a loss L, the gradient of a segment is what the mask on its tokens does to all of L.

Notation used for tensor shapes:
    B   sequences      T   tokens of a sequence      S   segments of a sequence, the last may be shorter
    L   mixers         H_k, d_k   see `architectures.base`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.fisher.settings import Removal

_LEAST_REST = 2.0**-6
"""Gradients of a vector that one channel holds to more than this are rounding."""


@final
class SegmentMasks(RecurrenceTap):
    """Applies masks to queries and keys before any norm, and the scale that will be exported to outputs."""

    def __init__(
        self, variables: Mapping[int, Tensor], segment: int, output_scale: float, removal: Removal = "tangent"
    ) -> None:
        """`variables` maps a layer to [B, S, H_k, d_k]; a segment has `segment` tokens."""
        self._variables = variables
        self._segment = segment
        self._output_scale = output_scale
        self._removal = removal

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return masked(query, self._variables[layer], self._segment, self._removal)

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return masked(key, self._variables[layer], self._segment, self._removal)

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return output * self._output_scale


def segment_variables(
    mixers: Sequence[Mixer], mask: Tensor, shape: tuple[int, int], segment: int, dtype: torch.dtype
) -> dict[int, Tensor]:
    """By layer, the masks `mask` [L, H_k, d_k] once for every segment of a batch of `shape` (B, T), as leaves.

    Values are >= 0; a leaf is float32, or float64 where the activations' `dtype` is.
    """
    count = (shape[0], -(-shape[1] // segment))
    wide = mask.to(torch.promote_types(dtype, torch.float32))
    return {
        mixer.layer: wide[position].expand(*count, -1, -1).clone().requires_grad_()
        for position, mixer in enumerate(mixers)
    }


def masked(activations: Tensor, variables: Tensor, segment: int, removal: Removal = "tangent") -> Tensor:
    """[B, T, H_k, d_k] times the root of [B, S, H_k, d_k], each segment by its own; in the activations' dtype.

    The gradient of `variables` is summed in their dtype, whatever that of the activations is. Where one is 0 it is
    infinite, or with that of queries and keys together undefined; 0 is given there.
    """
    product: Tensor = _Masked.apply(activations, variables, segment, removal)  # type: ignore[no-untyped-call]
    return product


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, variables: Tensor, segment: int, removal: Removal) -> Tensor:
        ctx.save_for_backward(activations, variables)
        ctx.segment, ctx.removal = segment, removal
        return activations * _over_tokens(variables, segment, activations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        activations, variables = ctx.saved_tensors
        products = gradient.to(variables.dtype) * activations
        if ctx.removal != "tangent":
            products = products * _way(activations.to(variables.dtype), variables, ctx.segment, ctx.removal)
        missing = variables.shape[1] * ctx.segment - products.shape[1]
        whole = functional.pad(products, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, ctx.segment))
        slopes = torch.where(variables > 0, 0.5 * variables.rsqrt(), 0.0)
        return gradient * _over_tokens(variables, ctx.segment, gradient), whole.sum(2) * slopes, None, None


def _way(activations: Tensor, variables: Tensor, segment: int, removal: Removal) -> Tensor:
    """[B, T, H_k, d_k]: how much further a removal goes than the gradient of the mask's root says, see above."""
    squares = (activations * _over_tokens(variables, segment, activations)).square()
    part = squares / squares.sum(-1, keepdim=True).clamp_min(torch.finfo(squares.dtype).tiny)
    rest = (1 - part).clamp_min(_LEAST_REST)
    if removal == "chord":
        return rest.rsqrt()
    angle = torch.atan2(part.sqrt(), rest.sqrt())
    return torch.where(part > 0, angle * (part * rest).rsqrt(), 1.0)


def _over_tokens(variables: Tensor, segment: int, like: Tensor) -> Tensor:
    return variables.sqrt().to(like.dtype).repeat_interleave(segment, dim=1)[:, : like.shape[1]]
