"""Kimi delta attention as flash-linear-attention lays it out (Kimi Team 2025, arXiv 2510.26692).

Every key channel of the state decays by its own factor, so the rows that give the factors, the last ones of `f_proj`
and `dt_bias`, are cut with those of the keys: (value head, channel), the value heads of a key head side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import ChannelMap, Mixer, RecoveryTargets, RecurrenceTap, head_major_rows
from compressor.architectures.config_fields import FieldRule, Number
from compressor.architectures.fla_layout import FlaArchitecture, head_dim_mixers, with_head_dim
from compressor.architectures.interception import EntryPoint, intercept
from compressor.architectures.trainable import recovery_targets

_ENTRY_POINTS = tuple(
    EntryPoint("fla.layers.kda", name, channel_gate=("g", "dt_bias")) for name in ("chunk_kda", "fused_recurrent_kda")
)
_PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "b_proj", "o_proj", "f_proj.0", "f_proj.1", "g_proj.0", "g_proj.1"}
)
_PER_HEAD = frozenset({"b_proj"})


@final
class KimiDeltaAttention(FlaArchitecture):
    model_types: ClassVar[tuple[str, ...]] = ("kda",)
    display_name: ClassVar[str] = "Kimi delta attention (fla)"
    kernels_take_float32: ClassVar[bool] = True

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        self.import_stock_classes()
        from fla.models import KDAForCausalLM

        return KDAForCausalLM

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        return head_dim_mixers(config)

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        """As of other families, and the decays: a channel of a key head owns one row for each of its value heads."""
        rows = head_major_rows(mixer.num_v_heads, mixer.head_k_dim).unflatten(0, (mixer.num_k_heads, -1))
        decays = rows.squeeze(-1).transpose(1, 2)  # [H_k, d_k, H_v / H_k]
        return (
            *super().channel_maps(mixer),
            ChannelMap(f"{mixer.tensors}.f_proj.1.weight", "key", decays, is_projection=False),
            ChannelMap(f"{mixer.tensors}.dt_bias", "key", decays, is_projection=False),
        )

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        return *super().field_rules(config), Number("lower_bound", negative=True, optional=True)

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        return with_head_dim(raw_config, config, keep, norm_epsilon)

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept(model, mixers, _ENTRY_POINTS, tap)

    def recovery_targets(self, model: PreTrainedModel, mixers: Sequence[Mixer]) -> RecoveryTargets:
        return recovery_targets(model, mixers, _PROJECTIONS, _PER_HEAD, "attn_norm")
