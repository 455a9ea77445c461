"""The scan of Mamba-2, token by token and in chunks (Dao and Gu 2024, arXiv 2405.21060).

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        y_t = S_t C_t + D x_t

B is the key and C the query of linear attention, x the value: nothing is normalised and nothing scaled.

Notation used for tensor shapes:
    B  sequences     T  tokens     H  value heads     P  channels of a value head
    G  groups, each with one key and one query for H / G heads in a row     N  channels of the state

Computed in float32, or in float64 if an input is float64; differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.precision import working_dtype

CHUNK = 64
"""Tokens whose outputs are computed at once."""


def recurrent_scan(
    x: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token after the other: the definition.

    Args:
        x: [B, T, H, P].
        dt: step sizes [B, T, H], after bias, softplus and limits.
        rate: A, [H], negative.
        key: B, [B, T, G, N].
        query: C, [B, T, G, N].
        initial_state: [B, H, P, N], zeros if None.

    Returns:
        y without the term of D, [B, T, H, P], and the last state [B, H, P, N], both in the working dtype.
    """
    x, dt, rate, key, query, state = _prepared(x, dt, rate, key, query, initial_state)
    outputs = []
    for t in range(x.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * key[:, t, :, None]
        state = (dt[:, t] * rate).exp()[..., None, None] * state + added
        outputs.append((state * query[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state


def chunked_scan(
    x: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `recurrent_scan`, to rounding; products of whole chunks instead of a step a token."""
    x, dt, rate, key, query, state = _prepared(x, dt, rate, key, query, initial_state)
    steps = (tensor.split(CHUNK, dim=1) for tensor in (x * dt[..., None], dt * rate, key, query))
    outputs = []
    for value, log_decay, k, q in zip(*steps, strict=True):
        output, state = _chunk(value, log_decay, k, q, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def _chunk(value: Tensor, log_decay: Tensor, key: Tensor, query: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """value [B, Q, H, P] times its step size, log_decay [B, Q, H], key and query [B, Q, H, N], state [B, H, P, N]."""
    reached = log_decay.cumsum(1).transpose(1, 2)  # [B, H, Q]
    between = reached[..., :, None] - reached[..., None, :]
    future = torch.ones(between.shape[-2:], dtype=torch.bool, device=between.device).triu(1)
    decay = between.masked_fill(future, -torch.inf).exp()
    scores = torch.einsum("bihn,bjhn->bhij", query, key) * decay
    carried = torch.einsum("bihn,bhpn->bihp", query, state) * reached.exp().transpose(1, 2)[..., None]
    output = torch.einsum("bhij,bjhp->bihp", scores, value) + carried
    remaining = (reached[..., -1:] - reached).exp().transpose(1, 2)[..., None]  # [B, Q, H, 1]
    added = torch.einsum("bjhp,bjhn->bhpn", value * remaining, key)
    return output, state * reached[..., -1].exp()[..., None, None] + added


def _prepared(
    x: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All in the working dtype, keys and queries repeated for the heads of their group, and a first state."""
    dtype = working_dtype(x, dt, key, query)
    group = x.shape[2] // key.shape[2]
    key, query = (tensor.to(dtype).repeat_interleave(group, dim=2) for tensor in (key, query))
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], key.shape[-1])
    return x.to(dtype), dt.to(dtype), rate.to(dtype), key, query, initial_state.to(dtype)


def step_size(dt: Tensor, bias: Tensor | None, softplus: bool, limits: tuple[float, float]) -> Tensor:
    """dt [..., H] as the scan takes it, in the working dtype; bias [H], limits the least and the largest."""
    raw = dt.to(working_dtype(dt))
    raw = raw if bias is None else raw + bias.to(raw.dtype)
    return (F.softplus(raw) if softplus else raw).clamp(*limits)


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, group_size: int, norm_before_gate: bool
) -> Tensor:
    """RMS norm of x [..., D] over groups of `group_size` channels, times weight [D]; the SiLU of the gate [..., D]
    multiplies x before the norm, or what leaves it. The result has the dtype of x.
    """
    dtype = working_dtype(x)
    factor = None if gate is None else F.silu(gate.to(dtype))
    inputs = x.to(dtype) if factor is None or norm_before_gate else x.to(dtype) * factor
    grouped = inputs.unflatten(-1, (-1, group_size))
    normed = (grouped * (grouped.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight.to(dtype)
    return (normed if factor is None or not norm_before_gate else normed * factor).to(x.dtype)
