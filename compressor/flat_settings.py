"""Settings as the command line names them, put where a recipe has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from compressor.errors import RequestError
from compressor.recipe import SECTIONS, describe

First = TypeVar("First", bound=BaseModel)
Second = TypeVar("Second", bound=BaseModel)

_FLAT_NAMES = {"calibration": ("calibration", "source"), "calibration_samples": ("calibration", "samples")}
_FLAT_NAMES |= {f"calibration_{name}": ("calibration", name) for name in ("column", "config", "split")}


def nest_flat_settings(flat: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Put settings named as on the command line (ratio, calibration_samples, ...) into their sections.

    They replace those of `base`; giving a ratio drops the base's target_dim and the other way round.
    """
    nested: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in (base or {}).items()
    }
    for name, value in flat.items():
        section, field = _FLAT_NAMES.get(name) or (_section_of(name), name)
        target = nested.setdefault(section, {}) if section else nested
        if not isinstance(target, dict):
            continue
        target[field] = value
        other = {"ratio": "target_dim", "target_dim": "ratio"}.get(field)
        if other and other not in flat:
            target.pop(other, None)
    return nested


def _section_of(name: str) -> str | None:
    return next((section for section, model in SECTIONS.items() if name in model.model_fields), None)


def validate_both(
    first: tuple[type[First], Mapping[str, Any]], second: tuple[type[Second], Mapping[str, Any]]
) -> tuple[First, Second]:
    """Two sections from settings named as their fields.

    Raises:
        RequestError: lists every mistake of both, with its value and what is allowed.
    """
    sections: list[Any] = []
    problems: list[str] = []
    for model, settings in (first, second):
        try:
            sections.append(model.model_validate(settings))
        except ValidationError as error:
            problems += describe(error)
    if problems:
        raise RequestError("\n".join(problems))
    return sections[0], sections[1]
