"""Several processes that train one model: each has all of it or a part of each layer, and a share of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from compressor.errors import RequestError, RunError
from compressor.recovery.sharding import refuse_other_sharding, sharding

_KNOWN = frozenset({DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP})


def refuse_other_engines(accelerator: Accelerator) -> None:
    """Raise RequestError where accelerate was launched for an engine that recovery does not train with."""
    if accelerator.distributed_type not in _KNOWN:
        raise RequestError(
            f"accelerate was launched for {accelerator.distributed_type.value}, and recovery trains with one process, "
            "DistributedDataParallel or FSDP 2; launch it with --multi_gpu, or with --use_fsdp --fsdp_version 2."
        )
    plugin = sharding(accelerator)
    if plugin is not None:
        refuse_other_sharding(plugin)


def averaging_gradients(module: nn.Module, accelerator: Accelerator, device: torch.device) -> nn.Module:
    """`module`, whose backward pass leaves the mean of all processes' gradients where there are several.

    Trained tensors begin as the first process has them. accelerate's own preparation would hold the wrapper, and
    the hooks of the wrapper on the parameters, beyond the training. What was split averages by itself.
    """
    if accelerator.num_processes == 1 or sharding(accelerator) is not None:
        return module
    return DistributedDataParallel(module, device_ids=None if device.type == "cpu" else [device])


@contextmanager
def own_gradients(module: nn.Module) -> Iterator[None]:
    """Inside, backward passes through what `averaging_gradients` gave add to this process's own gradients alone."""
    split = [part for part in module.modules() if isinstance(part, FSDPModule)]
    with module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext():
        for part in split:
            part.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for part in split:
                part.set_requires_gradient_sync(True, recurse=False)


def own_rows(batch: Tensor, accelerator: Accelerator) -> Tensor:
    """The share of this process: as many rows as every other."""
    return batch.chunk(accelerator.num_processes)[accelerator.process_index]


def refuse_different_starts(step: int, accelerator: Accelerator, device: torch.device) -> None:
    """Raise RunError unless all processes go on after the same step."""
    steps = sorted(set(accelerator.gather(torch.tensor([step], device=device)).tolist()))
    if len(steps) > 1:
        raise RunError(
            f"the processes found checkpoints of different steps ({', '.join(map(str, steps))}) and must go on from "
            "the same; let all of them see the same work folder."
        )
