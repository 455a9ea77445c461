"""DeltaNet as flash-linear-attention lays it out (Yang et al. 2024, arXiv 2406.06484)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Mixer, RecurrenceTap
from compressor.architectures.fla_layout import FlaArchitecture, linear_layers, mixer_path, with_norm_epsilon
from compressor.architectures.interception import EntryPoint, intercept
from compressor.errors import RequestError

_RECURRENCES = (
    EntryPoint("fla.layers.delta_net", "chunk_delta_rule"),
    EntryPoint("fla.layers.delta_net", "fused_recurrent_delta_rule"),
)
_SUM_NORM = EntryPoint("fla.layers.delta_net", "sum_norm", kind="normalization")


@final
class DeltaNet(FlaArchitecture):
    model_types: ClassVar[tuple[str, ...]] = ("delta_net",)
    display_name: ClassVar[str] = "DeltaNet (fla)"
    kernels_take_float32: ClassVar[bool] = False

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        self.import_stock_classes()
        from fla.models import DeltaNetForCausalLM

        return DeltaNetForCausalLM

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        key_width, value_width = _widths(config)
        return tuple(
            Mixer(
                layer=layer,
                module=mixer_path(layer),
                tensors=mixer_path(layer),
                num_k_heads=config.num_heads,
                num_v_heads=config.num_heads,
                head_k_dim=key_width // config.num_heads,
                head_v_dim=value_width // config.num_heads,
                convolution_width=2 * key_width + value_width if config.use_short_conv else 0,
                convolution_size=config.conv_size,
            )
            for layer in linear_layers(config)
        )

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        key_width, _ = _widths(config)
        cut = with_norm_epsilon(raw_config, keep, norm_epsilon)
        if keep * config.num_heads != key_width:
            expand_k = keep * config.num_heads / config.hidden_size
            if round(config.hidden_size * expand_k) != keep * config.num_heads:
                raise RequestError(
                    f"no expand_k gives key heads of {keep} at hidden size {config.hidden_size}; choose another width."
                )
            cut["expand_k"] = expand_k
        return cut

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        entry_points = (_SUM_NORM, *_RECURRENCES) if model.config.qk_norm == "sum" else _RECURRENCES
        return intercept(model, mixers, entry_points, tap)


def _widths(config: PretrainedConfig) -> tuple[int, int]:
    """All key and all value channels of a mixer, rounded as the stock class rounds."""
    return round(config.hidden_size * config.expand_k), round(config.hidden_size * config.expand_v)
