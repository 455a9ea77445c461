"""The reference behind the signatures of fla's recurrences (fla 0.6).

fla's layers call these by keyword, so the names of the arguments are fla's. What only steers a
kernel is accepted and not used.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.channel_decay import chunked_channel_decay_delta_rule
from compressor.reference.delta_product import chunked_gated_delta_product
from compressor.reference.precision import working_dtype
from compressor.reference.recurrence import chunked_gated_delta_rule, recurrent_gated_delta_rule

_Result = tuple[Tensor, Tensor | None]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> _Result:
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule."""
    output, state = chunked_gated_delta_rule(
        q,
        k,
        v,
        _log_decay(g, A_log, dt_bias) if use_gate_in_kernel else g,
        _step_size(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return output, state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule, without decays per channel (gk, gv)."""
    if gk is not None or gv is not None:
        raise ValueError("the reference has one decay a head: gk and gv must be None")
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    output, state = recurrent_gated_delta_rule(
        q,
        k,
        v,
        _log_decay(g, A_log, dt_bias) if use_gate_in_kernel else g,
        _step_size(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return output, state if output_final_state else None


def _log_decay(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), in the working dtype; g [B, T, HV], A_log and dt_bias [HV]."""
    if g is None or A_log is None:
        raise ValueError("a gate computed in the kernel needs both g and A_log")
    dtype = working_dtype(g)
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype)
    return -A_log.to(dtype).exp() * F.softplus(raw)


def _step_size(beta: Tensor, allow_neg_eigval: bool) -> Tensor:
    """sigmoid(beta), doubled where the transition may have negative eigenvalues."""
    step = torch.sigmoid(beta.to(working_dtype(beta)))
    return 2 * step if allow_neg_eigval else step


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
) -> _Result:
    """fla.ops.delta_rule.chunk_delta_rule."""
    output, state = chunked_gated_delta_rule(
        q,
        k,
        v,
        None,
        beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    return output, state if output_final_state else None


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """fla.ops.delta_rule.fused_recurrent_delta_rule."""
    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
) -> _Result:
    """fla.ops.gated_delta_product.chunk_gated_delta_product."""
    output, state = chunked_gated_delta_product(
        q,
        k,
        v,
        g,
        beta,
        num_householder,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    return output, state if output_final_state else None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> _Result:
    """fla.ops.kda.chunk_kda, without intermediate states."""
    output, state = chunked_channel_decay_delta_rule(
        q,
        k,
        v,
        _channel_log_decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g,
        _step_size(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return output, state if output_final_state else None


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Result:
    """fla.ops.kda.fused_recurrent_kda."""
    output, state = recurrent_gated_delta_rule(
        q,
        k,
        v,
        _channel_log_decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g,
        _step_size(beta, allow_neg_eigval) if use_beta_sigmoid_in_kernel else beta,
        scale=scale,
        initial_state=initial_state,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return output, state if output_final_state else None


def _channel_log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """One a key channel, in the working dtype; g [B, T, HV, K], A_log [HV], dt_bias [HV K].

    -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)) where there is a bound.
    """
    if A_log is None:
        raise ValueError("a gate computed in the kernel needs A_log")
    dtype = working_dtype(g)
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype).view(g.shape[-2:])
    rate = A_log.to(dtype).exp()[:, None]
    return -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
