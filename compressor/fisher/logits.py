"""From last hidden states to gradients, the logits of all rows never existing at once.

    KL_n = sum_v p_nv (log p_nv - log q_nv)      gradient to the logits  q_n - p_n
    -log q_n[y_n], y_n drawn from q_n            gradient to the logits  q_n - onehot(y_n), the score

p are the unmasked model's probabilities, q the masked one's. Both gradients come of one product with the head. Logits
are float32, or float64 where hidden states are; half-precision products are not rounded on their way there on a GPU.

Notation used for tensor shapes:
    N   rows (tokens)      V   vocabulary      d   hidden size      R   rows of a chunk
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.recovery.losses import LOGITS_PER_CHUNK


@dataclass(frozen=True, slots=True, eq=False)
class HiddenGradients:
    """Sums over the N rows.

    Attributes:
        kl: scalar, nats.
        divergence: [N, d], gradient of `kl` to the hidden states, in their dtype; None without dense ones.
        score: [N, d], gradient of the negative log-probability of the drawn labels.
    """

    kl: Tensor
    divergence: Tensor | None
    score: Tensor


@torch.no_grad()
def hidden_gradients(
    hidden: Tensor,
    head: Tensor,
    dense_hidden: Tensor | None,
    uniforms: Tensor,
    logits_per_chunk: int = LOGITS_PER_CHUNK,
) -> HiddenGradients:
    """Divergence and scores of `hidden` [N, d] through `head` [V, d].

    Args:
        dense_hidden: [N, d] of the unmasked model; None where it is the masked one: no divergence.
        uniforms: [N] in [0, 1); row n is given the label at which its cumulative probability passes `uniforms[n]`.
        logits_per_chunk: memory beside the result is about four tensors of this size in the working dtype.
    """
    score = torch.empty_like(hidden)
    divergence = None if dense_hidden is None else torch.empty_like(hidden)
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for rows in torch.arange(len(hidden), device=hidden.device).split(max(1, logits_per_chunk // len(head))):
        log_masked = _log_probabilities(hidden[rows], head)
        masked = log_masked.exp()
        if dense_hidden is not None and divergence is not None:
            log_dense = _log_probabilities(dense_hidden[rows], head)
            dense = log_dense.exp()
            total += log_dense.sub_(log_masked).mul_(dense).sum(dtype=torch.float64)
            divergence[rows] = _through_head(dense.neg_().add_(masked), head, hidden.dtype)
        masked[torch.arange(len(rows), device=rows.device), drawn_labels(masked, uniforms[rows])] -= 1
        score[rows] = _through_head(masked, head, hidden.dtype)
    return HiddenGradients(total, divergence, score)


@torch.no_grad()
def divergence(hidden: Tensor, head: Tensor, dense_hidden: Tensor, logits_per_chunk: int = LOGITS_PER_CHUNK) -> Tensor:
    """The sum `kl` of `HiddenGradients` alone, float64."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    chunk = max(1, logits_per_chunk // len(head))
    for masked, dense in zip(hidden.split(chunk), dense_hidden.split(chunk), strict=True):
        log_dense = _log_probabilities(dense, head)
        probabilities = log_dense.exp()
        total += log_dense.sub_(_log_probabilities(masked, head)).mul_(probabilities).sum(dtype=torch.float64)
    return total


def drawn_labels(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [R] of probabilities [R, V]: by inversion, so that a device draws what another would."""
    cumulative = probabilities.cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniforms.to(cumulative) * cumulative[:, -1])[:, None], right=True)
    return drawn[:, 0].clamp_(max=probabilities.shape[-1] - 1)


def _log_probabilities(hidden: Tensor, head: Tensor) -> Tensor:
    """[R, V] in the working dtype."""
    working = torch.promote_types(hidden.dtype, torch.float32)
    if working == torch.float32 and hidden.device.type == "cuda" and head.dtype == hidden.dtype != working:
        return torch.mm(hidden, head.T, out_dtype=working).log_softmax(-1)
    return (hidden.to(working) @ head.to(working).T).log_softmax(-1)


def _through_head(gradient: Tensor, head: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, V] to [R, d] in the hidden states' dtype."""
    working = torch.promote_types(dtype, head.dtype)
    return (gradient.to(working) @ head.to(working)).to(dtype)
