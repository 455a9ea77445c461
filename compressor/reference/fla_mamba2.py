"""The reference behind what fla's Mamba2 layer calls of mamba_ssm and of fla's own kernels (fla 0.6, mamba_ssm 2).

The names of the arguments are those of the kernels. What only steers a kernel is accepted and not used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from compressor.reference.mamba2 import chunked_scan, gated_rms_norm, recurrent_scan, step_size
from compressor.reference.precision import working_dtype

_NO_LIMITS = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMITS,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """x, z [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N], D [H] or [H, P]: y [B, T, H, P] and the state."""
    y, state = chunked_scan(x, step_size(dt, dt_bias, dt_softplus, dt_limit), A, B, C, initial_states)
    y = _skipped_and_gated(y, x, D, z)
    return (y, state) if return_final_states else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """One token: x and z [B, H, P], B and C [B, G, N]; the state [B, H, P, N] takes it in, in place.

    dt [B, H, P], A [H, P, N], dt_bias and D [H, P] say the same for every channel of a head, D excepted.
    """
    steps = step_size(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus, _NO_LIMITS)
    y, last = recurrent_scan(x[:, None], steps[:, None], A[:, 0, 0], B[:, None], C[:, None], state)
    state.copy_(last)
    return _skipped_and_gated(y[:, 0], x, D, z)


def _skipped_and_gated(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """(y + D x) silu(z) in the dtype of x."""
    if D is not None:
        y = y + (D[:, None] if D.ndim == 1 else D).to(y.dtype) * x.to(y.dtype)
    if z is not None:
        y = y * F.silu(z.to(working_dtype(z)))
    return y.to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """fla.modules.norm.layernorm_gated.rmsnorm_fn."""
    y = gated_rms_norm(x, weight, z, eps, group_size or x.shape[-1], norm_before_gate)
    return y if bias is None else y + bias


def torch_forward(
    layer: nn.Module,
    hidden_states: Tensor,
    last_state: dict[str, Any] | None = None,
    use_cache: bool = False,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """fla's own path for GPUs, in place of its `torch_forward`.

    That one gives head h the group h % G where kernels, single steps and checkpoints mean h // (H / G), so with
    several groups it computes another model. A cache is always asked for: without one, training would call a kernel
    that reads the weights of the projections itself.
    """
    kernels_forward: Any = type(layer).__dict__["cuda_kernels_forward"]
    result: tuple[Tensor, Tensor, Tensor] = kernels_forward(layer, hidden_states, last_state, True, attention_mask)
    return result
