"""The reference behind the signatures of the kernels that fla's modules and layers call (fla 0.6).

fla calls these by keyword, so the names of the arguments are fla's. What only steers a kernel
(chunk indices, copies of lengths on the host, memory layout) is accepted and not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference import activation as activations
from compressor.reference.attention import attention_over_residuals, packed_attention
from compressor.reference.convolution import causal_convolution, final_history, step
from compressor.reference.normalization import (
    NormGradients,
    gate_gradients,
    norm_gradients,
    restandardize,
    scale_and_shift,
    standardize,
)
from compressor.reference.precision import working_dtype
from compressor.reference.rotary import rotate

_NormOutput = tuple[Tensor, Tensor | None, Tensor, Tensor]


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> _NormOutput:
    """The normalised rows, mean, rstd, and the sum x + residual that goes on unnormalised."""
    summed, residual_out = _add_residual(x, residual, residual_dtype)
    standardized = standardize(summed, eps, is_rms_norm)
    y = scale_and_shift(standardized.x, weight, bias, num_groups)
    return y.to(out_dtype or x.dtype), standardized.mean, standardized.rstd, residual_out


def layer_norm_gated_fwd(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
) -> _NormOutput:
    """As `layer_norm_fwd`, times activation(g)."""
    summed, residual_out = _add_residual(x, residual, residual_dtype)
    standardized = standardize(summed, eps, is_rms_norm)
    y = scale_and_shift(standardized.x, weight, bias) * activations.activate(g.to(standardized.x.dtype), activation)
    return y.to(out_dtype or x.dtype), standardized.mean, standardized.rstd, residual_out


def _add_residual(x: Tensor, residual: Tensor | None, residual_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """x + residual in the working dtype, and as it is handed on: rounded to the residual's dtype."""
    if residual is None:
        return x, x if residual_dtype is None else x.to(residual_dtype)
    summed = x.to(working_dtype(x)) + residual.to(working_dtype(x))
    return summed, summed.to(residual.dtype)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    mean: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias and residual, and the output again if it is asked for."""
    standardized = restandardize(x, mean, rstd)
    gradients = norm_gradients(dy, standardized, weight, bias, num_groups)
    dx, dresidual = _input_gradients(gradients, x, dres, has_residual, x_dtype)
    if not recompute_output:
        return dx, gradients.weight, gradients.bias, dresidual
    y = scale_and_shift(standardized.x, weight, bias, num_groups)
    return dx, gradients.weight, gradients.bias, dresidual, y.to(dy.dtype)


def layer_norm_gated_bwd(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    *,
    mean: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, g, weight, bias and residual, and the output again if it is asked for."""
    standardized = restandardize(x, mean, rstd)
    normalized = scale_and_shift(standardized.x, weight, bias)
    dnormalized, dgate = gate_gradients(dy, normalized, g, activation)
    gradients = norm_gradients(dnormalized, standardized, weight, bias)
    dx, dresidual_in = _input_gradients(gradients, x, dresidual, has_residual, x_dtype)
    dg = dgate.to(x_dtype or g.dtype)
    if not recompute_output:
        return dx, dg, gradients.weight, gradients.bias, dresidual_in
    y = normalized * activations.activate(g.to(normalized.dtype), activation)
    return dx, dg, gradients.weight, gradients.bias, dresidual_in, y.to(dy.dtype)


def _input_gradients(
    gradients: NormGradients,
    x: Tensor,
    dresidual: Tensor | None,
    has_residual: bool,
    x_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Of x and of the residual that was added to it: the same, in their own dtypes."""
    dx = gradients.x if dresidual is None else gradients.x + dresidual.to(gradients.x.dtype)
    return dx.to(x_dtype or x.dtype), dx.to(x.dtype) if has_residual else None


def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output in the shape of x, and the final state [N, D, W]."""
    flat = x.flatten(2)
    y = causal_convolution(flat, weight, bias, initial_state, activation, cu_seqlens).view(x.shape)
    if residual is not None:
        y = y + residual
    state = final_history(flat, weight.shape[1], initial_state, cu_seqlens) if output_final_state else None
    return y, state


def causal_conv1d_bwd(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight, bias, residual and initial state."""
    leaves = [x, weight, bias, initial_state]

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> tuple[Tensor, ...]:
        y, final = causal_conv1d_fwd(x, weight, bias, None, state, dht is not None, activation, cu_seqlens)
        return (y,) if final is None else (y, final)

    dx, dweight, dbias, dstate = _recomputed_gradients(forward, leaves, [dy] if dht is None else [dy, dht])
    return dx, dweight, dbias, None if residual is None else dy, dstate


def _recomputed_gradients(
    forward: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor | None], output_gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of the inputs, None where the input is None, from a forward pass run once more."""
    with torch.enable_grad():
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
        outputs = forward(*leaves)
    gradients = iter(torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], output_gradients))
    return [None if leaf is None else next(gradients) for leaf in leaves]


def causal_conv1d_update_states(
    x: Tensor, state_len: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The convolution's state after x, [N, D, state_len]; packed x may come without its batch dimension."""
    return final_history(x[None] if x.ndim == 2 else x, state_len, initial_state, cu_seqlens)


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each of N sequences in any shape with N * D elements; the cache [N, D, W] changes in place."""
    if weight is None:
        raise ValueError("a convolution needs a weight")
    y = step(x.reshape(-1, weight.shape[0]), cache, weight, bias, activation).view(x.shape)
    return (y if residual is None else y + residual.view(x.shape)), cache


def swiglu_fwd(x: Tensor, y: Tensor, output_contiguous: bool = False) -> Tensor:
    return activations.swiglu(x, y)


def swiglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of x and y for the gradient g of the output, and the output if `use_weight`."""
    gradients = _recomputed_gradients(lambda x, y: (activations.swiglu(x, y),), [x, y], [g])
    return (*gradients, activations.swiglu(x, y)) if use_weight else tuple(gradients)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(activations.swiglu(x, y), weight, bias)


def powglu_fwd(x: Tensor, y: Tensor, power: float = 3.0, output_contiguous: bool = False) -> Tensor:
    return activations.powglu(x, y, power)


def powglu_fwdbwd(
    x: Tensor, y: Tensor, g: Tensor, power: float = 3.0, use_weight: bool = False, output_contiguous: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients of x and y for the gradient g of the output, and the output if `use_weight`."""
    gradients = _recomputed_gradients(lambda x, y: (activations.powglu(x, y, power),), [x, y], [g])
    return (*gradients, activations.powglu(x, y, power)) if use_weight else tuple(gradients)


def powglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, power: float = 3.0) -> Tensor:
    return F.linear(activations.powglu(x, y, power), weight, bias)


def rotary_embedding_fwdbwd(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Rotated x; by the negative angles if `conjugate`, which is the backward pass."""
    rotated = rotate(x, cos, -sin if conjugate else sin, seqlen_offsets, cu_seqlens, interleaved)
    return x.copy_(rotated) if inplace else rotated


def fused_attnres(
    query: Tensor,
    residuals: Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """The mixture of residual streams, and the softmax if `return_weights`."""
    mixed, probabilities = attention_over_residuals(query, residuals, rms_weight, output_rms_weight, rms_eps, scale)
    return (mixed, probabilities) if return_weights else mixed


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    return packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window_size)
