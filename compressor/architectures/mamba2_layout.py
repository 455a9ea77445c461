"""What transformers' and fla's Mamba-2 share: module paths, what recovery trains, the rows of `in_proj` and `conv1d`.

B is the key and C the query, one of each a group, and `state_size` their width. The rows of `in_proj` are the gate,
x, B, C and one step size a head; those of `conv1d` are x, B, C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Architecture, ChannelMap, Mixer, RecoveryTargets, head_major_rows
from compressor.architectures.config_fields import FieldRule, Interval, chunk
from compressor.architectures.trainable import recovery_targets, tensor_name

_STACK = "backbone.layers."
ADAPTED_PROJECTIONS = frozenset({"in_proj"})
"""Without out_proj: in training mamba_ssm's fused kernel reads its weight itself, so an adapter would be passed by."""


class Mamba2Layout(Architecture):
    """Nothing is normalised and nothing scaled by the width, so the norm epsilon is left as it is."""

    kernels_take_float32: ClassVar[bool] = True
    scales_by_width: ClassVar[bool] = False
    normalizes_keys: ClassVar[bool] = False
    output_projection_name: ClassVar[str] = "out_proj"
    epsilon_field: ClassVar[str]
    limits_field: ClassVar[str]
    """Of the least and the largest step size."""

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        return tuple(
            Mixer(
                layer=layer,
                module=f"{_STACK}{layer}.mixer",
                tensors=f"{_STACK}{layer}.mixer",
                num_k_heads=config.n_groups,
                num_v_heads=config.num_heads,
                head_k_dim=config.state_size,
                head_v_dim=config.head_dim,
                convolution_width=config.num_heads * config.head_dim + 2 * config.n_groups * config.state_size,
                convolution_size=config.conv_kernel,
            )
            for layer in range(config.num_hidden_layers)
        )

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        return scan_channel_maps(mixer)

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        return chunk("chunk_size"), Interval(self.limits_field)

    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        """Every variant that the stock classes can build is supported."""

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        cut = dict(raw_config)
        if keep != config.state_size:
            cut["state_size"] = keep
        if norm_epsilon is not None:
            cut[self.epsilon_field] = norm_epsilon
        return cut

    def norm_epsilon(self, config: PretrainedConfig) -> float:
        return float(vars(config)[self.epsilon_field])

    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        """Block norms and the final one."""
        return {
            path: module
            for path, module in model.named_modules()
            if path.endswith(".norm_f") or (path.endswith(".norm") and not path.endswith(".mixer.norm"))
        }

    def recovery_targets(self, model: PreTrainedModel, mixers: Sequence[Mixer]) -> RecoveryTargets:
        return recovery_targets(model, mixers, ADAPTED_PROJECTIONS, (), "norm")

    def tensor_name(self, parameter: str, mixers: Sequence[Mixer]) -> str:
        return tensor_name(parameter, mixers)

    def decoder(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule("backbone")


def scan_channel_maps(mixer: Mixer) -> tuple[ChannelMap, ...]:
    """Of the rows described above, for every family that lays a Mamba-2 mixer out so; its hybrids do."""
    values = mixer.num_v_heads * mixer.head_v_dim
    keys = mixer.num_k_heads * mixer.head_k_dim
    maps = []
    for module, first_key, is_projection in (("in_proj", 2 * values, True), ("conv1d", values, False)):
        key_rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim, offset=first_key)
        query_rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim, offset=first_key + keys)
        for parameter in ("weight", "bias"):
            name = f"{mixer.tensors}.{module}.{parameter}"
            scored = is_projection and parameter == "weight"
            maps.append(ChannelMap(name, "query", query_rows, scored))
            maps.append(ChannelMap(name, "key", key_rows, scored))
    return tuple(maps)
