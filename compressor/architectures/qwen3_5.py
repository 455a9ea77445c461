"""Qwen3.5 as transformers lays it out: text-only checkpoints and the multimodal wrapper's text tower."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, final

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from compressor.architectures.base import (
    Architecture,
    ChannelMap,
    Mixer,
    RecoveryTargets,
    RecurrenceTap,
    head_major_rows,
)
from compressor.architectures.interception import EntryPoint, intercept
from compressor.architectures.trainable import recovery_targets, tensor_name
from compressor.errors import RequestError
from compressor.reference.backend import enable_for_qwen3_5

_MODULE = "transformers.models.qwen3_5.modeling_qwen3_5"
_ENTRY_POINTS = (
    EntryPoint(_MODULE, "torch_chunk_gated_delta_rule", query="query", key="key"),
    EntryPoint(_MODULE, "torch_recurrent_gated_delta_rule", query="query", key="key"),
)
_PROJECTIONS = frozenset({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"})
_PER_HEAD = frozenset({"in_proj_b", "in_proj_a"})
_TEXT_STACK = "model.layers."
_WRAPPED_STACK = "model.language_model.layers."


@final
class Qwen35(Architecture):
    """`in_proj_qkv` and `conv1d` lay all query heads, all key heads, then all value heads."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5")
    display_name: ClassVar[str] = "Qwen3.5 (transformers)"
    load_line: ClassVar[str] = ""
    needs_fla: ClassVar[bool] = False
    kernels_take_float32: ClassVar[bool] = True

    def import_stock_classes(self) -> None:
        """transformers registers its own classes."""

    def enable_cpu_backend(self) -> None:
        enable_for_qwen3_5()

    def load_config(self, folder: Path) -> PretrainedConfig:
        return AutoConfig.from_pretrained(folder, local_files_only=True)

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

        named = raw_config.get("architectures") or []
        wrapped = raw_config["model_type"] == "qwen3_5" and "Qwen3_5ForCausalLM" not in named
        return Qwen3_5ForConditionalGeneration if wrapped else Qwen3_5ForCausalLM

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        text = config.get_text_config(decoder=True)
        wrapped_names = any(name.startswith(_WRAPPED_STACK) for name in tensor_names)
        module_stack = _WRAPPED_STACK if config.model_type == "qwen3_5" else _TEXT_STACK
        tensor_stack = _WRAPPED_STACK if wrapped_names else _TEXT_STACK
        key_width = text.linear_num_key_heads * text.linear_key_head_dim
        value_width = text.linear_num_value_heads * text.linear_value_head_dim
        return tuple(
            Mixer(
                layer=layer,
                module=f"{module_stack}{layer}.linear_attn",
                tensors=f"{tensor_stack}{layer}.linear_attn",
                num_k_heads=text.linear_num_key_heads,
                num_v_heads=text.linear_num_value_heads,
                head_k_dim=text.linear_key_head_dim,
                head_v_dim=text.linear_value_head_dim,
                convolution_width=2 * key_width + value_width,
                convolution_size=text.linear_conv_kernel_dim,
            )
            for layer, kind in enumerate(text.layer_types)
            if kind == "linear_attention"
        )

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        key_width = mixer.num_k_heads * mixer.head_k_dim
        query_rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim)
        key_rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim, offset=key_width)
        maps = []
        for module, is_projection in (("in_proj_qkv", True), ("conv1d", False)):
            for parameter in ("weight", "bias"):
                name = f"{mixer.tensors}.{module}.{parameter}"
                scored = is_projection and parameter == "weight"
                maps.append(ChannelMap(name, "query", query_rows, scored))
                maps.append(ChannelMap(name, "key", key_rows, scored))
        return tuple(maps)

    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        for name in tensor_names:
            if name.startswith("mtp.") and ".linear_attn." in name:
                raise RequestError(
                    f"{name} is a linear-attention layer inside the multi-token-prediction head, which stock "
                    "transformers never runs, so it cannot be calibrated; remove the mtp.* tensors first."
                )

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        cut = copy.deepcopy(dict(raw_config))
        text = cut.setdefault("text_config", {}) if cut["model_type"] == "qwen3_5" else cut
        if keep != config.get_text_config(decoder=True).linear_key_head_dim:
            text["linear_key_head_dim"] = keep
        if norm_epsilon is not None:
            text["rms_norm_eps"] = norm_epsilon
        return cut

    def norm_epsilon(self, config: PretrainedConfig) -> float:
        return float(config.get_text_config(decoder=True).rms_norm_eps)

    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

        return {path: module for path, module in model.named_modules() if isinstance(module, Qwen3_5RMSNorm)}

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept(model, mixers, _ENTRY_POINTS, tap)

    def output_projection(self, mixer: Mixer) -> str:
        return f"{mixer.module}.out_proj"

    def output_projection_tensor(self, mixer: Mixer) -> str:
        return f"{mixer.tensors}.out_proj.weight"

    def residual_block(self, config: PretrainedConfig, mixer: Mixer) -> str | None:
        return mixer.module.rpartition(".")[0]

    def recovery_targets(self, model: PreTrainedModel, mixers: Sequence[Mixer]) -> RecoveryTargets:
        return recovery_targets(model, mixers, _PROJECTIONS, _PER_HEAD, "input_layernorm")

    def tensor_name(self, parameter: str, mixers: Sequence[Mixer]) -> str:
        return tensor_name(parameter, mixers)

    def decoder(self, model: PreTrainedModel) -> nn.Module:
        wrapped = any(path == "model.language_model" for path, _ in model.named_modules())
        return model.get_submodule("model.language_model" if wrapped else "model")
