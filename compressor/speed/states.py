"""The cache of a prompt as tensors that stay where they are, which a captured graph needs.

fla's layers put a new tensor into the cache at every step: the tensors that the prompt left are kept, and what some
steps have made of them is copied back. transformers' layers write into the cache themselves; softmax layers get its
StaticCache, of a length that is fixed before.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticLayer

from compressor.architectures.cached_forward import forward_from_cache, reads_pieces
from compressor.architectures.layer_kinds import lists_softmax_layers

_SOFTMAX_STATE = "attn_state"


class FixedState(ABC):
    """A cache whose tensors keep their addresses from one `settle` to the next."""

    cache: Any

    @abstractmethod
    def settle(self) -> None:
        """After some steps: bring what they left to the addresses that the first of them read."""

    @abstractmethod
    def rewind(self) -> None:
        """Let softmax layers write behind the prompt again; recurrent states go on from where they are."""


@final
@dataclass(slots=True)
class ReplacedState(FixedState):
    """fla's cache; `held` are the values of its layers as the prompt left them."""

    cache: Any
    held: tuple[dict[str, Any], ...]

    def settle(self) -> None:
        for state, held in zip(self.cache, self.held, strict=True):
            for name, value in held.items():
                _copy(value, state[name])
                state[name] = value

    def rewind(self) -> None:
        """It has no softmax layers."""


@final
@dataclass(slots=True)
class WrittenState(FixedState):
    """transformers' cache, whose layers write in place; softmax layers count their tokens in a tensor."""

    cache: Any
    prompt_length: int

    def settle(self) -> None:
        """Nothing is replaced."""

    def rewind(self) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, StaticLayer):
                layer.cumulative_length.fill_(self.prompt_length)


def read_prompt(model: PreTrainedModel, cache: Any, prompt: Tensor, piece: int | None) -> Any:
    """The cache behind `prompt` int64 [B, T]; the classes that can take it in pieces of `piece` tokens."""
    size = piece if piece is not None and reads_pieces(model) else prompt.shape[1]
    for part in prompt.split(size, dim=1):
        _, cache = next_logits(model, cache, part)
    return cache


def next_logits(model: PreTrainedModel, cache: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    """Logits [B, V] behind `tokens` int64 [B, T], and the cache."""
    inputs: dict[str, Any] = {"input_ids": tokens}
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        inputs["logits_to_keep"] = 1
    output, cache = forward_from_cache(model, cache, **inputs)
    return output.logits[:, -1], cache


def fixed_state(model: PreTrainedModel, prompt: Tensor, room: int, piece: int | None) -> FixedState:
    """The state behind `prompt` int64 [B, T], with `room` further tokens for softmax layers.

    Raises:
        ValueError: it grows with every token, as in fla's softmax layers.
    """
    cache: Any = None
    if lists_softmax_layers(model.config):
        cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + room)
    cache = read_prompt(model, cache, prompt, piece)
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in _layers(cache)):
        return WrittenState(cache, prompt.shape[1])
    held = tuple(dict(state) for state in cache)
    if any(state.get(_SOFTMAX_STATE) is not None for state in held):
        raise ValueError("the cache of fla's softmax layers grows with every token, which no graph can replay")
    return ReplacedState(cache, held)


def state_bytes(cache: Any) -> int:
    """Bytes of every tensor in the cache, of all sequences."""
    tensors = {id(tensor): tensor for tensor in _tensors(cache)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _layers(cache: Any) -> list[Any]:
    layers: list[Any] = cache.layers
    return layers


def _tensors(cache: Any) -> Iterator[Tensor]:
    for layer in _layers(cache):
        yield from _tensors_in(list(vars(layer).values()))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _copy(held: Any, fresh: Any) -> None:
    """`fresh` into the tensors of `held`, which is a tensor, some of them, or nothing."""
    if isinstance(held, torch.Tensor):
        if held is not fresh:
            held.copy_(fresh)
    elif isinstance(held, list | tuple):
        for each, new in zip(held, fresh, strict=True):
            _copy(each, new)
