"""Gated DeltaNet as flash-linear-attention lays it out (Yang et al. 2024, arXiv 2412.06464)."""

from __future__ import annotations

import math
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

_ENTRY_POINTS = (
    EntryPoint("fla.layers.gated_deltanet", "chunk_gated_delta_rule"),
    EntryPoint("fla.layers.gated_deltanet", "fused_recurrent_gated_delta_rule"),
)


@final
class GatedDeltaNet(Architecture):
    model_types: ClassVar[tuple[str, ...]] = ("gated_deltanet",)
    display_name: ClassVar[str] = "Gated DeltaNet (fla)"
    load_line: ClassVar[str] = "import fla"
    needs_fla: ClassVar[bool] = True
    kernels_take_float32: ClassVar[bool] = True

    def import_stock_classes(self) -> None:
        import_fla()

    def enable_cpu_backend(self) -> None:
        enable_for_fla()

    def load_config(self, folder: Path) -> PretrainedConfig:
        self.import_stock_classes()
        return fla_layout.load_fla_config(folder)

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
                module=fla_layout.mixer_path(layer),
                tensors=fla_layout.mixer_path(layer),
                num_k_heads=config.num_heads,
                num_v_heads=num_v_heads,
                head_k_dim=config.head_dim,
                head_v_dim=head_v_dim,
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
        head_v_dim = int(config.head_dim * config.expand_v)
        cut = fla_layout.with_norm_epsilon(raw_config, norm_epsilon)
        if keep != config.head_dim:
            cut["head_dim"] = keep
            cut["expand_v"] = expansion_for(keep, head_v_dim)
        return cut

    def norm_epsilon(self, config: PretrainedConfig) -> float:
        return float(config.norm_eps)

    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        return fla_layout.norms_sharing_epsilon(model)

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept(model, mixers, _ENTRY_POINTS, tap)

    def decoder(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule("model")


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
