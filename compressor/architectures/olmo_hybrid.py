"""Olmo-Hybrid as transformers lays it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from transformers import PreTrainedModel

from compressor.architectures.base import ChannelMap, Mixer, Stream, head_major_rows
from compressor.architectures.transformers_delta_rule import TransformersDeltaRule, flat_maps

_STREAMS: tuple[tuple[str, Stream], ...] = (("q", "query"), ("k", "key"))


@final
class OlmoHybrid(TransformersDeltaRule):
    """Separate projections of queries, keys and values, and one flat convolution of all three.

    Published files hold the convolution in three parts, which the stock class lays one after the other when it loads.
    transformers' `save_pretrained` divides it into three equal ones whatever the widths are: such a part is not that of
    the queries or keys alone, and is refused. The output norm's epsilon is written in the stock class.
    """

    model_types: ClassVar[tuple[str, ...]] = ("olmo_hybrid",)
    display_name: ClassVar[str] = "Olmo-Hybrid (transformers)"
    modeling: ClassVar[str] = "transformers.models.olmo_hybrid.modeling_olmo_hybrid"
    stack_norm: ClassVar[str | None] = None
    norm_epsilon_in_config: ClassVar[bool] = False
    fixed_norm_epsilon: ClassVar[float] = 1e-5
    value_width_follows_key_width: ClassVar[bool] = True
    output_projection_name: ClassVar[str] = "o_proj"
    projection_names: ClassVar[frozenset[str]] = frozenset(
        {"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj"}
    )
    per_head_names: ClassVar[frozenset[str]] = frozenset({"a_proj", "b_proj"})
    published_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "input_layernorm.weight": ("attention_layer_norm.weight",),
        "linear_attn.conv1d.weight": tuple(f"linear_attn.{letter}_conv1d.weight" for letter in "qkv"),
    }

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        from transformers import OlmoHybridForCausalLM

        return OlmoHybridForCausalLM

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim)
        parts = tuple(
            ChannelMap(f"{mixer.tensors}.{letter}_{module}.weight", stream, rows, module == "proj", slices=rows.numel())
            for letter, stream in _STREAMS
            for module in ("proj", "conv1d")
        )
        return parts + flat_maps(mixer, "conv1d", False)
