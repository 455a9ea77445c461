"""A model whose key and query channels are directions: by a tap, exactly, or by weights that a stock layer holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.principal_directions import rotate
from compressor.architectures.base import Architecture, Mixer, RecurrenceTap
from compressor.architectures.decay import decays_channels
from compressor.errors import RequestError

Directions = Mapping[int, Tensor]
"""By layer, float64 [H_k, d_k, d_k]: the directions of a head in its rows, the leading one first."""
Filters = Callable[[Tensor, Tensor], Tensor]
"""From filters [H_k, d_k, ...] of channels and the directions to filters of the directions."""


def refuse_decays_of_channels(architecture: Architecture) -> None:
    """A rotation R does not commute with a decay diag(alpha) of the channels: R^T diag(alpha) R mixes directions.

    Raises:
        RequestError: the family's key channels decay each by its own factor.
    """
    if any(decays_channels(model_type) for model_type in architecture.model_types):
        raise RequestError(
            f"key channels of {architecture.display_name} decay each by its own factor, and rotated ones would take "
            "the factors of others; name a model with one decay a head."
        )


class RotatedChannels(RecurrenceTap):
    """Puts the `keep` leading directions of queries and keys, after activation, in place of their channels.

    The others are zeros, which a recurrence that normalises by L2 does not see; `output_scale` is that of
    MaskedChannels. With every direction kept such a model computes what it did; one that normalises by the sum of the
    channels does not, since a rotation changes the sum.

    Raises:
        RequestError: see `refuse_decays_of_channels`.
    """

    def __init__(self, architecture: Architecture, directions: Directions, keep: int, output_scale: float) -> None:
        refuse_decays_of_channels(architecture)
        self._leading = {layer: _without_rest(rows, keep) for layer, rows in directions.items()}
        self._output_scale = output_scale

    def on_query(self, layer: int, query: Tensor) -> Tensor:
        return self._rotated(layer, query)

    def on_key(self, layer: int, key: Tensor) -> Tensor:
        return self._rotated(layer, key)

    def on_output(self, layer: int, output: Tensor) -> Tensor:
        return output * self._output_scale if layer in self._leading else output

    def _rotated(self, layer: int, activations: Tensor) -> Tensor:
        """In float32 at least, rounded to the activations' dtype once."""
        if layer not in self._leading:
            return activations
        dtype = torch.promote_types(activations.dtype, torch.float32)
        leading = self._leading[layer].to(activations.device, dtype)
        return torch.einsum("bthd,hkd->bthk", activations.to(dtype), leading).to(activations.dtype)


@contextmanager
def rotated_weights(
    architecture: Architecture,
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    directions: Directions,
    filters: Filters,
) -> Iterator[None]:
    """While active, the weights of `model` make directions: projections and biases exactly, convolutions by `filters`.

    Rounded to the weights' dtype; afterwards they are what they were.

    Raises:
        RequestError: see `refuse_decays_of_channels`.
    """
    refuse_decays_of_channels(architecture)
    parameters = dict(model.named_parameters())
    before: dict[str, Tensor] = {}
    try:
        for mixer in mixers:
            for channel_map in architecture.channel_maps(mixer):
                name = mixer.module + channel_map.tensor.removeprefix(mixer.tensors)
                if name in parameters:
                    weight = parameters[name].detach()
                    before.setdefault(name, weight.clone())
                    change = filters if weight.ndim == 3 else rotate
                    _change_rows(weight.movedim(channel_map.dim, 0), channel_map.rows, directions[mixer.layer], change)
        yield
    finally:
        for name, weight in before.items():
            parameters[name].detach().copy_(weight)


def _change_rows(weight: Tensor, rows: Tensor, directions: Tensor, change: Filters) -> None:
    """In place, the rows int64 [H_k, d_k, copies] of every head, each copy by itself."""
    rows = rows.to(weight.device)
    weight[rows] = change(weight[rows], directions.to(weight.device)).to(weight.dtype)


def _without_rest(directions: Tensor, keep: int) -> Tensor:
    leading = directions.clone()
    leading[:, keep:] = 0
    return leading
