"""Decoding steps behind a prompt: a plain loop, and the same steps over fixed buffers, captured as a CUDA graph.

Tokens are given, not fed back, so that two loops can be compared step by step; the argmax of every step is taken all
the same. Notation: B sequences, S steps of one call, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.out_of_memory import is_out_of_memory
from compressor.speed.failures import MEASURING_ERRORS, reason
from compressor.speed.states import FixedState, fixed_state, next_logits, read_prompt, state_bytes
from compressor.speed.timing import Schedule, Work

Mode = Literal["graph", "direct", "plain"]
"""A captured graph over fixed buffers, the same function called directly, or the stock loop with its own cache."""

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Relative error of logits up to which two loops agree."""


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """`call_steps` steps make one call, of a graph or of the function; `piece` tokens of the prompt are read at once.

    A call ends with one copy of the states where the stock layers replace them: 1 / (2 * call_steps) of a step's
    traffic would be its share if states were all that a step reads and writes.
    """

    prompt_length: int = 512
    call_steps: int = 20
    mode: Mode = "graph"
    piece: int | None = None
    seed: int = 0

    def calls(self, schedule: Schedule) -> tuple[int, int]:
        """Calls for warm-up and for timing, of one round."""
        return -(-schedule.warm_up // self.call_steps), -(-schedule.steps // self.call_steps)

    def room(self, schedule: Schedule) -> int:
        """Tokens behind the prompt that a round, or the comparison with the plain loop, decodes."""
        return max(sum(self.calls(schedule)), 3) * self.call_steps + 1


@dataclass(frozen=True, slots=True)
class Agreement:
    """Against the plain loop: relative error of the last logits, and the share of tokens picked alike in the last S."""

    error: float
    picked_alike: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance


@dataclass(slots=True)
class FixedLoop:
    """S steps over `state` that read `tokens` int64 [S, B, 1] and write `picked` int64 [S, B], `logits` [B, V]."""

    model: PreTrainedModel
    state: FixedState
    tokens: Tensor
    picked: Tensor
    logits: Tensor

    def run(self, steps: int | None = None) -> None:
        """All steps, or the first `steps` of them, and back to the addresses they began with."""
        for step in range(self.tokens.shape[0] if steps is None else steps):
            logits, self.state.cache = next_logits(self.model, self.state.cache, self.tokens[step])
            self.picked[step].copy_(logits.argmax(-1))
        self.logits.copy_(logits)
        self.state.settle()

    def begin(self) -> None:
        """Before a round. It also keeps the buffers alive for as long as a graph of this loop may be replayed."""
        self.state.rewind()


@dataclass(frozen=True, slots=True)
class Decoding:
    """What is timed, and what is known of it: `mode` is how it runs, `note` why it is not as asked."""

    work: Work
    mode: Mode
    note: str
    agreement: Agreement | None
    state_bytes: int


def draw_tokens(model: PreTrainedModel, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """int64 tokens, the same for every model of that vocabulary."""
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed)).to(device)


@torch.no_grad()
def prepare_decoding(
    model: PreTrainedModel, batch: int, plan: DecodePlan, schedule: Schedule, device: torch.device
) -> Decoding:
    """Read a prompt of `batch` sequences and make ready to decode; compared with the plain loop unless that is it.

    A model that no graph can replay is decoded by the plain loop, and `note` says so.
    """
    prompt = draw_tokens(model, (batch, plan.prompt_length), plan.seed, device)
    tokens = draw_tokens(model, (plan.call_steps, batch, 1), plan.seed + 1, device)
    note = ""
    if plan.mode != "plain":
        expected = _plain_steps(model, prompt, tokens, plan.piece)
        try:
            return _fixed(model, prompt, tokens, plan, schedule, expected)
        except MEASURING_ERRORS as error:
            if is_out_of_memory(error):
                raise
            note = reason(error)
    loop = _PlainLoop(model, prompt, tokens, plan.piece)
    loop.begin()
    return Decoding(Work(loop.run, plan.call_steps, loop.begin), "plain", note, None, state_bytes(loop.cache))


def compare(logits: Tensor, picked: Tensor, expected: tuple[Tensor, Tensor]) -> Agreement:
    """`logits` [B, V] and `picked` int64 [S, B] with those of the plain loop."""
    wanted, tokens = expected
    error = float((logits.double() - wanted.double()).norm() / wanted.double().norm())
    alike = float((picked == tokens).double().mean())
    return Agreement(error if math.isfinite(error) else math.inf, alike, _TOLERANCE[logits.dtype])


@dataclass(slots=True)
class _PlainLoop:
    """As stock generation calls the model: one forward pass a token, with the cache that it returns."""

    model: PreTrainedModel
    prompt: Tensor
    tokens: Tensor
    piece: int | None
    cache: Any = None

    @torch.no_grad()
    def begin(self) -> None:
        self.cache = None
        self.cache = read_prompt(self.model, None, self.prompt, self.piece)

    @torch.no_grad()
    def run(self) -> None:
        for step in range(self.tokens.shape[0]):
            logits, self.cache = next_logits(self.model, self.cache, self.tokens[step])
            logits.argmax(-1)


def _plain_steps(model: PreTrainedModel, prompt: Tensor, tokens: Tensor, piece: int | None) -> tuple[Tensor, Tensor]:
    """Logits [B, V] and picked tokens int64 [S, B] of the plain loop after one step and then all of them twice."""
    cache = read_prompt(model, None, prompt, piece)
    logits, cache = next_logits(model, cache, tokens[0])
    for _ in range(2):
        picked = []
        for token in tokens:
            logits, cache = next_logits(model, cache, token)
            picked.append(logits.argmax(-1))
    return logits.clone(), torch.stack(picked)


def _fixed(
    model: PreTrainedModel,
    prompt: Tensor,
    tokens: Tensor,
    plan: DecodePlan,
    schedule: Schedule,
    expected: tuple[Tensor, Tensor],
) -> Decoding:
    """The fixed loop, run as far as the plain one was: a step, and then all of them twice."""
    state = fixed_state(model, prompt, plan.room(schedule), plan.piece)
    held = state_bytes(state.cache)
    picked = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    loop = FixedLoop(model, state, tokens, picked, torch.zeros_like(expected[0]))
    if plan.mode == "graph":
        graph = _capture(loop)
        work = Work(graph.replay, plan.call_steps, loop.begin)
    else:
        loop.run(1)
        work = Work(torch.no_grad()(loop.run), plan.call_steps, loop.begin)
    work.call()
    work.call()
    return Decoding(work, plan.mode, "", compare(loop.logits, loop.picked, expected), held)


def _capture(loop: FixedLoop) -> torch.cuda.CUDAGraph:
    """All steps of the loop as a graph; one step is run before, so that kernels are compiled and tuned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop.run(1)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop.run()
    return graph
