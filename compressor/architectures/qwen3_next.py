"""Qwen3-Next as transformers lays it out, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import ChannelMap, Mixer
from compressor.architectures.config_fields import Count, FieldRule
from compressor.architectures.transformers_delta_rule import TransformersDeltaRule, flat_maps


@final
class Qwen3Next(TransformersDeltaRule):
    """`in_proj_qkvz` lays one key head after the other, each with its query, its key, and what its r value heads need.

    The convolution behind it is flat: all query heads, all key heads, then all value heads. `in_proj_ba` is laid like
    the first: r steps, then r decays a key head. Router and experts stand outside the mixers: copied as they are.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    display_name: ClassVar[str] = "Qwen3-Next (transformers)"
    modeling: ClassVar[str] = "transformers.models.qwen3_next.modeling_qwen3_next"
    stack_norm: ClassVar[str | None] = "Qwen3NextRMSNorm"
    output_projection_name: ClassVar[str] = "out_proj"
    projection_names: ClassVar[frozenset[str]] = frozenset({"in_proj_qkvz", "in_proj_ba", "out_proj"})
    per_head_names: ClassVar[frozenset[str]] = frozenset({"in_proj_ba"})

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        from transformers import Qwen3NextForCausalLM

        return Qwen3NextForCausalLM

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        return (Count("num_experts_per_tok", of="num_experts"),)

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        maps: list[ChannelMap] = []
        for parameter in ("weight", "bias"):
            name = f"{mixer.tensors}.in_proj_qkvz.{parameter}"
            scored = parameter == "weight"
            maps.append(ChannelMap(name, "query", _interleaved_rows(mixer, 0), scored))
            maps.append(ChannelMap(name, "key", _interleaved_rows(mixer, mixer.head_k_dim), scored))
        return (*maps, *flat_maps(mixer, "conv1d", False))


def _interleaved_rows(mixer: Mixer, offset: int) -> Tensor:
    """int64 [H_k, d_k, 1]: rows of the channels that begin `offset` rows into the share of each key head."""
    share = 2 * mixer.head_k_dim + 2 * mixer.num_v_heads // mixer.num_k_heads * mixer.head_v_dim
    heads = share * torch.arange(mixer.num_k_heads)
    return (heads[:, None] + offset + torch.arange(mixer.head_k_dim))[:, :, None]
