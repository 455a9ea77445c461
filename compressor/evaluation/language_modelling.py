"""Next-token logits of one sequence, and sums of loss and divergence over logits that are there already."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

POSITIONS_PER_STEP = 512
"""Positions whose float32 log-probabilities are alive at once: flat memory for large vocabularies."""


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
