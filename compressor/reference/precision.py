"""The dtype the reference computes in."""

from __future__ import annotations

import torch
from torch import Tensor


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32; the kernels, too, accumulate lower precisions in float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
