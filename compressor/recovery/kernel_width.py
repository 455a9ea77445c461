"""Training at key widths whose backward kernels cannot be trusted: there the recurrence runs wider, on zeros."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from compressor.architectures.base import Architecture, Mixer
from compressor.architectures.masking import PaddedChannels

TRUSTED_WIDTH = 64
"""On an H200 with Triton 3.7.1 and fla 0.6.0 the gated backward kernel `chunk_bwd_kernel_dqkwg` reads memory that is
not its own while it is tuned for 32 channels; gradients at 64 and more agree with plain torch (see
tests/recovery/test_training_gpu.py)."""


def at_trusted_width(
    architecture: Architecture, model: PreTrainedModel, mixers: Sequence[Mixer], device: torch.device
) -> AbstractContextManager[None]:
    """While active, `model` computes what it did, on a GPU with at least `TRUSTED_WIDTH` channels a head."""
    width = mixers[0].head_k_dim
    if device.type != "cuda" or width >= TRUSTED_WIDTH:
        return nullcontext()
    scale = architecture.output_scale(TRUSTED_WIDTH, width)
    return architecture.tapped(model, mixers, PaddedChannels(width, TRUSTED_WIDTH, scale))
