"""Gated DeltaNet as flash-linear-attention lays it out (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.fla_layout import FlaArchitecture, head_dim_mixers, with_head_dim
from compressor.architectures.interception import EntryPoint, intercept

_ENTRY_POINTS = (
    EntryPoint("fla.layers.gated_deltanet", "chunk_gated_delta_rule"),
    EntryPoint("fla.layers.gated_deltanet", "fused_recurrent_gated_delta_rule"),
)


@final
class GatedDeltaNet(FlaArchitecture):
    model_types: ClassVar[tuple[str, ...]] = ("gated_deltanet",)
    display_name: ClassVar[str] = "Gated DeltaNet (fla)"
    kernels_take_float32: ClassVar[bool] = True

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        self.import_stock_classes()
        from fla.models import GatedDeltaNetForCausalLM

        return GatedDeltaNetForCausalLM

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        return head_dim_mixers(config)

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        return with_head_dim(raw_config, config, keep, norm_epsilon)

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept(model, mixers, _ENTRY_POINTS, tap)
