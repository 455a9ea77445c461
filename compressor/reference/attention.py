"""Softmax attention with the calling conventions of flash-attn, and attention over residuals.

Notation used for tensor shapes: B sequences, T queries, S keys, H query heads, H_kv key and value
heads (H is a multiple of it), D channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.normalization import scale_and_shift, standardize
from compressor.reference.precision import working_dtype


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """q [B, T, H, D], k and v [B, S, H_kv, D]; the result is [B, T, H, D].

    Query i stands at position i + S - T, so the last query at the last key. It sees the keys from
    `window_size[0]` before its position to `window_size[1]` after it; a negative bound is none, and
    `causal` bounds the second by 0.
    """
    queries, keys = q.shape[1], k.shape[1]
    left, right = window_size
    right = 0 if causal else right
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if left < 0 and (right < 0 or (causal and queries == keys)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=right >= 0).transpose(1, 2)

    position = torch.arange(queries, device=q.device)[:, None] + keys - queries
    distance = torch.arange(keys, device=q.device) - position  # [T, S]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """`attention` of packed sequences, each within itself: q [queries, H, D], k and v [keys, H_kv, D]."""
    query_lengths, key_lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    sequences = zip(q.split(query_lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    outputs = [attention(a[None], b[None], c[None], causal, window_size)[0] for a, b, c in sequences]
    return torch.cat(outputs)


def attention_over_residuals(
    query: Tensor,
    residuals: Sequence[Tensor],
    weight: Tensor,
    output_weight: Tensor | None,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Softmax mixture of L residual streams ("Attention Residuals", arXiv:2603.15031).

    The scores are scale * query . rms_norm(residual) * weight; with `output_weight` the mixture is RMS-normalised.

    Args:
        query: [D] or [1, D].
        residuals: L tensors [..., D].
        weight, output_weight: [D].

    Returns:
        The mixture [..., D] in the dtype of the residuals and the softmax [L, ...], computed in
        float32, or in float64 if the residuals are float64.
    """
    dtype, shape = working_dtype(residuals[0]), residuals[0].shape
    streams = torch.stack([residual.reshape(-1, shape[-1]) for residual in residuals]).to(dtype)  # [L, rows, D]
    keys = scale_and_shift(standardize(streams.flatten(0, 1), eps, is_rms_norm=True).x, weight, None)
    logits = (keys @ query.flatten().to(dtype) * scale).view(streams.shape[:2])
    probabilities = logits.softmax(0)
    mixture = (probabilities[..., None] * streams).sum(0)
    if output_weight is not None:
        mixture = scale_and_shift(standardize(mixture, eps, is_rms_norm=True).x, output_weight, None)
    return mixture.view(shape).to(residuals[0].dtype), probabilities.view(-1, *shape[:-1])
