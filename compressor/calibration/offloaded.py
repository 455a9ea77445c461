"""A model of which no decoder layer is in memory until it is asked for, and then alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.architectures.base import Mixer
from compressor.errors import RunError


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedModel:
    """A stock model in inference mode, whose embeddings, decoder layers and head are on the meta device.

    Buffers, and what else stands beside the layers, are on `device`. `weights` reads a parameter, by its name in the
    model and in the model's dtype, when it is asked for.
    """

    model: PreTrainedModel
    weights: Mapping[str, Tensor]
    device: torch.device

    @contextmanager
    def materialised(self, path: str) -> Iterator[None]:
        """While active, the parameters of the module at `path` are on the device; afterwards on none."""
        module = self.model.get_submodule(path)
        names = [name for name, _ in module.named_parameters()]
        try:
            for name in names:
                set_module_tensor_to_device(module, name, self.device, value=self.weights[f"{path}.{name}"])
            yield
        finally:
            for name in names:
                set_module_tensor_to_device(module, name, "meta")


def layer_stack(model: nn.Module, mixers: Sequence[Mixer]) -> str:
    """Path of the list of decoder layers, in which every one of `mixers` lies within a layer.

    Raises:
        RunError: the model has no such list.
    """
    stacks = {block_of(mixer).rpartition(".")[0] for mixer in mixers}
    path = stacks.pop()
    if stacks or not isinstance(model.get_submodule(path), nn.ModuleList):
        raise RunError(
            f"{type(model).__name__} has no list of decoder layers that holds {mixers[0].module}; "
            "calibrate without --low-memory."
        )
    return path


def block_of(mixer: Mixer) -> str:
    """Path of the decoder layer of a mixer, which may lie deeper in it than as its child, as in Zamba2."""
    path = mixer.module.rpartition(".")[0]
    while path and not path.rpartition(".")[2].isdecimal():
        path = path.rpartition(".")[0]
    return path
