"""What transformers' hybrids of Mamba-2 and softmax attention share: paths, rows of `in_proj` and `conv1d`, scans.

Their modelling modules call the same globals as transformers' Mamba-2 does. Softmax layers, MLPs and experts stand
outside the mixers, so they are copied as they are.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Architecture, ChannelMap, Mixer, RecoveryTargets, RecurrenceTap
from compressor.architectures.config_fields import FieldRule, Interval, chunk
from compressor.architectures.mamba2_layout import ADAPTED_PROJECTIONS, scan_channel_maps
from compressor.architectures.scan_interception import intercept_transformers_scans
from compressor.architectures.trainable import recovery_targets, tensor_name
from compressor.errors import RequestError
from compressor.reference.mamba2_backend import enable_for_mamba2

_STACK = "model.layers."


@dataclass(frozen=True, slots=True)
class Scan:
    """The numbers of a model's Mamba-2 layers, by whatever names its config has them.

    `inner_width` is the number of channels of the gate and of x, which the stock classes take from fields of its own.
    """

    num_groups: int
    num_heads: int
    head_dim: int
    state_size: int
    inner_width: int
    convolution_size: int


class Mamba2Hybrid(Architecture):
    """Nothing is normalised and nothing scaled by the width, so the norm epsilon is left as it is."""

    load_line: ClassVar[str] = ""
    needs_fla: ClassVar[bool] = False
    kernels_take_float32: ClassVar[bool] = True
    scales_by_width: ClassVar[bool] = False
    normalizes_keys: ClassVar[bool] = False
    output_projection_name: ClassVar[str] = "out_proj"
    modeling: ClassVar[str]
    """Path of the module that holds the stock classes."""
    stack_norm: ClassVar[str]
    """Class, in that module, of the norms that are not a mixer's own."""
    block_norm: ClassVar[str] = "input_layernorm"
    """Name, in the block of a mixer, of the norm in front of it."""
    mixer_paths: ClassVar[Mapping[str, str]]
    """Type of a layer, as the config lists them -> path of its mixer below the layer; other types have none."""
    published_stack: ClassVar[str] = _STACK
    """Prefix of the layers' tensors in published files, where it is not that of the stock class."""
    state_field: ClassVar[str] = "mamba_d_state"
    chunk_field: ClassVar[str] = "mamba_chunk_size"
    epsilon_field: ClassVar[str] = "rms_norm_eps"
    fixed_norm_epsilon: ClassVar[float]
    """The output norm's epsilon, where the stock class does not read it from the config."""

    @abstractmethod
    def stock_classes(self) -> tuple[type[PretrainedConfig], type[PreTrainedModel]]:
        """The family's config and its causal language model."""

    @abstractmethod
    def scan(self, config: PretrainedConfig) -> Scan: ...

    def import_stock_classes(self) -> None:
        """transformers registers its own classes."""

    def enable_cpu_backend(self) -> None:
        enable_for_mamba2(self.modeling)

    def load_config(self, folder: Path) -> PretrainedConfig:
        config: PretrainedConfig = self.stock_classes()[0].from_pretrained(folder, local_files_only=True)
        return config

    def model_class(self, raw_config: Mapping[str, Any]) -> type[PreTrainedModel]:
        return self.stock_classes()[1]

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        scan = self.scan(config)
        if scan.num_heads * scan.head_dim != scan.inner_width:
            raise RequestError(
                f"config.json gives Mamba-2 layers {scan.num_heads} heads of {scan.head_dim} channels and "
                f"{scan.inner_width} channels in all; the product must be that number."
            )
        published = any(name.startswith(self.published_stack) for name in tensor_names)
        tensor_stack = self.published_stack if published else _STACK
        return tuple(
            Mixer(
                layer=layer,
                module=f"{_STACK}{layer}.{self.mixer_paths[kind]}",
                tensors=f"{tensor_stack}{layer}.{self.mixer_paths[kind]}",
                num_k_heads=scan.num_groups,
                num_v_heads=scan.num_heads,
                head_k_dim=scan.state_size,
                head_v_dim=scan.head_dim,
                convolution_width=scan.inner_width + 2 * scan.num_groups * scan.state_size,
                convolution_size=scan.convolution_size,
            )
            for layer, kind in enumerate(config.layer_types)
            if kind in self.mixer_paths
        )

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        return scan_channel_maps(mixer)

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        return chunk(self.chunk_field), Interval("time_step_limit")

    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        for name in tensor_names:
            if name.startswith("mtp.") and name.endswith(".A_log"):
                raise RequestError(
                    f"{name} belongs to a Mamba-2 layer inside the multi-token-prediction head, which stock "
                    "transformers never runs, so it cannot be calibrated; remove the mtp.* tensors first."
                )

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        cut = dict(raw_config)
        if keep != self.scan(config).state_size:
            cut[self.state_field] = keep
        if norm_epsilon is not None and not self.norm_epsilon_in_config:
            raise RequestError(
                f"a scaled norm epsilon would write {norm_epsilon:g}, and the output norm of {self.display_name} takes "
                f"{self.fixed_norm_epsilon:g} whatever config.json says; keep the norm epsilon."
            )
        if norm_epsilon is not None:
            cut[self.epsilon_field] = norm_epsilon
        return cut

    def norm_epsilon(self, config: PretrainedConfig) -> float:
        return float(vars(config)[self.epsilon_field]) if self.norm_epsilon_in_config else self.fixed_norm_epsilon

    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        if not self.norm_epsilon_in_config:
            return {}
        norm: type[nn.Module] = vars(importlib.import_module(self.modeling))[self.stack_norm]
        return {path: module for path, module in model.named_modules() if isinstance(module, norm)}

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        return intercept_transformers_scans(model, mixers, self.modeling, tap)

    def recovery_targets(self, model: PreTrainedModel, mixers: Sequence[Mixer]) -> RecoveryTargets:
        return recovery_targets(model, mixers, ADAPTED_PROJECTIONS, (), self.block_norm)

    def tensor_name(self, parameter: str, mixers: Sequence[Mixer]) -> str:
        return tensor_name(parameter, mixers)

    def decoder(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule("model")
