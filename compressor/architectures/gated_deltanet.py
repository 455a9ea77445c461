"""Gated DeltaNet as flash-linear-attention lays it out (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.fla_layout import FlaArchitecture, linear_layers, mixer_path, with_head_dim
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
        num_v_heads = config.num_v_heads or config.num_heads
        head_v_dim = int(config.head_dim * config.expand_v)
        key_width, value_width = config.num_heads * config.head_dim, num_v_heads * head_v_dim
        return tuple(
            Mixer(
                layer=layer,
                module=mixer_path(layer),
                tensors=mixer_path(layer),
                num_k_heads=config.num_heads,
                num_v_heads=num_v_heads,
                head_k_dim=config.head_dim,
                head_v_dim=head_v_dim,
                convolution_width=2 * key_width + value_width if config.use_short_conv else 0,
                convolution_size=config.conv_size,
            )
            for layer in linear_layers(config)
        )

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        return with_head_dim(raw_config, config, keep, norm_epsilon)

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept(model, mixers, _ENTRY_POINTS, tap)
