"""Shrink the memory of linear-attention language models to stock checkpoints.

from compressor import Recipe, compress

report = compress(Recipe.from_settings({
    "model": "path/or/hub-id", "output_dir": "smaller",
    "selection": {"ratio": 0.5, "method": "drrqr"},
}))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.errors import CompressorError, RequestError, RunError
    from compressor.inspection import inspect_model
    from compressor.pipeline import compress
    from compressor.planning import RunOptions
    from compressor.recipe import Recipe
    from compressor.report import Report
    from compressor.verification.request import verify

_HOMES = {
    "CompressorError": "compressor.errors",
    "Recipe": "compressor.recipe",
    "Report": "compressor.report",
    "RequestError": "compressor.errors",
    "RunError": "compressor.errors",
    "RunOptions": "compressor.planning",
    "compress": "compressor.pipeline",
    "inspect_model": "compressor.inspection",
    "verify": "compressor.verification.request",
}

__all__ = [
    "CompressorError",
    "Recipe",
    "Report",
    "RequestError",
    "RunError",
    "RunOptions",
    "compress",
    "inspect_model",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `compress --help` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'compressor' has no attribute {name!r}")
    return vars(importlib.import_module(_HOMES[name]))[name]
