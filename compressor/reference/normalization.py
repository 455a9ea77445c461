"""RMS and layer normalisation, plain and gated, with their derivatives.

    y = (x - mean) * rstd * weight + bias,  rstd = 1 / sqrt(mean((x - mean)^2) + eps),  and mean = 0 for RMSNorm

Computed in float32, or in float64 if the input is float64. Every x is [rows, D]; with G groups, the
rows go through the groups in turn and weight and bias are [G * D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.reference.activation import activate
from compressor.reference.precision import working_dtype


@dataclass(frozen=True)
class Standardized:
    """x before weight and bias, [rows, D]; mean (None for RMSNorm) and rstd are [rows]."""

    x: Tensor
    mean: Tensor | None
    rstd: Tensor


def standardize(x: Tensor, eps: float, is_rms_norm: bool) -> Standardized:
    """Everything but weight and bias; x [rows, D]."""
    x = x.to(working_dtype(x))
    mean = None if is_rms_norm else x.mean(-1)
    if mean is not None:
        x = x - mean[:, None]
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return Standardized(x * rstd[:, None], mean, rstd)


def restandardize(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Standardized:
    """What `standardize` returned, from its input and its statistics."""
    x = x.to(working_dtype(x))
    return Standardized((x if mean is None else x - mean[:, None]) * rstd[:, None], mean, rstd)


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int = 1) -> Tensor:
    """x * weight + bias, either of which may be absent."""
    grouped = x.unflatten(0, (-1, groups))
    if weight is not None:
        grouped = grouped * weight.to(x.dtype).view(groups, -1)
    if bias is not None:
        grouped = grouped + bias.to(x.dtype).view(groups, -1)
    return grouped.flatten(0, 1)


@dataclass(frozen=True)
class NormGradients:
    """Of the normalised tensor's input, weight and bias; None where there is no such parameter."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


def norm_gradients(
    dy: Tensor, standardized: Standardized, weight: Tensor | None, bias: Tensor | None, groups: int = 1
) -> NormGradients:
    """Gradients of `scale_and_shift(standardize(x))` for the gradient dy [rows, D] of its result."""
    x = standardized.x
    grouped = dy.to(x.dtype).unflatten(0, (-1, groups))
    dweight = None if weight is None else (grouped * x.view_as(grouped)).sum(0).view_as(weight).to(weight.dtype)
    dbias = None if bias is None else grouped.sum(0).view_as(bias).to(bias.dtype)
    dstandardized = scale_and_shift(dy.to(x.dtype), weight, None, groups)
    dx = dstandardized - x * (dstandardized * x).mean(-1, keepdim=True)
    if standardized.mean is not None:
        dx = dx - dstandardized.mean(-1, keepdim=True)
    return NormGradients(dx * standardized.rstd[:, None], dweight, dbias)


def gate_gradients(dy: Tensor, normalized: Tensor, gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of `normalized` and `gate` for the gradient dy of normalized * activation(gate); all [rows, D]."""
    dtype = normalized.dtype
    with torch.enable_grad():
        leaf = gate.detach().to(dtype).requires_grad_()
        activated = activate(leaf, activation)
    dgate = torch.autograd.grad(activated, leaf, dy.to(dtype) * normalized)[0]
    return dy.to(dtype) * activated.detach(), dgate
