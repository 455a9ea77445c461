"""Perplexity, and KL divergence to the original model, on held-out tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

POSITIONS_PER_STEP = 512
"""Positions whose float32 log-probabilities are alive at once: flat memory for large vocabularies."""


@dataclass(frozen=True)
class VariantFigures:
    """One compressed model on held-out text: `kl` is nats a token, KL(original || compressed)."""

    perplexity: float
    kl: float


@dataclass(frozen=True)
class HeldOutFigures:
    """Figures over `tokens` predicted tokens; `after` by variant name."""

    tokens: int
    perplexity_before: float
    after: Mapping[str, VariantFigures]


@dataclass(frozen=True)
class Variant:
    """A way to run the compressed model: `context` is entered around its forward pass."""

    name: str
    context: Callable[[], AbstractContextManager[None]]


def compare_on_held_out(
    original: PreTrainedModel,
    compressed: PreTrainedModel,
    variants: Sequence[Variant],
    sequences: Sequence[Tensor],
    on_sequence: Callable[[int], None],
) -> HeldOutFigures:
    """Run both models over `sequences` (int64 [T] each, T >= 2), one at a time, without padding.

    Losses and divergences are taken in float32 and summed in float64. `on_sequence` gets the number
    of tokens of the sequence just done.
    """
    loss_before, tokens = 0.0, 0
    loss_after = dict.fromkeys((variant.name for variant in variants), 0.0)
    kl = dict.fromkeys(loss_after, 0.0)
    for sequence in sequences:
        before = next_token_logits(original, sequence)
        targets = sequence[1:].to(before.device)
        loss_before += cross_entropy_sum(before, targets)
        for variant in variants:
            with variant.context():
                after = next_token_logits(compressed, sequence)
            loss_after[variant.name] += cross_entropy_sum(after, targets)
            kl[variant.name] += kl_divergence_sum(before, after)
        tokens += len(targets)
        on_sequence(len(sequence))
    figures = {name: VariantFigures(math.exp(loss_after[name] / tokens), kl[name] / tokens) for name in loss_after}
    return HeldOutFigures(tokens, math.exp(loss_before / tokens), figures)


def perplexity(model: PreTrainedModel, sequences: Sequence[Tensor]) -> float:
    """exp of the mean next-token loss over all predicted tokens of `sequences` (int64 [T] each)."""
    loss, tokens = 0.0, 0
    for sequence in sequences:
        logits = next_token_logits(model, sequence)
        loss += cross_entropy_sum(logits, sequence[1:].to(logits.device))
        tokens += len(sequence) - 1
    return math.exp(loss / tokens)


@torch.inference_mode()
def next_token_logits(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Logits [T - 1, vocabulary] for the tokens after the first, in the model's dtype."""
    output = model(input_ids=sequence[None].to(model.device), use_cache=False)
    logits: Tensor = output.logits[0, :-1]
    return logits


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> float:
    """Sum over positions of -log p(target): logits [N, vocabulary], targets int64 [N]."""
    total = 0.0
    for rows, wanted in zip(logits.split(POSITIONS_PER_STEP), targets.split(POSITIONS_PER_STEP), strict=True):
        total += float(torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="none").double().sum())
    return total


def kl_divergence_sum(original: Tensor, compressed: Tensor) -> float:
    """Sum over positions of KL(original || compressed), both logits [N, vocabulary]."""
    total = 0.0
    for p_rows, q_rows in zip(original.split(POSITIONS_PER_STEP), compressed.split(POSITIONS_PER_STEP), strict=True):
        log_p, log_q = p_rows.float().log_softmax(-1), q_rows.float().log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
    return total
