"""Gated DeltaNet as flash-linear-attention lays it out (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.fla_layout import FlaArchitecture, linear_layers, mixer_path, with_norm_epsilon
from compressor.architectures.interception import EntryPoint, intercept
from compressor.errors import RequestError

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
        head_v_dim = int(config.head_dim * config.expand_v)
        cut = with_norm_epsilon(raw_config, keep, norm_epsilon)
        if keep != config.head_dim:
            cut["head_dim"] = keep
            cut["expand_v"] = expansion_for(keep, head_v_dim)
        return cut

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept(model, mixers, _ENTRY_POINTS, tap)


def expansion_for(head_k_dim: int, head_v_dim: int) -> float:
    """The float with `int(head_k_dim * expansion) == head_v_dim`, as the stock class computes it.

    The plain quotient can fall short by one rounding: int(98 * (128 / 98)) is 127.

    Raises:
        RequestError: no float near the quotient gives that width.
    """
    expansion = head_v_dim / head_k_dim
    for candidate in (expansion, math.nextafter(expansion, math.inf)):
        if int(head_k_dim * candidate) == head_v_dim:
            return candidate
    raise RequestError(
        f"no expand_v gives value heads of {head_v_dim} beside key heads of {head_k_dim}; choose another --target-dim."
    )
