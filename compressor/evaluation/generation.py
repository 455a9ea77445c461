"""Greedy generation with the stock cache, many prompts at once and without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.cached_forward import forward_from_cache, reads_pieces
from compressor.errors import RunError

TOKENS_PER_FORWARD = 2**17
"""Prompt tokens of a batch that go through the model at once; longer prompts take several calls."""

SMALLEST_PIECE = 128
"""Tokens of each prompt that such a call has at least: up to 64, fla's layers run token by token."""

GPU_TOKENS_PER_FORWARD = (2**15, 2**11)
"""The same on a GPU, and for what is left of the prompts: fla tunes kernels anew, for minutes, for every other size."""

LARGEST_SPREAD = 64
"""Tokens by which prompts of one batch may differ in length. Each costs a step of the whole batch."""

GPU_BATCH_FACTOR = 8
"""Times as many prompts are answered at once on a GPU, where a step of 256 rows takes as long as one of 32."""

STEPS_BETWEEN_CHECKS = 8
"""Steps between two looks at what was generated, which wait for the GPU."""

Finished = Callable[[Sequence[int], Sequence[list[int]]], Sequence[bool]]
"""Whether prompts (by index) need no more tokens than those generated so far."""


@torch.inference_mode()
def generate_greedily(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    limits: Sequence[int],
    batch_size: int,
    end_tokens: Set[int],
    finished: Finished,
    on_tokens: Callable[[int], None],
) -> list[list[int]]:
    """The most probable next tokens of every prompt (int64 [P] each), in the order of `prompts`.

    A prompt is done at an end token, which is left out, at its limit, or a few tokens after `finished`
    holds for it. Prompts of a batch run through the chunked kernels as far as the shortest reaches, then
    token by token, where the longer ones feed their own next tokens first: every row is at the same
    position, so caches and position encodings are those of single prompts, and no padding enters a
    state. `on_tokens` gets the number of prompt tokens of each batch that is done.

    Raises:
        RunError: a logit is NaN or infinite.
    """
    outputs: list[list[int]] = [[]] * len(prompts)
    if model.device.type == "cuda":
        batch_size *= GPU_BATCH_FACTOR
    for batch in _batches([len(prompt) for prompt in prompts], limits, batch_size):
        rows = _Rows(batch, [prompts[index] for index in batch], [limits[index] for index in batch], model.device)
        for index, tokens in _generate_batch(model, rows, end_tokens, finished):
            outputs[index] = tokens
        on_tokens(sum(len(prompts[index]) for index in batch))
    return outputs


def _batches(lengths: Sequence[int], limits: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices of prompts with one limit and of like length."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (limits[index], lengths[index])):
        if batch and (
            len(batch) == batch_size
            or limits[index] != limits[batch[0]]
            or lengths[index] > lengths[batch[0]] + LARGEST_SPREAD
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class _Rows:
    """What a batch has read and generated: tokens int64 [rows, longest prompt + limit] on the model's device."""

    def __init__(
        self, indices: list[int], prompts: Sequence[Tensor], limits: Sequence[int], device: torch.device
    ) -> None:
        self.indices = indices
        self.lengths = [len(prompt) for prompt in prompts]
        self.limits = list(limits)
        self.shortest = min(self.lengths)
        steps = max(length + limit for length, limit in zip(self.lengths, limits, strict=True))
        tokens = torch.zeros(len(prompts), steps, dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.tokens = tokens.to(device)
        self.given = (torch.arange(steps) < torch.tensor(self.lengths)[:, None]).to(device)

    def put(self, position: int, chosen: Tensor) -> Tensor:
        """Write the next token of each row, [rows, 1]: its prompt's own, or `chosen` (int64 [rows])."""
        column = torch.where(self.given[:, position], self.tokens[:, position], chosen)
        self.tokens[:, position] = column
        return column[:, None]

    def outputs(self, position: int, end_tokens: Set[int]) -> list[tuple[list[int], bool]]:
        """What each row has generated up to `position`, and whether an end token or the limit ended it."""
        results = []
        generated = self.tokens[:, self.shortest : position + 1].tolist()
        for row, length, limit in zip(generated, self.lengths, self.limits, strict=True):
            own = row[length - self.shortest :][:limit]
            end = next((at for at, token in enumerate(own) if token in end_tokens), None)
            results.append((own[:end], end is not None or len(own) == limit))
        return results

    def keep(self, rows: Sequence[int]) -> Tensor:
        """Go on with these rows only; their numbers int64 on the model's device."""
        self.indices = [self.indices[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.limits = [self.limits[row] for row in rows]
        selected = torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)
        self.tokens, self.given = self.tokens[selected], self.given[selected]
        return selected


def _generate_batch(
    model: PreTrainedModel, rows: _Rows, end_tokens: Set[int], finished: Finished
) -> Iterator[tuple[int, list[int]]]:
    """(index, output) of every prompt, as they are done."""
    steps = rows.tokens.shape[1]
    logits, cache = _prefill(model, rows.tokens[:, : rows.shortest])
    for position in range(rows.shortest, steps):
        column = rows.put(position, logits.argmax(-1))
        if position + 1 == steps or (position + 1 - rows.shortest) % STEPS_BETWEEN_CHECKS == 0:
            _require_finite(logits)
            outputs = rows.outputs(position, end_tokens)
            answered = finished(rows.indices, [tokens for tokens, _ in outputs])
            going = []
            for row, ((tokens, ended), enough) in enumerate(zip(outputs, answered, strict=True)):
                if ended or (tokens and enough):
                    yield rows.indices[row], tokens
                else:
                    going.append(row)
            if not going:
                return
            if len(going) < len(outputs):
                kept = rows.keep(going)
                cache.reorder_cache(kept)
                column = column[kept]
        logits, cache = _forward(model, column, cache)


def _prefill(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Any]:
    """Logits [rows, vocabulary] after `tokens` [rows, T], and the cache."""
    rows, length = tokens.shape
    cache = None
    pieces = _pieces(rows, length, tokens.device.type == "cuda") if reads_pieces(model) else [length]
    for piece in tokens.split(pieces, dim=1):
        logits, cache = _forward(model, piece, cache)
    return logits, cache


def _pieces(rows: int, length: int, on_gpu: bool) -> list[int]:
    """Lengths of the pieces that prompts of `length` tokens are read in; they add up to it."""
    sizes = [size // rows for size in GPU_TOKENS_PER_FORWARD] if on_gpu else []
    sizes = [*sizes, 1] if on_gpu else [max(SMALLEST_PIECE, TOKENS_PER_FORWARD // rows)]
    pieces: list[int] = []
    for size in sizes:
        if size:
            pieces += [size] * ((length - sum(pieces)) // size)
    rest = length - sum(pieces)
    return [*pieces, rest] if rest else pieces


def _forward(model: PreTrainedModel, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """One call of a stock model: logits [rows, vocabulary] after the last of `tokens` [rows, T], and the cache.

    The caches of fla and of transformers share an interface, and no type.
    """
    output, cache = forward_from_cache(model, cache, input_ids=tokens, logits_to_keep=1)
    logits: Tensor = output.logits[:, -1]
    return logits, cache


def _require_finite(logits: Tensor) -> None:
    if not bool(logits.isfinite().all()):
        raise RunError(
            "the model gives logits that are NaN or infinite while it generates: its weights or its kernels are "
            "broken in this dtype; try float32."
        )
