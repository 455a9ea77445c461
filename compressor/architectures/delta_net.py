"""DeltaNet as flash-linear-attention lays it out (Yang et al. 2024, arXiv 2406.06484)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, final

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures import fla_layout
from compressor.architectures.base import Architecture, ChannelMap, Mixer, RecurrenceTap
from compressor.architectures.interception import EntryPoint, intercept
from compressor.errors import RequestError
from compressor.reference.backend import enable_for_fla, import_fla

_RECURRENCES = (
    EntryPoint("fla.layers.delta_net", "chunk_delta_rule"),
    EntryPoint("fla.layers.delta_net", "fused_recurrent_delta_rule"),
)
_SUM_NORM = EntryPoint("fla.layers.delta_net", "sum_norm", kind="normalization")


@final
class DeltaNet(Architecture):
    model_types: ClassVar[tuple[str, ...]] = ("delta_net",)
    display_name: ClassVar[str] = "DeltaNet (fla)"
    load_line: ClassVar[str] = "import fla"
    needs_fla: ClassVar[bool] = True
    kernels_take_float32: ClassVar[bool] = False

    def import_stock_classes(self) -> None:
        import_fla()

    def enable_cpu_backend(self) -> None:
        enable_for_fla()

    def load_config(self, folder: Path) -> PretrainedConfig:
        self.import_stock_classes()
        return fla_layout.load_fla_config(folder)

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        self.import_stock_classes()
        from fla.models import DeltaNetForCausalLM

        return DeltaNetForCausalLM

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        key_width, value_width = _widths(config)
        return tuple(
            Mixer(
                layer=layer,
                module=fla_layout.mixer_path(layer),
                tensors=fla_layout.mixer_path(layer),
                num_k_heads=config.num_heads,
                num_v_heads=config.num_heads,
                head_k_dim=key_width // config.num_heads,
                head_v_dim=value_width // config.num_heads,
                convolution_width=2 * key_width + value_width if config.use_short_conv else 0,
                convolution_size=config.conv_size,
            )
            for layer in fla_layout.layers_of(config)
        )

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        return fla_layout.separate_projection_maps(mixer)

    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        """Every variant that the stock class can build is supported."""

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        fla_layout.refuse_width_over_256(keep)
        key_width, _ = _widths(config)
        cut = fla_layout.with_norm_epsilon(raw_config, norm_epsilon)
        if keep * config.num_heads != key_width:
            expand_k = keep * config.num_heads / config.hidden_size
            if round(config.hidden_size * expand_k) != keep * config.num_heads:
                raise RequestError(
                    f"no expand_k gives key heads of {keep} at hidden size {config.hidden_size}; "
                    "choose another --target-dim."
                )
            cut["expand_k"] = expand_k
        return cut

    def norm_epsilon(self, config: PretrainedConfig) -> float:
        return float(config.norm_eps)

    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        return fla_layout.norms_sharing_epsilon(model)

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        entry_points = (_SUM_NORM, *_RECURRENCES) if model.config.qk_norm == "sum" else _RECURRENCES
        return intercept(model, mixers, entry_points, tap)

    def decoder(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule("model")


def _widths(config: PretrainedConfig) -> tuple[int, int]:
    """All key and all value channels of a mixer, rounded as the stock class rounds."""
    return round(config.hidden_size * config.expand_k), round(config.hidden_size * config.expand_v)
