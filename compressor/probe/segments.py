"""Token sequences read a segment at a time through the stock cache, with a look at it after every segment.

Logits exist for one segment at a time: what is alive does not grow with the length of a text, but for the keys and
values of softmax layers in a hybrid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.architectures.cached_forward import forward_from_cache
from compressor.errors import RunError
from compressor.evaluation.forward import LOGITS_PER_BATCH, LOGITS_PER_STEP, TokenFigures

SEGMENT = 256
"""Tokens between two boundaries of the truncation experiment."""


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The model between two segments, or behind the last one.

    `rows` are the numbers of the sequences in the batch, `read` the tokens that each has read, padding included, and
    `cache` the stock cache, whose states may be replaced.
    """

    rows: tuple[int, ...]
    read: int
    last: bool
    cache: Any


OnBoundary = Callable[[Boundary], None]


def _ignore(tokens: int) -> None:
    """Report to nobody."""


@torch.inference_mode()
def read_in_segments(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    segment: int,
    batch_size: int,
    on_boundary: OnBoundary,
    on_tokens: Callable[[int], None] = _ignore,
    give_positions: bool = False,
) -> list[TokenFigures]:
    """Losses of the tokens after the first of every sequence (int64 [T], T >= 2), in the order of `sequences`.

    Sequences of like length share a batch, padded on the right to whole segments: no row sees its padding before its
    own tokens have ended. `on_boundary` is called after every segment, also the last. `give_positions` tells the model
    where each segment stands, for a class that counts the keys of its cache and a cache that has lost some.
    `on_tokens` gets the tokens of every segment as it is done: one long text shows its progress too.

    Raises:
        RunError: a loss is NaN or infinite.
    """
    vocabulary: int = model.config.get_text_config().vocab_size
    rows = max(1, min(batch_size, LOGITS_PER_BATCH // (vocabulary * segment)))
    found: dict[int, TokenFigures] = {}
    for batch in _batches([len(sequence) for sequence in sequences], segment, rows):
        members = [sequences[index] for index in batch]
        figures = _read_batch(model, members, segment, tuple(batch), on_boundary, on_tokens, give_positions)
        found.update(zip(batch, figures, strict=True))
    return [found[index] for index in range(len(sequences))]


def segments_of(tokens: int, segment: int) -> int:
    """Segments that predict the tokens of a sequence after its first: its last token alone opens none."""
    return -(-(tokens - 1) // segment)


def _batches(lengths: Sequence[int], segment: int, rows: int) -> Iterator[list[int]]:
    """Indices of sequences with the same number of segments, at most `rows` to a batch."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (
            len(batch) == rows or segments_of(lengths[index], segment) != segments_of(lengths[batch[0]], segment)
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _read_batch(
    model: PreTrainedModel,
    sequences: list[Tensor],
    segment: int,
    rows: tuple[int, ...],
    on_boundary: OnBoundary,
    on_tokens: Callable[[int], None],
    give_positions: bool,
) -> list[TokenFigures]:
    count = segments_of(max(len(sequence) for sequence in sequences), segment)
    tokens = torch.zeros(len(sequences), count * segment + 1, dtype=torch.int64)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    losses, correct = torch.zeros(len(sequences), count * segment), torch.zeros(tokens[:, 1:].shape, dtype=torch.bool)
    cache = None
    for number in range(count):
        part = slice(number * segment, (number + 1) * segment)
        inputs: dict[str, Any] = {"input_ids": tokens[:, part].to(model.device)}
        if give_positions:
            inputs["position_ids"] = torch.arange(part.start, part.stop, device=model.device).expand(len(rows), -1)
        output, cache = forward_from_cache(model, cache, **inputs)
        losses[:, part], correct[:, part] = _against(output.logits, tokens[:, 1:][:, part].to(model.device))
        del output
        on_boundary(Boundary(rows, part.stop, number + 1 == count, cache))
        on_tokens(sum(len(sequence[part]) for sequence in sequences))
    on_tokens(sum(len(sequence[count * segment :]) for sequence in sequences))
    figures = []
    for row, sequence in enumerate(sequences):
        own = slice(len(sequence) - 1)
        _require_finite(losses[row, own])
        figures.append(TokenFigures(losses[row, own].clone(), correct[row, own].clone(), None))
    return figures


def _against(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of each target and whether it is the most probable token, both [B, T]; log p is taken in float32."""
    losses, correct = torch.empty(targets.shape), torch.empty(targets.shape, dtype=torch.bool)
    step = max(1, LOGITS_PER_STEP // (logits.shape[0] * logits.shape[-1]))
    for start in range(0, targets.shape[1], step):
        part = slice(start, start + step)
        log_probabilities = logits[:, part].float().log_softmax(-1)
        losses[:, part] = -log_probabilities.gather(-1, targets[:, part, None])[..., 0].cpu()
        correct[:, part] = (log_probabilities.argmax(-1) == targets[:, part]).cpu()
    return losses, correct


def _require_finite(losses: Tensor) -> None:
    broken = int((~losses.isfinite()).sum())
    if broken:
        raise RunError(
            f"{broken:,} of {len(losses):,} tokens have a loss that is NaN or infinite; check the weights, or run in "
            "float32."
        )
