"""Next-token loss on text, and what it hides: loss by position, loss on tokens that only memory can tell."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import RequestError
from compressor.evaluation.estimates import Estimate, estimate, estimate_ratio
from compressor.evaluation.forward import TokenFigures, forward_tokens
from compressor.evaluation.windows import Window

COPY_DISTANCE = 512
"""Tokens that lie at least between the two occurrences of a bigram that counts as copied."""

FIRST_BUCKET = 64
"""End of the first bucket of positions; every further one ends at twice the position of the one before."""


@dataclass(frozen=True, slots=True)
class PositionBucket:
    """Loss of the tokens before which the model read at least `start` and fewer than `stop` tokens of the window."""

    start: int
    stop: int
    loss: Estimate


@dataclass(frozen=True, slots=True)
class WindowLoss:
    """Sum of the losses, in nats, of the `tokens` predicted tokens of one window."""

    cluster: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class TextFigures:
    """What a model makes of a text; losses and divergences are means a token, in nats.

    Attributes:
        text_sha256: hash of the windows; figures of two models can be paired where it is the same.
        tokens, words, bytes: of what was predicted; words and bytes are None where only tokens are known.
        windows, clusters: how many were read; standard errors are taken over the clusters.
        loss: all predicted tokens.
        token_perplexity, word_perplexity, byte_perplexity: exp of the summed loss over the count; None where that
            exceeds what a float holds, as it does for words of a language without spaces.
        bits_per_byte: the summed loss in bits, over bytes.
        by_position: the loss by the number of tokens read before, without empty buckets.
        copy_distance: D of the next two.
        copied: tokens that end a bigram which the window has before, last more than D tokens earlier.
        rest: all other tokens.
        kl: KL(reference || model); None without a reference.
        window_losses: in the order of the windows.
    """

    text_sha256: str
    tokens: int
    words: int | None
    bytes: int | None
    windows: int
    clusters: int
    loss: Estimate
    token_perplexity: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float | None
    by_position: tuple[PositionBucket, ...]
    copy_distance: int
    copied: Estimate
    rest: Estimate
    kl: Estimate | None
    window_losses: tuple[WindowLoss, ...]


def measure_text(
    model: PreTrainedModel,
    windows: Sequence[Window],
    batch_size: int,
    copy_distance: int = COPY_DISTANCE,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> TextFigures:
    """Figures of `model` on `windows`; `on_tokens` gets the number of tokens of each batch.

    Raises:
        RequestError, RunError: see `forward_tokens`.
    """
    figures = forward_tokens(model, [window.tokens for window in windows], batch_size, None, on_tokens)
    return summarise(windows, figures, copy_distance)


def compare_text(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    windows: Sequence[Window],
    batch_size: int,
    copy_distance: int = COPY_DISTANCE,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> tuple[TextFigures, TextFigures]:
    """Figures of `reference` and of `model`, these with `kl`, from one pass over `windows`.

    Raises:
        RequestError, RunError: see `forward_tokens`.
    """
    figures = forward_tokens(model, [window.tokens for window in windows], batch_size, reference, on_tokens)
    before = [figure.reference for figure in figures if figure.reference is not None]
    return summarise(windows, before, copy_distance), summarise(windows, figures, copy_distance)


def loss_difference(before: TextFigures, after: TextFigures) -> Estimate:
    """Mean of `after` - `before` a token, in nats, and its standard error over the pairs of clusters.

    Raises:
        RequestError: the two were not measured on the same windows.
    """
    if before.text_sha256 != after.text_sha256:
        raise RequestError(
            f"the two models were measured on different text ({before.tokens:,} and {after.tokens:,} tokens, hashes "
            f"{before.text_sha256[:8]} and {after.text_sha256[:8]}); measure both with the same text, tokenizer and "
            "windows."
        )
    sums: dict[int, float] = {}
    counts: dict[int, int] = {}
    for one, other in zip(before.window_losses, after.window_losses, strict=True):
        sums[one.cluster] = sums.get(one.cluster, 0.0) + other.loss - one.loss
        counts[one.cluster] = counts.get(one.cluster, 0) + one.tokens
    return estimate_ratio(
        torch.tensor(list(sums.values()), dtype=torch.float64), torch.tensor(list(counts.values()), dtype=torch.float64)
    )


def summarise(windows: Sequence[Window], figures: Sequence[TokenFigures], copy_distance: int) -> TextFigures:
    """Figures of the predicted tokens of `windows` from those of all their tokens, in the same order."""
    losses = _predicted(windows, [figure.losses.double() for figure in figures])
    clusters = torch.cat([torch.full((window.predicted,), window.cluster) for window in windows])
    positions = _predicted(windows, [torch.arange(1, len(window.tokens)) for window in windows])
    copied = _predicted(windows, [bigram_distances(window.tokens)[1:] for window in windows]) > copy_distance
    divergences = [figure.kl.double() for figure in figures if figure.kl is not None]
    words, bytes_ = _total([window.words for window in windows]), _total([window.bytes for window in windows])
    loss = float(losses.sum())
    return TextFigures(
        text_sha256=_sha256(windows),
        tokens=len(losses),
        words=words,
        bytes=bytes_,
        windows=len(windows),
        clusters=len({window.cluster for window in windows}),
        loss=estimate(losses, clusters),
        token_perplexity=_exp(loss / len(losses)),
        word_perplexity=_exp(loss / words) if words else None,
        byte_perplexity=_exp(loss / bytes_) if bytes_ else None,
        bits_per_byte=loss / bytes_ / math.log(2) if bytes_ else None,
        by_position=_buckets(losses, positions, clusters),
        copy_distance=copy_distance,
        copied=estimate(losses[copied], clusters[copied]),
        rest=estimate(losses[~copied], clusters[~copied]),
        kl=estimate(_predicted(windows, divergences), clusters) if divergences else None,
        window_losses=tuple(
            WindowLoss(window.cluster, window.predicted, float(part.sum()))
            for window, part in zip(windows, losses.split([window.predicted for window in windows]), strict=True)
        ),
    )


def bigram_distances(tokens: Tensor) -> Tensor:
    """How many tokens before t_i the bigram (t_{i-1}, t_i) occurred last, int64 [T]; 0 where it did not."""
    distances = torch.zeros_like(tokens)
    keys = tokens[:-1] * (tokens.max() + 1) + tokens[1:]
    ordered, places = keys.sort(stable=True)
    repeated = ordered[1:] == ordered[:-1]
    distances[1 + places[1:][repeated]] = (places[1:] - places[:-1])[repeated]
    return distances


def _predicted(windows: Sequence[Window], values: Sequence[Tensor]) -> Tensor:
    """One after another, the values [T - 1] of every window that belong to its predicted tokens."""
    return torch.cat([value[-window.predicted :] for window, value in zip(windows, values, strict=True)])


def _buckets(losses: Tensor, positions: Tensor, clusters: Tensor) -> tuple[PositionBucket, ...]:
    buckets = []
    start, stop = 0, FIRST_BUCKET
    while start <= int(positions.max()):
        inside = (positions >= start) & (positions < stop)
        if bool(inside.any()):
            buckets.append(PositionBucket(start, stop, estimate(losses[inside], clusters[inside])))
        start, stop = stop, 2 * stop
    return tuple(buckets)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _exp(exponent: float) -> float | None:
    return math.exp(exponent) if exponent < math.log(sys.float_info.max) else None


def _sha256(windows: Sequence[Window]) -> str:
    """Over length, predictions and ids of every window, as little-endian 64-bit integers."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(torch.tensor([len(window.tokens), window.predicted]).numpy().astype("<i8").tobytes())
        digest.update(window.tokens.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
