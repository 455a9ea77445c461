"""The families that can be cut, by the `model_type` of their config.json."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from compressor.errors import RequestError

if TYPE_CHECKING:
    from compressor.architectures.base import Architecture

_FAMILIES: Mapping[str, tuple[str, str]] = {
    "delta_net": ("compressor.architectures.delta_net", "DeltaNet"),
    "gated_deltanet": ("compressor.architectures.gated_deltanet", "GatedDeltaNet"),
    "qwen3_5": ("compressor.architectures.qwen3_5", "Qwen35"),
    "qwen3_5_text": ("compressor.architectures.qwen3_5", "Qwen35"),
}


def known_model_types() -> tuple[str, ...]:
    return tuple(sorted(_FAMILIES))


def find_architecture(model_type: str) -> Architecture:
    """The adapter for a `model_type`.

    Raises:
        RequestError: no adapter knows it; the message lists the known ones and the nearest name.
    """
    if model_type not in _FAMILIES:
        nearest = difflib.get_close_matches(model_type, _FAMILIES, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else "."
        raise RequestError(
            f"model_type {model_type!r} is not a family that can be cut (known: {', '.join(known_model_types())}){hint}"
        )
    module, name = _FAMILIES[model_type]
    architecture: Architecture = vars(importlib.import_module(module))[name]()
    return architecture
