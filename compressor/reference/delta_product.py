"""The gated delta product: n delta-rule updates a token, after one decay and before one read.

    S <- exp(g_t) S;   for j = 1 .. n:  S <- S + beta_tj k_tj (v_tj - S^T k_tj)^T;   o_t = scale * S^T q_t

Source: Siems et al., "DeltaProduct" (arXiv:2502.10297), section 3. It is the gated delta rule over n T steps in which
the first of each n decays and the last is read. Notation of `recurrence`; n is `num_householder`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.reference.recurrence import chunked_gated_delta_rule


def chunked_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as of `recurrence.chunked_gated_delta_rule`, but k, v and beta hold n steps a token.

    Args:
        q: [B, T, H, K].
        k: [B, T n, H, K], the n keys of a token one after the other.
        v: [B, T n, HV, V].
        g: [B, T, HV]; None for no decay.
        beta: [B, T n, HV].
        cu_seqlens: [N + 1], in tokens.

    Raises:
        ValueError: k has not n steps a token.
    """
    if k.shape[1] != q.shape[1] * num_householder:
        raise ValueError(f"{k.shape[1]} keys are not {num_householder} for each of {q.shape[1]} tokens")
    output, state = chunked_gated_delta_rule(
        _among_zeros(q, num_householder, num_householder - 1),
        k,
        v,
        None if g is None else _among_zeros(g, num_householder, 0),
        beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens * num_householder,
    )
    return output[:, num_householder - 1 :: num_householder], state


def _among_zeros(x: Tensor, steps: int, place: int) -> Tensor:
    """x [B, T, ...] at step `place` of each token's `steps`, zeros at the others: [B, T steps, ...]."""
    zeros = torch.zeros_like(x)
    return torch.stack([x if step == place else zeros for step in range(steps)], dim=2).flatten(1, 2)
