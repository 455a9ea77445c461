"""Taps that change what a recurrence computes with: zeroed and padded channels, a scaled output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.architectures.base import RecurrenceTap


class MaskedChannels(RecurrenceTap):
    """Zeroes the dropped key/query channels before any normalisation: the exact oracle of surgery.

    Stock delta-rule kernels scale queries by width**-0.5, so a model cut from d_k to k channels multiplies
    every mixer output by sqrt(d_k / k). `output_scale` applies that factor; it is 1.0 where there is no scale
    (`Architecture.output_scale`), and when the
    exported norm epsilon is multiplied by d_k / k, which undoes the factor exactly:
    RMSNorm(c * o; c^2 * eps) = RMSNorm(o; eps). Scaling the query instead would do nothing, since
    the kernel normalises it.

    `kept` maps a layer to int64 [H_k, k]; layers it does not name pass unchanged.
    """

    def __init__(self, kept: Mapping[int, Tensor], head_k_dim: int, output_scale: float) -> None:
        self._masks = {layer: _channel_mask(indices, head_k_dim) for layer, indices in kept.items()}
        self._output_scale = output_scale

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return self._masked(layer, query)

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return self._masked(layer, key)

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return output * self._output_scale if layer in self._masks else output

    def _masked(self, layer: int, activations: Tensor) -> Tensor:
        mask = self._masks.get(layer)
        return activations if mask is None else activations * mask.to(activations)


def _channel_mask(indices: Tensor, head_k_dim: int) -> Tensor:
    mask = torch.zeros(indices.shape[0], head_k_dim)
    return mask.scatter_(1, indices, 1.0)


class PaddedChannels(RecurrenceTap):
    """Runs the recurrence at `width` channels, those beyond the model's own being zero: outputs stay what they were.

    Zeros change no norm and no inner product, and what a kernel's scale of width**-0.5 loses is given back:
    `output_scale` is the architecture's for a cut from `width` to `head_k_dim`.
    """

    def __init__(self, head_k_dim: int, width: int, output_scale: float) -> None:
        self._missing = width - head_k_dim
        self._factor = output_scale

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return pad(query, (0, self._missing))

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return pad(key, (0, self._missing))

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return output * self._factor


class ScaledOutput(RecurrenceTap):
    """Multiplies every mixer output by a constant: what another norm epsilon would amount to."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return output * self._factor
