"""What Fisher selection takes of a device's memory beside the model, estimated before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import RequestError
from compressor.fisher.settings import FisherSettings
from compressor.recovery.losses import LOGITS_PER_CHUNK

_ACTIVATIONS_PER_LAYER = 40
"""Tensors of hidden size that the backward pass through one layer needs."""

_MEMORY_FILE = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the estimate depends on beside the settings.

    Attributes:
        mixers, heads, width: L, H_k, d_k, see `architectures.base`.
        layers: of the whole stack, softmax layers too.
        batch, tokens: B and T of the largest batch.
        element_size: bytes of an activation.
    """

    mixers: int
    heads: int
    width: int
    layers: int
    hidden_size: int
    vocabulary: int
    batch: int
    tokens: int
    element_size: int


def sizes_of(model: PreTrainedModel, shape: tuple[int, int, int], largest: Tensor) -> Sizes:
    """`shape` is (L, H_k, d_k), `largest` the largest batch, int64 [B, T]."""
    config = model.config.get_text_config(decoder=True)
    return Sizes(
        mixers=shape[0],
        heads=shape[1],
        width=shape[2],
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocabulary=config.vocab_size,
        batch=largest.shape[0],
        tokens=largest.shape[1],
        element_size=model.dtype.itemsize,
    )


def estimated_bytes(sizes: Sizes, settings: FisherSettings, gradient_checkpointing: bool) -> int:
    """Bytes beside the model's own."""
    masks = sizes.mixers * sizes.heads * sizes.width
    tokens = sizes.batch * sizes.tokens
    fisher = 2 * 8 * masks * sizes.width * (sizes.heads if settings.scope == "layer" else 1)
    samples = sizes.batch * (-(-sizes.tokens // settings.segment) if settings.segment else 1)
    gradients = 3 * 8 * samples * masks
    layers_at_once = 1 if gradient_checkpointing else sizes.layers
    kept = sizes.layers + _ACTIVATIONS_PER_LAYER * layers_at_once
    activations = max(4, sizes.element_size) * tokens * sizes.hidden_size * kept
    logits = 5 * 4 * min(LOGITS_PER_CHUNK, tokens * sizes.vocabulary)
    return fisher + gradients + activations + logits


def fitting_checkpointing(sizes: Sizes, settings: FisherSettings, free: int | None, device: torch.device) -> bool:
    """Whether activations are to be computed anew, by the settings or by what `free` bytes of `device` have room for.

    Raises:
        RequestError: the estimate is above `free`; None, where that is not known, refuses nothing.
    """
    asked = settings.gradient_checkpointing
    if free is None:
        return asked is not False
    if asked is None and estimated_bytes(sizes, settings, False) <= free / 2:
        return False
    checkpointing = asked is not False
    needed = estimated_bytes(sizes, settings, checkpointing)
    if needed <= free:
        return checkpointing
    remedies = ["lower the batch size or the sequence length", "use the method drrqr, which needs no gradients"]
    if not checkpointing:
        remedies.insert(0, "turn gradient checkpointing on")
    if settings.scope == "layer":
        remedies.insert(0, "choose the scope head")
    raise RequestError(
        f"Fisher selection needs about {needed / 2**30:.3g} GiB beside the model for a batch of {sizes.batch} x "
        f"{sizes.tokens} tokens and {device} has {free / 2**30:.3g} GiB free; {', or '.join(remedies)}."
    )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on `device`; None where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if not _MEMORY_FILE.exists():
        return None
    fields = dict(line.split(":", 1) for line in _MEMORY_FILE.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
