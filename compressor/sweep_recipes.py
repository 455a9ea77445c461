"""The recipes of a sweep, and what of it is refused before anything large is imported. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.errors import RequestError
from compressor.recipe import Recipe
from compressor.selection.registry import candidate_methods


def sweep_recipes(
    settings: Mapping[str, Any], ratios: tuple[float, ...], methods: tuple[str, ...], output_dir: Path
) -> list[Recipe]:
    """One a method and ratio.

    Args:
        settings: those of a recipe, nested, without method and width.
        ratios: shares of key/query channels removed.
        methods: names of the registry of selectors.
        output_dir: of the sweep, which all of them name.

    Raises:
        RequestError: a setting is wrong, a method is named twice or tries others, or a ratio removes nothing.
    """
    for name, values in (("--ratios", ratios), ("--methods", methods)):
        if not values:
            raise RequestError(f"{name} names none and at least one is needed; separate several with commas.")
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise RequestError(f"{name} names {twice[0]} twice; leave one out.")
    if 0 in ratios:
        raise RequestError("--ratios 0 removes nothing, and the original is measured anyway; give ratios above 0.")
    selection = settings.get("selection", {})
    recipes = []
    for method in methods:
        if candidate_methods(method) != (method,):
            raise RequestError(
                f"--methods {method} tries several itself; name those instead: {','.join(candidate_methods(method))}."
            )
        for ratio in ratios:
            sections = {**settings, "selection": {**selection, "method": method, "ratio": ratio}}
            recipes.append(Recipe.from_settings({**sections, "output_dir": str(output_dir)}))
    return recipes
