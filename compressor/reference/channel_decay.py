"""The delta rule with a decay of its own for every key channel, as in Kimi delta attention.

    S_t = (I - beta_t k_t k_t^T) diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Source: Kimi Team, "Kimi Linear" (arXiv:2510.26692), section 3. Token by token it is
`recurrence.recurrent_gated_delta_rule` with g [B, T, HV, K]; here it is in chunks. Notation of `recurrence`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.recurrence import decay_between_tokens, run_recurrence, scan_chunks
from compressor.reference.triangular import BLOCK_SIZE, solve_unit_lower

_PIECE = 8 * BLOCK_SIZE
"""Tokens whose decays between each other are held at once: K * BLOCK_SIZE numbers a token and head."""


def chunked_channel_decay_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as of `recurrence.recurrent_gated_delta_rule`, to rounding, with g [B, T, HV, K].

    Raises:
        ValueError: HV is not a multiple of H, or the initial state has another shape.
    """
    arguments = (q, k, v, g, beta, scale, initial_state, use_qk_l2norm, state_v_first, cu_seqlens)
    return run_recurrence(_piece_by_piece, *arguments)


def _piece_by_piece(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [B, H, T, K], v [B, HV, T, V], g [B, HV, T, K], beta [B, HV, T], state [B, HV, K, V]."""
    if g is None:
        raise ValueError("a delta rule with a decay a channel needs the decays g")
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    outputs = []
    for start in range(0, v.shape[2], _PIECE):
        q_piece, k_piece, v_piece, g_piece, beta_piece = (
            x[:, :, start : start + _PIECE] for x in (q, k, v, g, beta[..., None])
        )
        output, state = _chunk_by_chunk(q_piece, k_piece, v_piece, g_piece, beta_piece, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def _chunk_by_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Every tensor with HV heads, beta [B, HV, T, 1]; chunks of C = BLOCK_SIZE tokens.

    The system is that of `recurrence`, in which each channel of k_i . k_j has its own decay between the tokens. Those
    cannot be put into the keys, as exp(b_i) and exp(-b_j) of the summed log decays b would overflow.
    """
    batch, heads, tokens, _ = v.shape

    def chunked(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -tokens % BLOCK_SIZE))
        return padded.reshape(batch, heads, 1, -1, BLOCK_SIZE, x.shape[-1])  # [B, HV, 1, M, C, channels]

    q, k, v, g, beta = (chunked(x) for x in (q, k, v, g, beta))
    decay = decay_between_tokens(g.mT.contiguous())  # [B, HV, 1, M, K, C, C]
    decayed_keys = torch.einsum("...cij,...jc->...ijc", decay, k)
    products = decayed_keys @ torch.stack([k, q], dim=-1)  # [B, HV, 1, M, C, C, 2]
    from_start = g.cumsum(-2).exp()
    to_end = decay[..., -1, :].mT

    right_sides = torch.cat([beta * v, beta * k * from_start], dim=-1)
    solved = solve_unit_lower(beta * products[..., 0], right_sides)
    corrections, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    chunk_decay = from_start[..., -1, :, None]  # [B, HV, 1, M, K, 1]
    starts, corrections, state = scan_chunks(corrections, reads, k * to_end, chunk_decay, state)
    output = (q * from_start) @ starts + products[..., 1].tril() @ corrections
    return output.reshape(batch, heads, -1, v.shape[-1])[:, :, :tokens], state
