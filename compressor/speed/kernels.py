"""Which kernels a piece of work spends its time in, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class Kernel:
    """`microseconds` in all `calls` of it together."""

    name: str
    calls: int
    microseconds: float


def top_kernels(call: Callable[[], object], device: torch.device, count: int = 12) -> list[Kernel]:
    """The `count` longest kernels of one `call`, or operators on a CPU, longest first."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    found = [
        Kernel(event.key[:120], event.count, event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        for event in profiler.key_averages()
        # Operators are listed with the time of the kernels that they launch, and so once more beside them.
        if not on_gpu or event.device_type.name == "CUDA"
    ]
    longest = sorted(found, key=lambda kernel: -kernel.microseconds)
    return [kernel for kernel in longest[:count] if kernel.microseconds > 0]
