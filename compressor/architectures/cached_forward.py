"""Forward passes that go on from a cache, for every stock class; most call it past_key_values, Mamba-2 cache_params."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_NAMES = ("cache_params", "past_key_values")
_COUNTS_FROM_ZERO = "transformers.models.bamba.modeling_bamba"
"""Its decoder takes the first token of every pass for the first of the text, also behind a cache (5.17 to 5.23)."""


def forward_from_cache(model: PreTrainedModel, cache: Any, **inputs: Any) -> tuple[Any, Any]:
    """The model's output and the cache after it; `cache` None begins one. `inputs` are arguments of its forward.

    A class that does not know an argument drops it in silence, so its own name for the cache is looked up. One that
    takes a single token behind a cache gets the tokens of `inputs`, tensors [B, T], one after the other.
    """
    parameters = inspect.signature(type(model).forward).parameters
    name = next(name for name in _NAMES if name in parameters)
    if cache is not None and not reads_pieces(model) and inputs["input_ids"].shape[1] > 1:
        return _one_by_one(model, cache, name, inputs)
    if cache is not None and type(model).__module__ == _COUNTS_FROM_ZERO and "position_ids" not in inputs:
        read, ids = cache.get_seq_length(), inputs["input_ids"]
        inputs["position_ids"] = (read + torch.arange(ids.shape[1], device=ids.device)).expand(len(ids), -1)
    output = model(**inputs, **{name: cache}, use_cache=True)
    return output, output[name]


def _one_by_one(model: PreTrainedModel, cache: Any, name: str, inputs: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """The last output, with the logits of all tokens."""
    logits = []
    for column in range(inputs["input_ids"].shape[1]):
        part = {key: value[:, column, None] for key, value in inputs.items()}
        output = model(**part, **{name: cache}, use_cache=True)
        cache = output[name]
        logits.append(output.logits)
    output.logits = torch.cat(logits, dim=1)
    return output, cache


def reads_pieces(model: PreTrainedModel) -> bool:
    """Whether the class takes several tokens at once behind a cache."""
    return type(model).__module__ != "fla.models.mamba2.modeling_mamba2"
