"""Masks on key and query channels with a gradient of their own for every segment of every sequence.

A mask s multiplies what a channel adds to inner products of keys and queries, and to their norms: sqrt(s) multiplies
the channel in both. A model is a smooth function of s and, since a flipped sign of a channel of queries and keys
changes nothing, an even one of sqrt(s): at a dropped channel the gradient to sqrt(s) is always 0, that to s is not.
(Norms that divide by a sum of channels, which DeltaNet can be configured for, are no functions of s at 0.)

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


@final
class SegmentMasks(RecurrenceTap):
    """Applies masks to queries and keys before any norm, and the scale that will be exported to outputs."""

    def __init__(self, variables: Mapping[int, Tensor], segment: int, output_scale: float) -> None:
        """`variables` maps a layer to [B, S, H_k, d_k]; a segment has `segment` tokens."""
        self._variables = variables
        self._segment = segment
        self._output_scale = output_scale

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return masked(query, self._variables[layer], self._segment)

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return masked(key, self._variables[layer], self._segment)

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


def masked(activations: Tensor, variables: Tensor, segment: int) -> Tensor:
    """[B, T, H_k, d_k] times the root of [B, S, H_k, d_k], each segment by its own; in the activations' dtype.

    The gradient of `variables` is summed in their dtype, whatever that of the activations is. Where one is 0 it is
    infinite, or with that of queries and keys together undefined; 0 is given there.
    """
    product: Tensor = _Masked.apply(activations, variables, segment)  # type: ignore[no-untyped-call]
    return product


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Tensor, variables: Tensor, segment: int) -> Tensor:
        ctx.save_for_backward(activations, variables)
        ctx.segment = segment
        return activations * _over_tokens(variables, segment, activations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        activations, variables = ctx.saved_tensors
        products = gradient.to(variables.dtype) * activations
        missing = variables.shape[1] * ctx.segment - products.shape[1]
        whole = functional.pad(products, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, ctx.segment))
        slopes = torch.where(variables > 0, 0.5 * variables.rsqrt(), 0.0)
        return gradient * _over_tokens(variables, ctx.segment, gradient), whole.sum(2) * slopes, None


def _over_tokens(variables: Tensor, segment: int, like: Tensor) -> Tensor:
    return variables.sqrt().to(like.dtype).repeat_interleave(segment, dim=1)[:, : like.shape[1]]
