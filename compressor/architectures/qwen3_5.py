"""Qwen3.5 as transformers lays it out, dense and with experts: text-only checkpoints and the wrapper's text tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import ChannelMap, Mixer
from compressor.architectures.config_fields import Count, FieldRule
from compressor.architectures.transformers_delta_rule import TransformersDeltaRule, flat_maps


class _Qwen35Layout(TransformersDeltaRule):
    """`in_proj_qkv` and `conv1d` lay all query heads, all key heads, then all value heads."""

    output_projection_name: ClassVar[str] = "out_proj"
    projection_names: ClassVar[frozenset[str]] = frozenset(
        {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
    )
    per_head_names: ClassVar[frozenset[str]] = frozenset({"in_proj_b", "in_proj_a"})

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        return flat_maps(mixer, "in_proj_qkv", True) + flat_maps(mixer, "conv1d", False)


@final
class Qwen35(_Qwen35Layout):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    display_name: ClassVar[str] = "Qwen3.5 (transformers)"
    modeling: ClassVar[str] = "transformers.models.qwen3_5.modeling_qwen3_5"
    stack_norm: ClassVar[str | None] = "Qwen3_5RMSNorm"

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

        return Qwen3_5ForConditionalGeneration if _is_wrapped(raw_config, "qwen3_5") else Qwen3_5ForCausalLM


@final
class Qwen35Moe(_Qwen35Layout):
    """Router and experts stand outside the mixers, so a cut copies their tensors as they are."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text", "qwen3_5_moe")
    display_name: ClassVar[str] = "Qwen3.5 with experts (transformers)"
    modeling: ClassVar[str] = "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe"
    stack_norm: ClassVar[str | None] = "Qwen3_5MoeRMSNorm"

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

        wrapped = _is_wrapped(raw_config, "qwen3_5_moe")
        return Qwen3_5MoeForConditionalGeneration if wrapped else Qwen3_5MoeForCausalLM

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        return (Count("num_experts_per_tok", of="num_experts"),)


def _is_wrapped(raw_config: Mapping[str, Any], wrapper: str) -> bool:
    """Whether the config is the multimodal wrapper's and does not name the text model's class."""
    named = raw_config.get("architectures") or []
    return raw_config["model_type"] == wrapper and not any(name.endswith("ForCausalLM") for name in named)
