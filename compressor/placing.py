"""Where the models of a run are: on its device, or spread over all GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import PreTrainedModel

from compressor.errors import RequestError
from compressor.loading import DeviceMap, build_skeleton, load_model
from compressor.naming import Naming, option_of
from compressor.planning import RunPlan

Memory = Mapping[int | str, int]
"""Bytes of each GPU by its number, and of "cpu"."""


def load_placed(plan: RunPlan, folder: Path, raw_config: dict[str, Any]) -> PreTrainedModel:
    """The model in `folder`, the original or a cut, where and as the plan wants it.

    Raises:
        RequestError: it is to be spread over GPUs that cannot hold it.
        RunError: the stock loader left a tensor out, or would draw one at random.
    """
    architecture = plan.source.architecture
    devices: DeviceMap | None = None
    if plan.recipe.runtime.device_map is not None:
        devices = spread_over_gpus(build_skeleton(architecture, folder, raw_config), plan.dtype, name=plan.name)
    return load_model(architecture, folder, raw_config, plan.dtype, plan.device, devices)


def spread_over_gpus(
    skeleton: PreTrainedModel, dtype: torch.dtype, memory: Memory | None = None, name: Naming = option_of
) -> dict[str, str]:
    """Path of a module -> device, by accelerate: decoder layers whole, the GPUs filled evenly.

    `skeleton` is the model on the meta device. `memory` None asks the GPUs for what is free now. Messages call a
    setting `name(setting)`.

    Raises:
        RequestError: the GPUs cannot hold the model.
    """
    blocks = list(skeleton._no_split_modules or ())
    skeleton.tie_weights()
    balanced = get_balanced_memory(
        skeleton, None if memory is None else dict(memory), no_split_module_classes=blocks, dtype=dtype
    )
    devices = infer_auto_device_map(skeleton, balanced, no_split_module_classes=blocks, dtype=dtype)
    outside = [path for path, device in devices.items() if device in ("cpu", "disk")]
    if outside:
        gpus = sum(isinstance(device, int) for device in balanced)
        raise RequestError(
            f"{name('runtime.device_map', 'auto')}: the free memory of {gpus} GPUs does not hold the model "
            f"({len(outside)} of its modules would be left over); give them more free memory, or use "
            f"{name('calibration.low_memory', True)}."
        )
    return devices
