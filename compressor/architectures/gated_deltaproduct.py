"""Gated DeltaProduct as flash-linear-attention lays it out (Siems et al. 2025, arXiv 2502.10297).

A token brings n_h keys, values and steps, and one query. The rows of `k_proj` and `k_conv1d` are (n_h, head, channel):
a channel of a head owns one of them for every key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.fla_layout import FlaArchitecture, linear_layers, mixer_path, with_head_dim
from compressor.architectures.interception import EntryPoint, intercept

_ENTRY_POINTS = (
    EntryPoint("fla.layers.gated_deltaproduct", "chunk_gated_delta_product"),
    EntryPoint("fla.layers.gated_deltaproduct", "fused_recurrent_gated_delta_rule", query_for_each_key=True),
)


@final
class GatedDeltaProduct(FlaArchitecture):
    """Every model of the stock class has as many value heads as key heads: its blocks do not pass `num_v_heads` on."""

    model_types: ClassVar[tuple[str, ...]] = ("gated_deltaproduct",)
    display_name: ClassVar[str] = "Gated DeltaProduct (fla)"
    kernels_take_float32: ClassVar[bool] = False

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        self.import_stock_classes()
        from fla.models import GatedDeltaProductForCausalLM

        return GatedDeltaProductForCausalLM

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        head_v_dim = int(config.head_dim * config.expand_v)
        key_width, value_width = config.num_heads * config.head_dim, config.num_heads * head_v_dim
        convolved = key_width + config.num_householder * (key_width + value_width)
        return tuple(
            Mixer(
                layer=layer,
                module=mixer_path(layer),
                tensors=mixer_path(layer),
                num_k_heads=config.num_heads,
                num_v_heads=config.num_heads,
                head_k_dim=config.head_dim,
                head_v_dim=head_v_dim,
                convolution_width=convolved if config.use_short_conv else 0,
                convolution_size=config.conv_size,
                keys_per_token=config.num_householder,
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
