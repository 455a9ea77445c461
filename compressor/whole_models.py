"""Settings of a recipe that need what --low-memory and --device-map do without. Imports no torch."""

from __future__ import annotations

from compressor.naming import Naming
from compressor.recipe import Recipe
from compressor.selection.registry import candidate_methods, get_selector_entry


def whole_model_problems(recipe: Recipe, name: Naming) -> list[str]:
    """A sentence for each setting that needs the whole model in memory, or on one GPU, where the recipe forbids it."""
    problems: list[str] = []
    if recipe.calibration.low_memory:
        problems += _with_low_memory(recipe, name)
    if recipe.runtime.device_map is not None:
        problems += _with_device_map(recipe, name)
    return problems


def _with_low_memory(recipe: Recipe, name: Naming) -> list[str]:
    problems = []
    fact = f"{name('calibration.low_memory', True)} has one layer in memory"
    stages = (
        ("refit", "recovery.refit", recipe.recovery.refit),
        ("evaluation", "export.evaluate", recipe.export.evaluate),
        ("verification", "export.verify", recipe.export.verify),
    )
    asked = [(stage, name(setting, False)) for stage, setting, wanted in stages if wanted]
    if asked:
        stages_asked, remedies = (", ".join(each) for each in zip(*asked, strict=True))
        problems.append(
            f"{fact}, and these need whole models: {stages_asked}; add {remedies}, and evaluate and verify the result "
            "on a machine that holds it."
        )
    if recipe.recovery.train:
        problems.append(f"{fact}, and training needs whole models; leave {name('recovery.train', True)} out.")
    epsilon = recipe.selection.norm_epsilon
    if epsilon != "keep":
        given, remedy = (name("selection.norm_epsilon", value) for value in (epsilon, "keep"))
        problems.append(f"{fact}, and {given} looks at passes through the whole model; use {remedy}.")
    if _runs_the_model(recipe.selection.method):
        problems.append(_other_method(fact, "passes", recipe.selection.method, name))
    if recipe.runtime.device_map is not None:
        problems.append(
            f"{name('calibration.low_memory', True)} runs one layer after the other on one device, and "
            f"{name('runtime.device_map')} spreads them; leave one out."
        )
    return problems


def _with_device_map(recipe: Recipe, name: Naming) -> list[str]:
    problems = []
    given, device = name("runtime.device_map", "auto"), "runtime.device"
    if recipe.runtime.device not in ("auto", "cuda"):
        problems.append(
            f"{given} spreads the model over all GPUs, and {name(device, recipe.runtime.device)} is one; leave "
            f"{name(device)} out."
        )
    if recipe.export.verify:
        problems.append(
            f"{given} is for models larger than one GPU, onto which the verification loads the result; add "
            f"{name('export.verify', False)}, and run compress verify DIR --device cpu afterwards."
        )
    if recipe.recovery.train:
        problems.append(
            f"{given} cannot train, which needs whole models on each GPU; leave {name('recovery.train', True)} out."
        )
    if _runs_the_model(recipe.selection.method):
        problems.append(_other_method(f"{given} runs no backward passes", "them", recipe.selection.method, name))
    return problems


def _runs_the_model(method: str) -> bool:
    """Whether a method, or any that it tries in some family, takes more of the model than one pass of calibration."""
    entries = [get_selector_entry(each) for each in candidate_methods(method, normalizes_keys=False)]
    return any(entry.needs_model or "gradient" in entry.needs for entry in entries)


def _other_method(fact: str, passes: str, method: str, name: Naming) -> str:
    return (
        f"{fact}, and the method {method} needs {passes} through the whole model; use "
        f"{name('selection.method', 'drrqr or energy')}."
    )
