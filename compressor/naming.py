"""What the user knows a setting as: a key of the recipe, or an option of the command line. Imports no torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

_OTHER_WORDS = {"texts": "text", "train": "recover"}
"""Options whose names are not those of their fields."""


class Naming(Protocol):
    """Names `setting`, a field with its section before it or alone, or what gives it `value`."""

    def __call__(self, setting: str, value: object = None, /) -> str: ...


def key_of(setting: str, value: object = None) -> str:
    """`evaluation.tasks`; `export.verify: false` with a value."""
    if value is None:
        return setting
    return f"{setting}: {str(value).lower() if isinstance(value, bool) else value}"


def keys_in(section: str) -> Naming:
    """Names fields of a section of the recipe by their keys."""
    return lambda field, value=None, /: key_of(f"{section}.{field}" if field else section, value)


def option_of(setting: str, value: object = None) -> str:
    """`--search-rank` for `search_rank`; with values, `--no-refit` for False and `--norm-epsilon keep` for a word.

    Nothing for what is wrong with several settings together.
    """
    if not setting:
        return ""
    field = setting.rpartition(".")[2]
    option = _OTHER_WORDS.get(field, field).replace("_", "-")
    if value is False:
        return f"--no-{option}"
    return f"--{option}" if value is None or value is True else f"--{option} {value}"


def names_of(given: Container[str], recipe: bool, options: Mapping[str, str], keys_alone: Container[str]) -> Naming:
    """Options for the settings in `given`, or for all where there is no `recipe`; keys of the recipe for the others.

    `options` are the names of those that are not called as their fields; `keys_alone` are
    the sections, and settings that no option gives.
    """

    def name(setting: str, value: object = None, /) -> str:
        if setting == "model" and value is None:
            return "MODEL" if setting in given or not recipe else setting
        if setting in keys_alone or (recipe and setting not in given):
            return key_of(setting, value)
        return option_of(options.get(setting, setting), value)

    return name
