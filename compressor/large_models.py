"""What a run can do with a model that is never in memory, or on one GPU, as a whole: refused before any work."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from compressor.errors import RequestError
from compressor.launched import launch
from compressor.recipe import CalibrationSection, Recipe
from compressor.selection.registry import candidate_methods, get_selector_entry, statistics_read

_SETS_OF_ACTIVATIONS = 3
"""The embeddings, the outputs of a layer, and those of the one before it."""


def refuse_what_needs_the_whole_model(recipe: Recipe) -> None:
    """Nothing where the recipe asks for neither `low_memory` nor `device_map`.

    Raises:
        RequestError: lists every setting that would need the whole model in memory, or on one GPU.
    """
    problems: list[str] = []
    if recipe.calibration.low_memory:
        problems += _with_low_memory(recipe)
    if recipe.runtime.device_map is not None:
        problems += _with_device_map(recipe)
    if problems:
        raise RequestError("\n".join(problems))


def activation_bytes(request: CalibrationSection, config: PretrainedConfig, dtype: torch.dtype) -> int:
    """What --low-memory keeps on disk between layers, beside the output folder; 0 without it."""
    if not request.low_memory:
        return 0
    hidden_size: int = config.get_text_config(decoder=True).hidden_size
    return _SETS_OF_ACTIVATIONS * request.samples * request.sequence_length * hidden_size * dtype.itemsize


def _with_low_memory(recipe: Recipe) -> list[str]:
    problems = []
    stages = (
        ("refit", "--no-refit", recipe.recovery.refit),
        ("evaluation", "--no-evaluate", recipe.export.evaluate),
        ("verification", "--no-verify", recipe.export.verify),
    )
    asked = [(name, option) for name, option, wanted in stages if wanted]
    if asked:
        names, options = ", ".join(name for name, _ in asked), " ".join(option for _, option in asked)
        problems.append(
            f"--low-memory has one layer in memory, and these need whole models: {names}; add {options}, and evaluate "
            "and verify the result on a machine that holds it."
        )
    if recipe.recovery.train:
        problems.append("--low-memory has one layer in memory, and training needs whole models; leave --recover out.")
    epsilon = recipe.selection.norm_epsilon
    if epsilon != "keep":
        problems.append(
            f"--low-memory has one layer in memory, and --norm-epsilon {epsilon} looks at passes through the whole "
            "model; use --norm-epsilon keep."
        )
    if _runs_the_model(recipe.selection.method):
        problems.append(_other_method("--low-memory has one layer in memory", "passes", recipe.selection.method))
    if recipe.runtime.device_map is not None:
        problems.append(
            "--low-memory runs one layer after the other on one device, and --device-map spreads them; leave one out."
        )
    if launch().count > 1:
        problems.append(
            f"--low-memory is for one process, and {launch().count} were launched; start it without accelerate launch."
        )
    return problems


def _with_device_map(recipe: Recipe) -> list[str]:
    problems = []
    if recipe.runtime.device not in ("auto", "cuda"):
        problems.append(
            f"--device-map auto spreads the model over all GPUs, and --device {recipe.runtime.device} is one; leave "
            "--device out."
        )
    elif not torch.cuda.device_count():
        problems.append(
            "--device-map auto spreads the model over all GPUs, and torch sees 0 on this machine; use --low-memory for "
            "a model larger than memory."
        )
    if recipe.export.verify:
        problems.append(
            "--device-map auto is for models larger than one GPU, onto which the verification loads the result; add "
            "--no-verify, and run compress verify DIR --device cpu afterwards."
        )
    if recipe.recovery.train:
        problems.append("--device-map auto cannot train, which needs whole models on each GPU; leave --recover out.")
    if _runs_the_model(recipe.selection.method):
        problems.append(_other_method("--device-map auto runs no backward passes", "them", recipe.selection.method))
    if launch().count > 1:
        problems.append(
            f"--device-map auto gives all GPUs to one process, and {launch().count} were launched; start it without "
            "accelerate launch."
        )
    return problems


def _runs_the_model(method: str) -> bool:
    """Whether a method takes more of the model than one pass of calibration."""
    needs_model = any(get_selector_entry(each).needs_model for each in candidate_methods(method))
    return needs_model or "gradient" in statistics_read(method)


def _other_method(fact: str, passes: str, method: str) -> str:
    return f"{fact}, and the method {method} needs {passes} through the whole model; use --method drrqr or energy."
