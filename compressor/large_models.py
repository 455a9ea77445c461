"""What a run with a model that is never in memory, or on one GPU, as a whole needs of the machine."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from compressor.launched import launch
from compressor.naming import Naming
from compressor.recipe import CalibrationSection, Recipe

_SETS_OF_ACTIVATIONS = 3
"""The embeddings, the outputs of a layer, and those of the one before it."""


def machine_problems(recipe: Recipe, name: Naming) -> list[str]:
    """A sentence for each thing that --low-memory or --device-map needs, and this launch or machine has not.

    Nothing where the recipe asks for neither.
    """
    problems, given = [], name("runtime.device_map", "auto")
    low_memory, spread, processes = recipe.calibration.low_memory, recipe.runtime.device_map is not None, launch().count
    if low_memory and processes > 1:
        problems.append(
            f"{name('calibration.low_memory', True)} is for one process, and {processes} were launched; start it "
            "without accelerate launch."
        )
    if spread and recipe.runtime.device in ("auto", "cuda") and not torch.cuda.device_count():
        problems.append(
            f"{given} spreads the model over all GPUs, and torch sees 0 on this machine; use "
            f"{name('calibration.low_memory', True)} for a model larger than memory."
        )
    if spread and processes > 1:
        problems.append(
            f"{given} gives all GPUs to one process, and {processes} were launched; start it without accelerate launch."
        )
    return problems


def activation_bytes(request: CalibrationSection, config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What --low-memory keeps on disk between layers, beside the output folder; 0 without it."""
    if not request.low_memory:
        return 0
    hidden_size: int = config.get_text_config(decoder=True).hidden_size
    return _SETS_OF_ACTIVATIONS * request.samples * request.sequence_length * hidden_size * dtype.itemsize
