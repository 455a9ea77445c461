"""What backward passes take of a device's memory, estimated before anything is loaded, and what the device has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from compressor.errors import RequestError
from compressor.naming import Naming
from compressor.recovery.losses import LOGITS_PER_CHUNK

TOKENS_PER_CHUNK = 64
"""Tokens of one chunk of a chunked recurrence, which keeps a state for each."""
COPIES_OF_ACTIVATIONS = 6
"""Float32 tensors of the width of a layer's linear modules that are alive while the layer is passed backwards. On a CPU
measured peaks lie at six to nine tenths of what this and the two constants below give."""
COPIES_OF_STATES = 4
COPIES_OF_LOGITS = 4
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """Sizes that decide the memory of one backward pass with recomputed layers; all but `tokens` are of the model.

    Attributes:
        tokens: of a batch.
        element_bytes: of an element of the model's weights and activations.
        parameters: elements of all weights.
        differentiated: elements of the weights whose gradients are summed.
        layers: of the decoder.
        hidden_size: width of the residual stream.
        layer_width: inputs and outputs of all linear modules of a layer, of the widest one.
        state_elements: of the recurrent states of a layer.
        vocabulary: outputs of the language-model head.
    """

    tokens: int
    element_bytes: int
    parameters: int
    differentiated: int
    layers: int
    hidden_size: int
    layer_width: int
    state_elements: int
    vocabulary: int

    @property
    def bytes(self) -> int:
        """Weights, sums of gradients and inputs of all layers; above these the logits of one chunk of rows, and later
        the activations of one layer."""
        chunks = -(-self.tokens // TOKENS_PER_CHUNK)
        activations = COPIES_OF_ACTIVATIONS * self.tokens * self.layer_width
        activations += COPIES_OF_STATES * chunks * self.state_elements
        logits = COPIES_OF_LOGITS * min(self.tokens * self.vocabulary, LOGITS_PER_CHUNK)
        return (
            self.parameters * self.element_bytes
            + self.differentiated * (_FLOAT32_BYTES + self.element_bytes)
            + 2 * self.tokens * self.layers * self.hidden_size * self.element_bytes
            + max(activations, logits) * _FLOAT32_BYTES
        )


def refuse_beyond(need: BackwardPass, available: int, device: torch.device, name: Naming) -> None:
    """Refuse passes that would end for want of memory. Messages call a setting `name(setting)`.

    Raises:
        RequestError: `need` is more than the `available` bytes of `device`.
    """
    if need.bytes > available:
        raise RequestError(
            f"the loss's gradient needs about {need.bytes / 1e9:,.1f} GB for a backward pass over {need.tokens:,} "
            f"tokens and {device} has {available / 1e9:,.1f} GB free; lower {name('calibration.batch_size')} or "
            f"{name('calibration.sequence_length')}, or choose a method without backward passes, such as drrqr."
        )


def available_bytes(device: torch.device) -> int:
    """Memory of the device that nothing uses; on a CPU within the limit of the process's control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = (_of_machine(), _of_control_group(Path("/sys/fs/cgroup")))
    return min(limit for limit in limits if limit is not None)


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _of_control_group(folder: Path) -> int | None:
    """None where there is no limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if limit == "max" else max(int(limit) - int(used), 0)
