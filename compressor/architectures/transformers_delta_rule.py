"""What transformers' gated-delta-rule families share: config fields, module paths, norms, recurrence entry points.

Their modelling modules look the same four functions up as globals: two recurrences and two convolutions.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from compressor.architectures.base import (
    Architecture,
    ChannelMap,
    Mixer,
    RecoveryTargets,
    RecurrenceTap,
    head_major_rows,
)
from compressor.architectures.interception import EntryPoint, intercept
from compressor.architectures.trainable import recovery_targets, tensor_name
from compressor.errors import RequestError
from compressor.reference.backend import enable_for_transformers

TEXT_STACK = "model.layers."
WRAPPED_STACK = "model.language_model.layers."


class TransformersDeltaRule(Architecture):
    """Families add their stock classes, the layout of their projections and what of it recovery trains."""

    load_line: ClassVar[str] = ""
    needs_fla: ClassVar[bool] = False
    kernels_take_float32: ClassVar[bool] = True
    modeling: ClassVar[str]
    """Path of the module that holds the stock classes."""
    stack_norm: ClassVar[str | None]
    """Class, in that module, of the norms that read the field of the output norm's epsilon; None where none does."""
    fixed_norm_epsilon: ClassVar[float]
    """The output norm's epsilon, where the stock class does not read it from the config."""
    value_width_follows_key_width: ClassVar[bool] = False
    """Whether the config takes a value width that is left out from the key width."""
    published_names: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Parameters below a layer's block -> what published files hold instead: a tensor of another name, or parts."""
    projection_names: ClassVar[frozenset[str]]
    per_head_names: ClassVar[frozenset[str]]

    def import_stock_classes(self) -> None:
        """transformers registers its own classes."""

    def enable_cpu_backend(self) -> None:
        enable_for_transformers(self.modeling)

    def load_config(self, folder: Path) -> PretrainedConfig:
        return AutoConfig.from_pretrained(folder, local_files_only=True)

    def mixers(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> tuple[Mixer, ...]:
        text = config.get_text_config(decoder=True)
        wrapped_names = any(name.startswith(WRAPPED_STACK) for name in tensor_names)
        module_stack = TEXT_STACK if text is config else WRAPPED_STACK
        tensor_stack = WRAPPED_STACK if wrapped_names else TEXT_STACK
        names = frozenset(tensor_names)
        key_width = text.linear_num_key_heads * text.linear_key_head_dim
        value_width = text.linear_num_value_heads * text.linear_value_head_dim
        return tuple(
            Mixer(
                layer=layer,
                module=f"{module_stack}{layer}.linear_attn",
                tensors=f"{tensor_stack}{layer}.linear_attn",
                num_k_heads=text.linear_num_key_heads,
                num_v_heads=text.linear_num_value_heads,
                head_k_dim=text.linear_key_head_dim,
                head_v_dim=text.linear_value_head_dim,
                convolution_width=2 * key_width + value_width,
                convolution_size=text.linear_conv_kernel_dim,
                renamed=self._renamed(f"{tensor_stack}{layer}.", names),
            )
            for layer, kind in enumerate(text.layer_types)
            if kind == "linear_attention"
        )

    def _renamed(self, block: str, names: Collection[str]) -> tuple[tuple[str, str | None], ...]:
        return tuple(
            (parameter, published[0] if len(published) == 1 else None)
            for parameter, published in self.published_names.items()
            if any(block + name in names for name in published)
        )

    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        for name in tensor_names:
            if name.startswith("mtp.") and ".linear_attn." in name:
                raise RequestError(
                    f"{name} is a linear-attention layer inside the multi-token-prediction head, which stock "
                    "transformers never runs, so it cannot be calibrated; remove the mtp.* tensors first."
                )

    def cut_config(
        self, raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
    ) -> dict[str, Any]:
        if norm_epsilon is not None and not self.norm_epsilon_in_config:
            raise RequestError(
                f"a scaled norm epsilon would write {norm_epsilon:g}, and the output norm of {self.display_name} takes "
                f"{self.fixed_norm_epsilon:g} whatever config.json says; keep the norm epsilon."
            )
        cut = copy.deepcopy(dict(raw_config))
        text_config = config.get_text_config(decoder=True)
        if text_config is not config and cut.get("text_config") is None:
            cut["text_config"] = {}  # of defaults alone
        text = cut if text_config is config else cut["text_config"]
        if keep != text_config.linear_key_head_dim:
            text["linear_key_head_dim"] = keep
            if self.value_width_follows_key_width:
                text["linear_value_head_dim"] = text_config.linear_value_head_dim
        if norm_epsilon is not None:
            text["rms_norm_eps"] = norm_epsilon
        return cut

    def norm_epsilon(self, config: PretrainedConfig) -> float:
        if not self.norm_epsilon_in_config:
            return self.fixed_norm_epsilon
        return float(config.get_text_config(decoder=True).rms_norm_eps)

    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        if self.stack_norm is None:
            return {}
        norm: type[nn.Module] = vars(importlib.import_module(self.modeling))[self.stack_norm]
        return {path: module for path, module in model.named_modules() if isinstance(module, norm)}

    def tapped(
        self, model: PreTrainedModel, mixers: Sequence[Mixer], tap: RecurrenceTap
    ) -> AbstractContextManager[None]:
        names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
        entry_points = [EntryPoint(self.modeling, name, query="query", key="key") for name in names]
        return intercept(model, mixers, entry_points, tap)

    def recovery_targets(self, model: PreTrainedModel, mixers: Sequence[Mixer]) -> RecoveryTargets:
        return recovery_targets(model, mixers, self.projection_names, self.per_head_names, "input_layernorm")

    def tensor_name(self, parameter: str, mixers: Sequence[Mixer]) -> str:
        return tensor_name(parameter, mixers)

    def decoder(self, model: PreTrainedModel) -> nn.Module:
        wrapped = any(path == "model.language_model" for path, _ in model.named_modules())
        return model.get_submodule("model.language_model" if wrapped else "model")


def flat_maps(mixer: Mixer, module: str, is_projection: bool) -> tuple[ChannelMap, ...]:
    """Of a module whose rows are all query heads, then all key heads, then all value heads."""
    key_width = mixer.num_k_heads * mixer.head_k_dim
    query_rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim)
    key_rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim, offset=key_width)
    maps: list[ChannelMap] = []
    for parameter in ("weight", "bias"):
        name = f"{mixer.tensors}.{module}.{parameter}"
        scored = is_projection and parameter == "weight"
        maps += [ChannelMap(name, "query", query_rows, scored), ChannelMap(name, "key", key_rows, scored)]
    return tuple(maps)
