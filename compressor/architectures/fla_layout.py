"""What fla's delta-rule families share: separate projections, module paths, norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from compressor.architectures.base import ChannelMap, Mixer, head_major_rows
from compressor.errors import RequestError


def load_fla_config(folder: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def attention_layers(config: PretrainedConfig) -> set[int]:
    """Layers that `attn` of a fla hybrid gives to softmax attention."""
    specification = config.attn
    if specification is None:
        return set()
    specifications = [specification] if isinstance(specification, Mapping) else specification
    return {layer for one in specifications for layer in one["layers"]}


def mixer_path(layer: int) -> str:
    return f"model.layers.{layer}.attn"


def separate_projection_maps(mixer: Mixer) -> tuple[ChannelMap, ...]:
    """q_proj, k_proj and their short convolutions: head-major rows."""
    rows = head_major_rows(mixer.num_k_heads, mixer.head_k_dim)
    maps = []
    for letter, stream in (("q", "query"), ("k", "key")):
        for module, is_projection in ((f"{letter}_proj", True), (f"{letter}_conv1d", False)):
            for parameter in ("weight", "bias"):
                name = f"{mixer.tensors}.{module}.{parameter}"
                maps.append(ChannelMap(name, stream, rows, is_projection and parameter == "weight"))  # type: ignore[arg-type]
    return tuple(maps)


def norms_sharing_epsilon(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Block and final norms: all norms of the stack but the mixers' own."""
    names = {"attn_norm", "mlp_norm", "attn_res_norm", "mlp_res_norm", "res_norm", "norm"}
    return {path: module for path, module in model.named_modules() if path.rsplit(".", 1)[-1] in names}


def refuse_width_over_256(keep: int) -> None:
    if keep > 256:
        raise RequestError(f"a key width of {keep} is over 256, the most that fla's kernels take; keep 256 or fewer.")


def with_norm_epsilon(raw_config: Mapping[str, Any], norm_epsilon: float | None) -> dict[str, Any]:
    cut = dict(raw_config)
    if norm_epsilon is not None:
        cut["norm_eps"] = norm_epsilon
    return cut


def layers_of(config: PretrainedConfig) -> Sequence[int]:
    softmax = attention_layers(config)
    return [layer for layer in range(config.num_hidden_layers) if layer not in softmax]
