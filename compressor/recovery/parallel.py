"""Several processes that train one model: every one has all of it, and a share of each batch."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressor.errors import RequestError, RunError

_WHOLE_MODELS = frozenset({DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU})


def refuse_sharding(accelerator: Accelerator) -> None:
    """Raise RequestError where accelerate was launched to split the model over processes."""
    if accelerator.distributed_type not in _WHOLE_MODELS:
        raise RequestError(
            f"accelerate was launched for {accelerator.distributed_type.value}, and recovery trains with one process "
            "or with DistributedDataParallel; launch it with --multi_gpu alone."
        )


def averaging_gradients(module: nn.Module, accelerator: Accelerator, device: torch.device) -> nn.Module:
    """`module`, whose backward pass leaves the mean of all processes' gradients where there are several.

    Trained tensors begin as the first process has them. accelerate's own preparation would hold the wrapper, and
    the hooks of the wrapper on the parameters, beyond the training.
    """
    if accelerator.num_processes == 1:
        return module
    return DistributedDataParallel(module, device_ids=None if device.type == "cpu" else [device])


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
