"""Activations and gated linear units, computed in float32, or in float64 if the input is float64.

    swiglu(x, y) = x sigmoid(x) y
    powglu(x, y) = gate(x) y,  gate(x) = x ** (power / (sqrt(x) + 1)) sigmoid(x) for x > 0, else x sigmoid(x)

Sources: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202); Power Linear Unit (arXiv:2605.25704).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compressor.reference.precision import working_dtype


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Applies "silu" (its other name is "swish"), "sigmoid" or nothing (None), in the dtype of x.

    Raises:
        ValueError: another name.
    """
    if activation is None:
        return x
    if activation in ("silu", "swish"):
        return F.silu(x)
    if activation == "sigmoid":
        return torch.sigmoid(x)
    raise ValueError(f"activation {activation!r} is unknown; known are silu, swish, sigmoid and None")


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """x, y of one shape; the result has the dtype of x."""
    dtype = working_dtype(x)
    return F.silu(x.to(dtype)).mul_(y.to(dtype)).to(x.dtype)


def powglu(x: Tensor, y: Tensor, power: float) -> Tensor:
    """x, y of one shape; the result has the dtype of x."""
    gate = x.to(working_dtype(x))
    positive = torch.where(gate > 0, gate, 1.0)  # keeps the gradient of the unused branch finite
    gate = torch.where(gate > 0, positive ** (power / (positive.sqrt() + 1)), gate) * torch.sigmoid(gate)
    return (gate * y.to(gate.dtype)).to(x.dtype)
