"""The largest batch that decodes on a device, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, StaticCache

from compressor.architectures.layer_kinds import lists_softmax_layers
from compressor.out_of_memory import is_out_of_memory
from compressor.speed.decoding import draw_tokens
from compressor.speed.failures import MEASURING_ERRORS
from compressor.speed.memory import release
from compressor.speed.states import next_logits, read_prompt, state_bytes
from compressor.speed.timing import Schedule, Work, time_interleaved

_STEPS = 10
"""Timed at the largest batch, after two that are not."""
_RESOLUTION = 1 / 64
"""Of the found batch, how far it may be from the largest one."""
_MOST_TRIES = 24


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """`batch` sequences decode and `failed` do not; `tokens_per_second` of `batch`, without a graph."""

    batch: int
    failed: int | None
    state_bytes_per_sequence: int
    tokens_per_second: float | None


def find_largest_batch(model: PreTrainedModel, length: int, device: torch.device) -> LargestBatch:
    """Try growing batches on a CUDA device; softmax layers, where transformers has them, hold `length` tokens.

    The first try is what the free memory holds of states alone.
    """
    per_sequence = _try_batch(model, 1, length, device)
    free, _ = torch.cuda.mem_get_info(device)
    guess = max(1, free // per_sequence)
    batch, failed = bisect_batch(lambda size: _fits(model, size, length, device), guess)
    return LargestBatch(batch, failed, per_sequence, _tokens_per_second(model, batch, length, device))


def bisect_batch(fits: Callable[[int], bool], guess: int) -> tuple[int, int | None]:
    """The largest batch known to fit and the smallest known not to; one sequence fits. None: no limit was met."""
    low, high = 1, None
    size = max(2, guess)
    for _ in range(_MOST_TRIES):
        if fits(size):
            low = size
        else:
            high = size
        if high is None:
            size = low * 2
        elif high - low <= max(1, int(low * _RESOLUTION)):
            break
        else:
            size = (low + high) // 2
    return low, high


def _fits(model: PreTrainedModel, batch: int, length: int, device: torch.device) -> bool:
    """Raises what is not for want of memory."""
    try:
        _try_batch(model, batch, length, device)
    except MEASURING_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        fitted = False
    else:
        fitted = True
    release(device)
    return fitted


@torch.no_grad()
def _try_batch(model: PreTrainedModel, batch: int, length: int, device: torch.device) -> int:
    """Decode two tokens; bytes of the state of one sequence."""
    work, cache_bytes = _decode(model, batch, length, device)
    for _ in range(2):
        work.call()
    torch.cuda.synchronize(device)
    return cache_bytes // batch


def _tokens_per_second(model: PreTrainedModel, batch: int, length: int, device: torch.device) -> float | None:
    try:
        work, _ = _decode(model, batch, length, device)
        timing = time_interleaved({"": work}, Schedule(_STEPS, 2, 1), device)[""]
    except MEASURING_ERRORS:
        return None
    return None if isinstance(timing, str) else batch / timing.seconds


@torch.no_grad()
def _decode(model: PreTrainedModel, batch: int, length: int, device: torch.device) -> tuple[Work, int]:
    """A step behind one token, which leaves a recurrent state as large as any prompt does; bytes of the cache."""
    prompt = draw_tokens(model, (batch, 1), 0, device)
    cache = None
    if lists_softmax_layers(model.config):
        cache = StaticCache(config=model.config, max_cache_len=max(length, _STEPS + 4))
    cache = read_prompt(model, cache, prompt, None)

    @torch.no_grad()
    def call() -> None:
        logits, _ = next_logits(model, cache, prompt)
        logits.argmax(-1)

    return Work(call), state_bytes(cache)
