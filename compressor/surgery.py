"""The one slicing routine: every tensor that carries key/query channels, cut to the kept ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.architectures.base import Architecture, ChannelMap, Mixer
from compressor.artifacts import Selection
from compressor.errors import RequestError


@dataclass(frozen=True)
class TensorCut:
    """The slices of one tensor that remain, ascending int64 [remaining], along `dim`."""

    remaining: Tensor
    dim: int

    def apply(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the remaining slices, in their order and dtype."""
        return tensor.index_select(self.dim, self.remaining)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.dim], len(self.remaining), *shape[self.dim + 1 :])


def plan_cuts(
    architecture: Architecture, mixers: Sequence[Mixer], shapes: Mapping[str, Sequence[int]], selection: Selection
) -> dict[str, TensorCut]:
    """The cut of every tensor, by name, that owns a dropped channel; others are not named.

    `shapes` are those of the checkpoint's tensors.

    Raises:
        RequestError: a tensor has fewer slices than the family's layout says.
    """
    dropped: dict[str, list[Tensor]] = defaultdict(list)
    dims: dict[str, int] = {}
    for mixer in mixers:
        drops = dropped_channels(selection.kept[mixer.layer], mixer.head_k_dim)
        for channel_map in present_maps(architecture, mixer, shapes):
            rows = channel_map.rows[drops]
            _refuse_short_tensor(channel_map, shapes[channel_map.tensor])
            dropped[channel_map.tensor].append(rows.flatten())
            dims[channel_map.tensor] = channel_map.dim
    cuts = {}
    for name, rows_of_maps in dropped.items():
        keep = torch.ones(shapes[name][dims[name]], dtype=torch.bool)
        keep[torch.cat(rows_of_maps)] = False
        if not bool(keep.all()):
            cuts[name] = TensorCut(keep.nonzero().flatten(), dims[name])
    return cuts


def present_maps(architecture: Architecture, mixer: Mixer, names: Collection[str]) -> list[ChannelMap]:
    return [channel_map for channel_map in architecture.channel_maps(mixer) if channel_map.tensor in names]


def dropped_channels(kept: Tensor, head_k_dim: int) -> Tensor:
    """bool [H_k, d_k], True where a channel is not in `kept` int64 [H_k, k]."""
    return torch.ones(kept.shape[0], head_k_dim, dtype=torch.bool).scatter_(1, kept, False)


def refuse_other_layouts(
    architecture: Architecture, mixers: Sequence[Mixer], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Hold the tensors that the stock loader takes at any size against the family's layout.

    Raises:
        RequestError: one has another number of slices, so that its channels are not where they should be.
    """
    for mixer in mixers:
        for channel_map in present_maps(architecture, mixer, shapes):
            found = shapes[channel_map.tensor][channel_map.dim]
            if channel_map.slices is not None and found != channel_map.slices:
                raise RequestError(
                    f"{channel_map.tensor} has {found} slices along dimension {channel_map.dim} where the "
                    f"{channel_map.stream} channels alone are {channel_map.slices}; write the checkpoint again with "
                    "save_pretrained(..., save_original_format=False)."
                )


def _refuse_short_tensor(channel_map: ChannelMap, shape: Sequence[int]) -> None:
    needed = int(channel_map.rows.max()) + 1
    if shape[channel_map.dim] < needed:
        raise RequestError(
            f"{channel_map.tensor} has {shape[channel_map.dim]} rows where the config says at least {needed}; "
            "the config and the weights do not belong together."
        )
