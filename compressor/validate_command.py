"""The verb `compress validate`: what any machine would refuse of a recipe. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from compressor.command_words import path
from compressor.recipe import Recipe
from compressor.recipe_checks import refuse_impossible
from compressor.recipe_file import load_settings


def validate_command(words: list[str]) -> int:
    """`compress validate`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="compress validate", description="Check a recipe file.")
    parser.add_argument("recipe", type=path("RECIPE"), metavar="RECIPE")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    recipe: Path = parser.parse_args(words).recipe
    refuse_impossible(Recipe.from_settings(load_settings(recipe), str(recipe)), origin=f"{recipe}: ")
    print(f"{recipe} is valid")
    return 0
