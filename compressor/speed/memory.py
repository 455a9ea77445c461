"""Device memory that a piece of work takes at its peak."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True)
class Peak:
    """`added` bytes: the most that was allocated beyond what was there before; None on a CPU, where none is counted."""

    added: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Fills `Peak.added` in at the end of the block."""
    peak = Peak()
    if device.type != "cuda":
        yield peak
        return
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield peak
    torch.cuda.synchronize(device)
    peak.added = torch.cuda.max_memory_allocated(device) - before


def with_parameters(peak: Peak, module: nn.Module) -> int | None:
    """Bytes of the peak and of the module's own parameters and buffers."""
    return None if peak.added is None else peak.added + module_bytes(module)


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers; tied ones count once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def release(device: torch.device, cycles: bool = False) -> None:
    """Give what is no longer referenced back to the device; with `cycles`, also what is held by itself alone.

    Looking for cycles takes as long as a small measurement where large libraries are loaded.
    """
    if cycles:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
