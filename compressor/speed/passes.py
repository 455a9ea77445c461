"""Whole passes over many tokens: a model that reads a prompt, and one mixer alone, forward or forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.architectures.base import Mixer
from compressor.out_of_memory import is_out_of_memory
from compressor.speed.decoding import draw_tokens
from compressor.speed.failures import MEASURING_ERRORS, reason
from compressor.speed.states import next_logits
from compressor.speed.timing import Work

Passes = Literal["forward", "forward and backward"]


@dataclass(frozen=True, slots=True)
class MixerWork:
    """`note` says why the pass is not a replayed graph although one was asked for."""

    work: Work
    graph: bool
    note: str


def prefill_work(model: PreTrainedModel, batch: int, length: int, seed: int, device: torch.device) -> Work:
    """Read `length` tokens of `batch` sequences into a new cache, with the logits of the last token alone."""
    prompt = draw_tokens(model, (batch, length), seed, device)

    @torch.no_grad()
    def call() -> None:
        next_logits(model, None, prompt)

    return Work(call)


@torch.no_grad()
def has_finite_logits(model: PreTrainedModel, length: int, device: torch.device) -> bool | None:
    """Whether the logits behind a prompt of `length` tokens are all numbers; None where the pass itself fails."""
    try:
        logits, _ = next_logits(model, None, draw_tokens(model, (1, length), 0, device))
    except MEASURING_ERRORS:
        return None
    return bool(logits.isfinite().all())


def mixer_input(model: PreTrainedModel, batch: int, length: int, seed: int, device: torch.device) -> Tensor:
    """Standard normal hidden states [B, T, hidden_size], as behind a norm, in the dtype of the model."""
    size: int = model.config.get_text_config(decoder=True).hidden_size
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(batch, length, size, generator=generator, device=device, dtype=torch.float32)
    return hidden.to(model.dtype)


def mixer_call(model: PreTrainedModel, mixer: Mixer, hidden: Tensor, passes: Passes) -> Callable[[], None]:
    """One pass of the mixer alone, without the norm in front of it and without a cache."""
    module = model.get_submodule(mixer.module)
    if passes == "forward":

        @torch.no_grad()
        def forward() -> None:
            _output(module, hidden)

        return forward
    leaf = hidden.detach().clone().requires_grad_()
    direction = torch.ones_like(hidden)

    @torch.enable_grad()
    def both() -> None:
        for tensor in (leaf, *module.parameters()):
            tensor.grad = None
        _output(module, leaf).backward(direction)

    return both


def mixer_work(call: Callable[[], None], graph: bool) -> MixerWork:
    """`call` as a captured graph where that is possible. It must have been called before: kernels are tuned once."""
    if not graph:
        return MixerWork(Work(call), False, "")
    try:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
    except MEASURING_ERRORS as error:
        if is_out_of_memory(error):
            raise
        torch.cuda.synchronize()
        return MixerWork(Work(call), False, reason(error))
    return MixerWork(Work(_Replay(captured, call).replay), True, "")


@dataclass(frozen=True, slots=True)
class _Replay:
    """Keeps what the captured call reads alive together with its graph."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], None]

    def replay(self) -> None:
        self.graph.replay()


def _output(module: nn.Module, hidden: Tensor) -> Tensor:
    """fla's mixers return a tuple, whose first element is the output."""
    output: Any = module(hidden_states=hidden)
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
