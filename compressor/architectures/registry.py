"""The families that can be cut, by the `model_type` of their config.json (see `family` for the one exception)."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compressor.architectures.family import FLA_MAMBA2, family_of
from compressor.errors import RequestError

if TYPE_CHECKING:
    from compressor.architectures.base import Architecture

_FAMILIES: Mapping[str, tuple[str, str]] = {
    "bamba": ("compressor.architectures.mamba2_hybrids", "Bamba"),
    "delta_net": ("compressor.architectures.delta_net", "DeltaNet"),
    "falcon_h1": ("compressor.architectures.mamba2_hybrids", "FalconH1"),
    "gated_deltanet": ("compressor.architectures.gated_deltanet", "GatedDeltaNet"),
    "gated_deltaproduct": ("compressor.architectures.gated_deltaproduct", "GatedDeltaProduct"),
    "granitemoehybrid": ("compressor.architectures.mamba2_hybrids", "GraniteMoeHybrid"),
    "kda": ("compressor.architectures.kda", "KimiDeltaAttention"),
    "mamba2": ("compressor.architectures.mamba2", "Mamba2"),
    "nemotron_h": ("compressor.architectures.mamba2_hybrids", "NemotronH"),
    "olmo_hybrid": ("compressor.architectures.olmo_hybrid", "OlmoHybrid"),
    "qwen3_5": ("compressor.architectures.qwen3_5", "Qwen35"),
    "qwen3_5_moe": ("compressor.architectures.qwen3_5", "Qwen35Moe"),
    "qwen3_5_moe_text": ("compressor.architectures.qwen3_5", "Qwen35Moe"),
    "qwen3_5_text": ("compressor.architectures.qwen3_5", "Qwen35"),
    "qwen3_next": ("compressor.architectures.qwen3_next", "Qwen3Next"),
    "zamba2": ("compressor.architectures.mamba2_hybrids", "Zamba2"),
}

# Families whose config.json has the `model_type` of another, by the names that `family_of` gives them.
_UNDER_A_SHARED_NAME: Mapping[str, tuple[str, str]] = {FLA_MAMBA2: ("compressor.architectures.mamba2", "FlaMamba2")}

# Linear-attention families that are met and not cut, each with the reason.
_REFUSED: Mapping[str, str] = {
    "gla": (
        "its state decays by another factor in each key channel, so the gate that gives them, gk_proj, has to be cut "
        "with q_proj and k_proj; expand_k could say the width, but no adapter does it"
    ),
    "kimi_linear": (
        "linear_head_dim is the width of its keys and of its values at once, so no config.json says that the keys "
        "alone are narrower"
    ),
    "retnet": (
        "it turns queries and keys by a rotary embedding whose angles follow from the width of the head, so the "
        "channels that are kept would be turned by other angles, and no field of config.json holds the angles"
    ),
    "rwkv7": (
        "its keys are as wide as hidden_size and head_dim only divides them into heads, so no config.json says that a "
        "head has fewer key channels"
    ),
}


def known_model_types() -> tuple[str, ...]:
    return tuple(sorted(_FAMILIES))


def architecture_of(raw_config: Mapping[str, Any]) -> Architecture:
    """The adapter for a parsed config.json.

    Raises:
        RequestError: no adapter knows its `model_type`, or two libraries claim it.
    """
    family = family_of(raw_config)
    if family != raw_config["model_type"]:
        return _adapter(*_UNDER_A_SHARED_NAME[family])
    return find_architecture(family)


def find_architecture(model_type: str) -> Architecture:
    """The adapter for a `model_type`.

    Raises:
        RequestError: no adapter knows it; the message says why where that is known, or else lists the known ones and
            the nearest name.
    """
    if model_type in _REFUSED:
        raise RequestError(
            f"model_type {model_type!r} cannot be cut: {_REFUSED[model_type]}; use a model of another family "
            f"(known: {', '.join(known_model_types())})."
        )
    if model_type not in _FAMILIES:
        nearest = difflib.get_close_matches(model_type.partition(" ")[0], _FAMILIES, n=1, cutoff=0.7)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise RequestError(
            f"model_type {model_type!r} is not a family that can be cut (known: {', '.join(known_model_types())}){hint}"
        )
    return _adapter(*_FAMILIES[model_type])


def _adapter(module: str, name: str) -> Architecture:
    architecture: Architecture = vars(importlib.import_module(module))[name]()
    return architecture
