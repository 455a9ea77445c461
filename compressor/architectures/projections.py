"""The weights that make key and query channels, found in a loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compressor.architectures.base import Architecture, Mixer, Stream


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Rows of a linear module that make the query or the key channels of a mixer.

    `module` is its path in the model and `tensor` the name of its weight in the files; one module can make both
    streams. `rows` is int64 [H_k, d_k, copies].
    """

    stream: Stream
    module: str
    tensor: str
    rows: Tensor


def projections(architecture: Architecture, mixer: Mixer) -> tuple[Projection, ...]:
    """What makes the query and the key channels of `mixer`."""
    return tuple(
        Projection(
            stream=channel_map.stream,
            module=mixer.module + channel_map.tensor.removeprefix(mixer.tensors).removesuffix(".weight"),
            tensor=channel_map.tensor,
            rows=channel_map.rows,
        )
        for channel_map in architecture.channel_maps(mixer)
        if channel_map.is_projection
    )


def sum_by_channel(by_row: Tensor, rows: Tensor) -> Tensor:
    """Sum of `by_row` [rows of a tensor] over the `rows` int64 [H_k, d_k, copies] of each channel: [H_k, d_k]."""
    return by_row[rows.to(by_row.device)].sum(-1)
