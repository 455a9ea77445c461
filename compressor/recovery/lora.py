"""Low-rank adapters beside linear modules, as peft inserts, computes and stores them.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685): a frozen
weight W [out, in] acts as W + (alpha / rank) * B @ A, with A [rank, in] and B [out, rank].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.errors import RunError

_ADAPTER = "default"
_WEIGHTS_FILE = "adapter_model.safetensors"
_MODEL_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapter of the linear module that stood at `path` before; `a` and `b` are float32."""

    path: str
    a: nn.Parameter
    b: nn.Parameter
    scale: float

    def merged(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`weight` [out, in] + scale * B @ A in float32 on the CPU, rounded once to `dtype`."""
        weight, a, b = (tensor.detach().to("cpu", torch.float32) for tensor in (weight, self.a, self.b))
        return (weight + self.scale * (b @ a)).to(dtype)


def insert_adapters(
    model: PreTrainedModel, paths: Sequence[str], rank: int, alpha: float, generator: torch.Generator
) -> tuple[Adapter, ...]:
    """Put an adapter around each linear module of `paths`, in place; all other parameters are frozen.

    B begins at zero, so that the model computes what it did, and A is drawn from `generator` (a CPU
    one) uniformly from +-1/sqrt(in), as peft draws it.

    Raises:
        RunError: peft adapted other modules than those.
    """
    # Without memory peft's own initialisation draws nothing from the global generator.
    inject_adapter_in_model(_config(paths, rank, alpha), model, _ADAPTER, low_cpu_mem_usage=True)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    if layers.keys() != set(paths):
        differing = sorted(layers.keys() ^ set(paths))
        raise RunError(f"peft did not adapt the modules it was given ({differing[0]}); install the version tested.")
    return tuple(_initialised(path, layers[path], rank, generator) for path in paths)


def _config(paths: Sequence[str], rank: int, alpha: float) -> LoraConfig:
    # peft declares alpha as whole, and readers of its files may take it so; what it computes with may have a fraction.
    whole_alpha: int = int(alpha) if alpha == int(alpha) else alpha  # type: ignore[assignment]
    return LoraConfig(
        r=rank, lora_alpha=whole_alpha, target_modules=list(paths), lora_dropout=0.0, task_type=TaskType.CAUSAL_LM
    )


def _initialised(path: str, layer: LoraLayer, rank: int, generator: torch.Generator) -> Adapter:
    base = layer.get_base_layer()
    if not isinstance(base, nn.Linear):
        raise RunError(f"{path} is a {type(base).__name__} and not a linear module; load the checkpoint as it is.")
    drawn = torch.empty(rank, base.in_features, dtype=torch.float32)
    bound = 1 / math.sqrt(base.in_features)
    drawn.uniform_(-bound, bound, generator=generator)
    a = nn.Parameter(drawn.to(base.weight.device))
    b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=base.weight.device))
    for modules, parameter in ((layer.lora_A, a), (layer.lora_B, b)):
        modules[_ADAPTER].register_parameter("weight", parameter)
    if torch.promote_types(base.weight.dtype, torch.float32) != base.weight.dtype:
        # Under autocast; peft would keep the input of each module once more, in float32.
        layer.cast_input_dtype_enabled = False
    return Adapter(path, a, b, layer.scaling[_ADAPTER])


def base_weight(model: PreTrainedModel, adapter: Adapter) -> Tensor:
    """[out, in]: of the linear module around which `adapter` was put."""
    weight: Tensor = model.get_parameter(f"{adapter.path}.base_layer.weight")
    return weight.detach()


def write_adapters(folder: Path, adapters: Sequence[Adapter], rank: int, alpha: float) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft's own models are saved.

    No base model is named in them: what they fit is the checkpoint as it was before training.
    """
    config = _config([adapter.path for adapter in adapters], rank, alpha)
    config.inference_mode = True
    config.target_modules = [adapter.path for adapter in adapters]
    config.save_pretrained(str(folder))
    tensors = {}
    for adapter in adapters:
        for name, parameter in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            tensors[f"{_MODEL_PREFIX}{adapter.path}.{name}.weight"] = parameter.detach().cpu().contiguous()
    write_tensors(folder / _WEIGHTS_FILE, tensors)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file with the mode that new files have, which safetensors' own writer does not leave."""
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
