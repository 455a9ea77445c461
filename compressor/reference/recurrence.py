"""The gated delta rule, token by token and in chunks; with g = None, the delta rule.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = scale * S_t^T q_t

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), equation 10, and its
chunked form (the WY representation), section 3.3; without gate: Yang et al., arXiv:2406.06484.

Notation used for tensor shapes:
    B   sequences         H   key heads      K   key channels of a head      C   tokens of a chunk
    T   tokens            HV  value heads    V   value channels of a head    M   chunks

Key head h serves the value heads h*r .. h*r + r-1, with r = HV / H. The state S is key-first,
[B, HV, K, V], or with `state_v_first` value-first, [B, HV, V, K], as fla's GatedDeltaNet keeps it.
Everything is computed in float32, or in float64 if q, k or v is float64, and is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.packing import pack_padded, pad_packed
from compressor.reference.precision import working_dtype
from compressor.reference.triangular import BLOCK_SIZE, solve_unit_lower

CHUNK_SIZE = 64
L2_NORM_EPSILON = 1e-6
"""fla adds it to the sum of squares, under the root."""

_Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Token by token.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        g: logarithm of the decay, at most 0, [B, T, HV], or of one for every key channel, [B, T, HV, K]; None for no
            decay.
        beta: step of the update, [B, T, HV].
        scale: of the queries; K ** -0.5 if None.
        initial_state: one a sequence; zero if None.
        use_qk_l2norm: divide each query and key by sqrt(sum of squares + 1e-6) first.
        cu_seqlens: [N + 1], for N sequences packed into a batch of one; there are N states then.

    Returns:
        The output [B, T, HV, V] in the dtype of v, and the final state in the working dtype.

    Raises:
        ValueError: HV is not a multiple of H, or the initial state has another shape.
    """
    arguments = (q, k, v, g, beta, scale, initial_state, use_qk_l2norm, state_v_first, cu_seqlens)
    return run_recurrence(_token_by_token, *arguments)


def chunked_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same numbers as `recurrent_gated_delta_rule`, to rounding, in chunks of 64 tokens: fast for long inputs."""
    arguments = (q, k, v, g, beta, scale, initial_state, use_qk_l2norm, state_v_first, cu_seqlens)
    return run_recurrence(_chunk_by_chunk, *arguments)


def run_recurrence(
    recurrence: _Recurrence,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    use_qk_l2norm: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Casts, normalises, unpacks and puts heads first, [B, heads, T, channels]; then the same backwards.

    Raises:
        ValueError: HV is not a multiple of H, or the initial state has another shape.
    """
    if v.shape[2] % q.shape[2]:
        raise ValueError(f"{v.shape[2]} value heads are not a multiple of {q.shape[2]} key heads")
    dtype = working_dtype(q, k, v)

    def prepared(x: Tensor) -> Tensor:
        padded = x if cu_seqlens is None else pad_packed(x, cu_seqlens)
        return padded.to(dtype).transpose(1, 2)

    queries, keys, values, steps = prepared(q), prepared(k), prepared(v), prepared(beta)
    decays = None if g is None else prepared(g)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if use_qk_l2norm:
        queries, keys = queries * (scale * _inverse_l2_norm(queries)), keys * _inverse_l2_norm(keys)
    else:
        queries = queries * scale

    state_shape = (values.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    if initial_state is None:
        state = values.new_zeros(state_shape)
    else:
        state = initial_state.to(dtype).transpose(2, 3) if state_v_first else initial_state.to(dtype)
        if state.shape != state_shape:
            raise ValueError(f"the initial state is {list(state.shape)} as [B, HV, K, V], not {list(state_shape)}")

    output, state = recurrence(queries, keys, values, decays, steps, state)
    output = output.transpose(1, 2)
    if cu_seqlens is not None:
        output = pack_padded(output, cu_seqlens)
    return output.to(v.dtype), (state.transpose(2, 3).contiguous() if state_v_first else state)


def _inverse_l2_norm(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + L2_NORM_EPSILON).rsqrt()


def _token_by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [B, H, T, K], v [B, HV, T, V], beta [B, HV, T], g likewise or [B, HV, T, K], state [B, HV, K, V]."""
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    decay = None if g is None else g.exp().reshape(*g.shape[:3], -1, 1)  # [B, HV, T, 1 or K, 1]
    outputs = []
    for t in range(v.shape[2]):
        if decay is not None:
            state = state * decay[:, :, t]
        key = k[:, :, t, :, None]  # [B, HV, K, 1]
        error = v[:, :, t, None, :] - key.transpose(2, 3) @ state  # [B, HV, 1, V]
        state = state + key @ (beta[:, :, t, None, None] * error)
        outputs.append(q[:, :, t, None, :] @ state)
    return torch.cat(outputs, dim=2), state


def _chunk_by_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Shapes as in `_token_by_token`.

    Within a chunk that starts from state S, with b_i the summed log decay of its tokens up to i, the
    corrections u_i = beta_i (v_i - [what the state holds for k_i]) solve a triangular system:

        u_i + sum_{j<i} beta_i exp(b_i - b_j) (k_i . k_j) u_j = beta_i v_i - beta_i exp(b_i) S^T k_i

    Its solution is linear in S, so all chunks are solved at once and only S goes from chunk to chunk.
    A token of zeros changes nothing, so the last chunk is filled up with them.
    """
    batch, heads, tokens, _ = v.shape
    key_heads, size = k.shape[1], min(CHUNK_SIZE, tokens + -tokens % BLOCK_SIZE)

    def chunked(x: Tensor, own_heads: int) -> Tensor:
        padding = (0, 0) * (x.ndim - 3) + (0, -tokens % size)
        x = F.pad(x, padding) if tokens % size else x
        return x.reshape(batch, key_heads, own_heads // key_heads, -1, size, *x.shape[3:]).contiguous()

    q, k = chunked(q, key_heads), chunked(k, key_heads)  # [B, H, 1, M, C, K]
    v, beta = chunked(v, heads), chunked(beta, heads)[..., None]  # [B, H, r, M, C, V], [B, H, r, M, C, 1]
    system, scores = beta * (k @ k.transpose(-1, -2)), q @ k.transpose(-1, -2)  # [B, H, r or 1, M, C, C]
    reads, keys, queries = beta * k, k, q
    chunk_decay = None
    if g is not None:
        g = chunked(g, heads)
        decay = decay_between_tokens(g)
        from_start = g.cumsum(-1).exp()[..., None]  # [B, H, r, M, C, 1]
        system, scores = system * decay, scores * decay
        reads, queries, keys = reads * from_start, q * from_start, k * decay[..., -1, :, None]
        chunk_decay = from_start[..., -1:, :]

    right_sides = torch.cat([beta * v, reads], dim=-1)
    solved = solve_unit_lower(system, right_sides)
    corrections, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    starts, corrections, state = scan_chunks(corrections, reads, keys, chunk_decay, state)
    output = queries @ starts + scores.tril() @ corrections
    return output.reshape(batch, heads, -1, v.shape[-1])[:, :, :tokens], state


def decay_between_tokens(g: Tensor) -> Tensor:
    """exp(g_{j+1} + ... + g_i) at [..., i, j] for i >= j, 1 above the diagonal; g [..., C].

    Each sum has its own terms only. As a difference of two cumulative sums it would lose the small
    decays of a chunk in which one token forgets everything (g = -50).
    """
    size = g.shape[-1]
    token = torch.arange(size, device=g.device)
    summed, i, j = token[:, None, None], token[:, None], token
    selection = ((summed <= i) & (summed > j)).to(g.dtype)  # [C, C, C]
    return (g.reshape(-1, size) @ selection.flatten(1)).exp().view(*g.shape, size)


def scan_chunks(
    corrections: Tensor, reads: Tensor, keys: Tensor, chunk_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the state from chunk to chunk.

    corrections [B, H, r, M, C, V] for an empty state, reads [B, H, r, M, C, K] what they lose per unit of state,
    keys [B, H, r or 1, M, C, K] decayed to the end of the chunk, chunk_decay [B, H, r, M, 1 or K, 1].

    Returns the state at the start of each chunk [B, H, r, M, K, V], the corrections and the final state [B, HV, K, V].
    """
    state_shape = state.shape
    state = state.unflatten(1, corrections.shape[1:3])
    starts, corrected = [], []
    for chunk in range(corrections.shape[3]):
        starts.append(state)
        corrected.append(corrections[:, :, :, chunk] - reads[:, :, :, chunk] @ state)
        kept = state if chunk_decay is None else state * chunk_decay[:, :, :, chunk]
        state = kept + keys[:, :, :, chunk].transpose(-1, -2) @ corrected[-1]
    return torch.stack(starts, dim=3), torch.stack(corrected, dim=3), state.reshape(state_shape)
