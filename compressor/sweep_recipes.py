"""The recipes of a sweep, and what of it is refused before anything large is imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from compressor.abbreviation import cut_word
from compressor.errors import RequestError
from compressor.naming import Naming, key_of
from compressor.recipe import Recipe
from compressor.recipe_checks import refuse_impossible
from compressor.section import refuse_doubles
from compressor.selection.registry import get_selector_entry, method_names


def swept_methods() -> tuple[str, ...]:
    """Names of the methods that a sweep takes: all but those that try others."""
    return tuple(name for name in method_names() if not get_selector_entry(name).candidates)


def sweep_recipes(
    settings: Mapping[str, Any],
    ratios: tuple[float, ...],
    methods: tuple[str, ...],
    output_dir: Path,
    name: Naming = key_of,
) -> list[Recipe]:
    """One a method and ratio.

    Args:
        settings: those of a recipe, nested, without method and width.
        ratios: shares of key/query channels removed.
        methods: names of the registry of selectors.
        output_dir: of the sweep, which all of them name.
        name: what errors call the settings.

    Raises:
        RequestError: a setting is wrong, one of them is named twice, or a sweep cannot have it.
    """
    for option, values in (("--ratios", ratios), ("--methods", methods)):
        if not values:
            raise RequestError(f"{option} names none and at least one is needed; separate several with commas.")
        refuse_doubles(option, values)
    for ratio in ratios:
        _refuse_ratio(ratio)
    for method in methods:
        _refuse_method(method)
    selection = settings.get("selection", {})
    recipes = []
    for method in methods:
        for ratio in ratios:
            sections = {**settings, "selection": {**selection, "method": method, "ratio": ratio}}
            recipes.append(Recipe.from_settings({**sections, "output_dir": str(output_dir)}, name=name))
    if recipes[0].calibration.low_memory:
        raise RequestError(
            "low_memory has one layer in memory, and a sweep measures every cut, which needs whole models; leave it "
            "out, or make each cut alone with compress --low-memory."
        )
    adapter = recipes[0].recovery.save_adapter
    if adapter is not None:
        raise RequestError(
            f"{name('recovery.save_adapter', adapter)} is a folder for one adapter, and a sweep makes several cuts; "
            "leave it out, or make each cut alone with compress --save-adapter."
        )
    for recipe in recipes:
        refuse_impossible(recipe, name)
    return recipes


def _refuse_ratio(ratio: float) -> None:
    if ratio == 0:
        raise RequestError("--ratios 0 removes nothing, and the original is measured anyway; give ratios above 0.")
    if not 0 < ratio < 1:
        given = repr(ratio).removesuffix(".0")
        raise RequestError(f"--ratios {given} is no share that can be removed; give numbers above 0 and below 1.")


def _refuse_method(method: str) -> None:
    if method in swept_methods():
        return
    if method in method_names():
        entry = get_selector_entry(method)
        named, further = (",".join(names) for names in (entry.candidates, entry.unnormalized_candidates))
        raise RequestError(
            f"--methods {method} tries several itself; name those instead: {named}, on Mamba-2 also {further}."
        )
    nearest = get_close_matches(method.lower(), swept_methods(), n=1)
    hint = f"did you mean {nearest[0]}? Known here" if nearest else "known here"
    raise RequestError(f'--methods "{cut_word(method)}" is no method; {hint}: {", ".join(swept_methods())}.')
