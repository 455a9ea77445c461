"""Forward passes that go on from a cache, for every stock class; most call it past_key_values, Mamba-2 cache_params."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel

from compressor.errors import RequestError

_NAMES = ("cache_params", "past_key_values")


def forward_from_cache(model: PreTrainedModel, cache: Any, **inputs: Any) -> tuple[Any, Any]:
    """The model's output and the cache after it; `cache` None begins one. `inputs` are arguments of its forward.

    A class that does not know an argument drops it in silence, so its own name for the cache is looked up.

    Raises:
        RequestError: a class that takes one token at a time behind a cache is given more.
    """
    if cache is not None and not reads_pieces(model) and inputs["input_ids"].shape[1] > 1:
        raise RequestError(
            "fla's Mamba-2 reads one token at a time once it has a cache, so text cannot be read in pieces; use a "
            "model of another class."
        )
    parameters = inspect.signature(type(model).forward).parameters
    name = next(name for name in _NAMES if name in parameters)
    output = model(**inputs, **{name: cache}, use_cache=True)
    return output, output[name]


def reads_pieces(model: PreTrainedModel) -> bool:
    """Whether the class takes several tokens at once behind a cache."""
    return type(model).__module__ != "fla.models.mamba2.modeling_mamba2"
