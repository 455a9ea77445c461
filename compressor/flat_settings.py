"""Settings as the command line names them, put where a recipe has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from compressor.errors import RequestError
from compressor.naming import Naming, names_of
from compressor.recipe import SECTIONS
from compressor.section import describe

First = TypeVar("First", bound=BaseModel)
Second = TypeVar("Second", bound=BaseModel)

_FLAT_NAMES = {"calibration": ("calibration", "source"), "calibration_samples": ("calibration", "samples")}
_FLAT_NAMES |= {f"calibration_{name}": ("calibration", name) for name in ("column", "config", "split")}
_OPTIONS = {".".join(place): name for name, place in _FLAT_NAMES.items()}
_RECOVERY_OPTIONS = frozenset({"refit", "train", "save_adapter"})
_KEYS_ALONE = frozenset(SECTIONS) | {
    f"recovery.{field}" for field in SECTIONS["recovery"].model_fields.keys() - _RECOVERY_OPTIONS
}
"""Sections, and settings that no option of a cut or a sweep gives."""
_WIDTHS = frozenset({"ratio", "target_dim", "target_state_bytes"})
"""Of which a recipe has one."""


def nest_flat_settings(flat: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Put settings named as on the command line (ratio, calibration_samples, ...) into their sections.

    They replace those of `base`; giving one of the widths drops the base's other ones.
    """
    nested: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in (base or {}).items()
    }
    for name, value in flat.items():
        section, field = _place_of(name)
        target = nested.setdefault(section, {}) if section else nested
        if not isinstance(target, dict):
            continue
        target[field] = value
        for other in _WIDTHS - {field} - flat.keys() if field in _WIDTHS else ():
            target.pop(other, None)
    return nested


def names_of_flat(flat: Mapping[str, Any], recipe: bool) -> Naming:
    """What the user of a verb calls settings: options where `flat` has them or there is no `recipe`, else its keys."""
    given = frozenset(".".join(part for part in _place_of(name) if part) for name in flat)
    return names_of(given, recipe, _OPTIONS, _KEYS_ALONE)


def _place_of(name: str) -> tuple[str | None, str]:
    return _FLAT_NAMES.get(name) or (_section_of(name), name)


def _section_of(name: str) -> str | None:
    return next((section for section, model in SECTIONS.items() if name in model.model_fields), None)


def _named(name: Callable[[str], str], place: str, field: str) -> str:
    return name(f"{place}{field}" if field else field)


def validate_both(
    first: tuple[type[First], Mapping[str, Any]],
    second: tuple[type[Second], Mapping[str, Any]],
    name: Callable[[str], str] = str,
    places: tuple[str, str] = ("", ""),
) -> tuple[First, Second]:
    """Two sections from settings named as their fields; messages call a field `name(place + field)`, by its section.

    Raises:
        RequestError: lists every mistake of both, with its value and what is allowed.
    """
    sections: list[Any] = []
    problems: list[str] = []
    for (model, settings), place in zip((first, second), places, strict=True):
        try:
            sections.append(model.model_validate(settings))
        except ValidationError as error:
            problems += describe(error, model, partial(_named, name, place))
    if problems:
        raise RequestError("\n".join(problems))
    return sections[0], sections[1]
