"""What fla's delta-rule families share: separate projections, module paths, norms, one epsilon field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from compressor.architectures.base import Architecture, ChannelMap, Mixer, RecoveryTargets, Stream, head_major_rows
from compressor.architectures.config_fields import Count, FieldRule
from compressor.architectures.trainable import recovery_targets, tensor_name
from compressor.errors import RequestError
from compressor.reference.backend import enable_for_fla, import_fla

_MAX_HEAD_K_DIM = 256
_MAX_POSITIONS = 100_000_000
_NORM_NAMES = frozenset({"attn_norm", "mlp_norm", "attn_res_norm", "mlp_res_norm", "res_norm", "norm"})
_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "o_proj"})
_PER_HEAD = frozenset({"a_proj", "b_proj"})
_STREAMS: tuple[tuple[str, Stream], ...] = (("q", "query"), ("k", "key"))


class FlaArchitecture(Architecture):
    """The part that does not depend on the recurrence; families add widths, config fields and entry points."""

    load_line: ClassVar[str] = "import fla"
    needs_fla: ClassVar[bool] = True
    output_projection_name: ClassVar[str] = "o_proj"

    def import_stock_classes(self) -> None:
        import_fla()

    def enable_cpu_backend(self) -> None:
        enable_for_fla()

    def load_config(self, folder: Path) -> PretrainedConfig:
        self.import_stock_classes()
        return AutoConfig.from_pretrained(folder, local_files_only=True)

    def channel_maps(self, mixer: Mixer) -> tuple[ChannelMap, ...]:
        """q_proj, k_proj and their short convolutions: head-major rows, the first keys of a token before its second."""
        copies: dict[Stream, int] = {"query": 1, "key": mixer.keys_per_token}
        rows = {
            stream: head_major_rows(mixer.num_k_heads, mixer.head_k_dim, copies=count)
            for stream, count in copies.items()
        }
        return tuple(
            ChannelMap(f"{mixer.tensors}.{letter}_{module}.{parameter}", stream, rows[stream], is_projection)
            for letter, stream in _STREAMS
            for module, parameter, is_projection in (
                ("proj", "weight", True),
                ("proj", "bias", False),
                ("conv1d", "weight", False),
                ("conv1d", "bias", False),
            )
        )

    def field_rules(self, config: PretrainedConfig) -> tuple[FieldRule, ...]:
        """Softmax layers of a hybrid make rotary angles for all positions."""
        return (Count("max_position_embeddings", most=_MAX_POSITIONS, optional=True),)

    def refuse_unsupported(self, config: PretrainedConfig, tensor_names: Sequence[str]) -> None:
        """Every variant that the stock classes can build is supported."""

    def norm_epsilon(self, config: PretrainedConfig) -> float:
        return float(config.norm_eps)

    def norms_sharing_epsilon(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        """Block and final norms: all norms of the stack but the mixers' own."""
        return {path: module for path, module in model.named_modules() if path.rsplit(".", 1)[-1] in _NORM_NAMES}

    def residual_block(self, config: PretrainedConfig, mixer: Mixer) -> str | None:
        """None with attention over residuals, where a block may begin a new sum."""
        return None if config.attnres_block_size is not None else mixer.module.rpartition(".")[0]

    def recovery_targets(self, model: PreTrainedModel, mixers: Sequence[Mixer]) -> RecoveryTargets:
        return recovery_targets(model, mixers, _PROJECTIONS, _PER_HEAD, "attn_norm")

    def tensor_name(self, parameter: str, mixers: Sequence[Mixer]) -> str:
        return tensor_name(parameter, mixers)

    def decoder(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule("model")


def linear_layers(config: PretrainedConfig) -> list[int]:
    """Layers that `attn` of a hybrid does not give to softmax attention."""
    specification = config.attn or []
    specifications = [specification] if isinstance(specification, Mapping) else specification
    softmax = {layer for one in specifications for layer in one["layers"]}
    return [layer for layer in range(config.num_hidden_layers) if layer not in softmax]


def mixer_path(layer: int) -> str:
    return f"model.layers.{layer}.attn"


def head_dim_mixers(config: PretrainedConfig) -> tuple[Mixer, ...]:
    """The mixers of a config whose `head_dim` is the key width, with values `expand_v` times as wide."""
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


def with_norm_epsilon(raw_config: Mapping[str, Any], keep: int, norm_epsilon: float | None) -> dict[str, Any]:
    """A copy of the config to write a kept width into.

    Raises:
        RequestError: fla's kernels do not take the width.
    """
    if keep > _MAX_HEAD_K_DIM:
        raise RequestError(
            f"a key width of {keep} is over {_MAX_HEAD_K_DIM}, the most that fla's kernels take; "
            f"keep {_MAX_HEAD_K_DIM} or fewer."
        )
    cut = dict(raw_config)
    if norm_epsilon is not None:
        cut["norm_eps"] = norm_epsilon
    return cut


def with_head_dim(
    raw_config: Mapping[str, Any], config: PretrainedConfig, keep: int, norm_epsilon: float | None
) -> dict[str, Any]:
    """The cut config of a family whose value width is `int(head_dim * expand_v)`.

    Raises:
        RequestError: the fields cannot express the width, or fla's kernels do not take it.
    """
    cut = with_norm_epsilon(raw_config, keep, norm_epsilon)
    if keep != config.head_dim:
        cut["head_dim"] = keep
        cut["expand_v"] = expansion_for(keep, int(config.head_dim * config.expand_v))
    return cut


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
        f"no expand_v gives value heads of {head_v_dim} beside key heads of {head_k_dim}; choose another width."
    )
