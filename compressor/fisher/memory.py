"""What Fisher selection takes of a device's memory beside the model, estimated before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.errors import RequestError
from compressor.fisher.settings import FisherSettings
from compressor.naming import Naming
from compressor.recovery.losses import LOGITS_PER_CHUNK

_ACTIVATIONS_PER_LAYER = 40
"""Tensors of hidden size that the backward pass through one layer needs."""

TOKENS_AT_ONCE_ON_CPU = 4096
"""Of a batch where no GPU computes: longer ones are not faster, and stages take turns more evenly with short ones."""

_MEMORY_FILE = Path("/proc/meminfo")


class TooLittleMemoryError(RequestError):
    """Fisher selection does not fit beside what is in memory already; a method without gradients may."""


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


def sequences_at_once(batch_size: int, sequences: int, length: int, device: torch.device) -> int:
    """Of a batch of at most `batch_size` of the `sequences` of one process, which have up to `length` tokens."""
    most = max(1, min(batch_size, sequences))
    return min(most, max(1, TOKENS_AT_ONCE_ON_CPU // length)) if device.type == "cpu" else most


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


def in_words(setting: str, value: object = None, /) -> str:
    """Names a setting where neither a recipe nor an option gave it."""
    words = setting.rpartition(".")[2].replace("_", " ")
    return f"the {words}" if value is None else f"the {words} {value}"


def fitting_checkpointing(
    sizes: Sizes, settings: FisherSettings, free: int | None, device: torch.device, name: Naming = in_words
) -> bool:
    """Whether activations are to be computed anew, by the settings or by what `free` bytes of `device` have room for.

    Messages call a setting `name(setting)`.

    Raises:
        TooLittleMemoryError: the estimate is above `free`; None, where that is not known, refuses nothing.
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
    lower = f"lower {name('calibration.batch_size')} or {name('calibration.sequence_length')}"
    remedies = [lower, f"use {name('selection.method', 'drrqr')}, which needs no gradients"]
    if not checkpointing:
        remedies.insert(0, "turn gradient checkpointing on")
    if settings.scope == "layer":
        remedies.insert(0, "choose the scope head")
    raise TooLittleMemoryError(
        f"Fisher selection needs about {needed / 1e9:,.1f} GB beside the model for a batch of {sizes.batch} x "
        f"{sizes.tokens} tokens and {device} has {free / 1e9:,.1f} GB free; {', or '.join(remedies)}."
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
