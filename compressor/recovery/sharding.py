"""FSDP2: the decoder layers of a student split over processes, trained and frozen tensors alike.

Each process keeps a part of every tensor of a layer, and of AdamW's state; a layer's tensors are brought together while
it runs. Embeddings and head stay whole in every process: they are tied in many models, and the loss takes the head's
gradient over chunks of its own. So does the teacher, which the main process evaluates alone.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (arXiv:2304.11277).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from compressor.errors import RequestError


def sharding(accelerator: Accelerator) -> FullyShardedDataParallelPlugin | None:
    """What accelerate was launched with; None where it was not to split a model, or there is one process."""
    if accelerator.num_processes == 1:
        return None
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin: FullyShardedDataParallelPlugin = accelerator.state.fsdp_plugin
        return plugin
    # accelerate 1.15 describes processes on CPUs as MULTI_CPU whatever they were launched for.
    on_cpus = accelerator.distributed_type == DistributedType.MULTI_CPU
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return FullyShardedDataParallelPlugin() if on_cpus and asked else None


def refuse_other_sharding(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise RequestError for what FSDP can do and recovery does not."""
    if plugin.fsdp_version != 2:
        raise RequestError(
            f"accelerate was launched for FSDP {plugin.fsdp_version}, and recovery shards with FSDP 2; launch it with "
            "--use_fsdp --fsdp_version 2."
        )
    if plugin.activation_checkpointing:
        raise RequestError(
            "accelerate was launched with --fsdp_activation_checkpointing, and recovery computes activations again "
            "itself; give it gradient_checkpointing instead."
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise RequestError(
            "accelerate was launched with --fsdp_offload_params, and recovery keeps what it trains on the GPUs; launch "
            "it without, on more processes."
        )


def shard(
    model: PreTrainedModel,
    decoder: nn.Module,
    trainable: Mapping[str, nn.Parameter],
    plugin: FullyShardedDataParallelPlugin,
    processes: int,
) -> dict[str, nn.Parameter]:
    """Split the layers of `decoder` over all `processes`, in place; the parts of `trainable` here, by the same names.

    Every process calls it with the same values. The tensors of `trainable` are empty afterwards, see `bring_back`.

    Raises:
        RequestError: the stock class has no layers that it could split.
        ValueError: a trained tensor lies in none of them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mesh = init_device_mesh(model.device.type, (processes,))
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise RequestError(
            f"{type(decoder).__name__} has no layers that FSDP could split over processes; launch with --multi_gpu."
        )
    reshard = bool(plugin.reshard_after_forward)
    for layer in reversed(layers):  # one inside another comes first
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    beside = {parameter for parameter in decoder.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(decoder, mesh=mesh, reshard_after_forward=reshard, ignored_params=beside)
    parts = {name: model.get_parameter(names[id(parameter)]) for name, parameter in trainable.items()}
    for name, part in parts.items():
        if not isinstance(part, DTensor):
            raise ValueError(f"{name} lies in no layer of {type(decoder).__name__}, and so cannot be split.")
        trainable[name].data = torch.empty(0, dtype=part.dtype, device=part.device)
    _make_buffers(layers)
    return parts


def _make_buffers(layers: Sequence[nn.Module]) -> None:
    """Of what is brought together, which FSDP keeps: made in inference mode, by an evaluation, no gradient flows."""
    for layer in layers:
        if isinstance(layer, FSDPModule):
            layer.unshard()
            layer.reshard()


@contextmanager
def quiet_views() -> Iterator[None]:
    """Without FSDP's advice on hidden states that are views: nothing here changes them in place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view", category=UserWarning)
        yield


def bring_back(parts: Mapping[str, Tensor], trainable: Mapping[str, nn.Parameter]) -> None:
    """Give `trainable` the values of the `parts` that `shard` made of it, whole, in every process."""
    for name, part in parts.items():
        trainable[name].data = whole(part.detach())


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which `tensor` is a part, where it is one; then every process calls it."""
    if not isinstance(tensor, DTensor):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


def part_like(value: Tensor, other: Tensor) -> Tensor:
    """What this process keeps of `value`, which every process has whole, as `other` is kept; on its device."""
    value = value.to(other.device)
    if not isinstance(other, DTensor):
        return value
    return distribute_tensor(value, other.device_mesh, other.placements, src_data_rank=None)
