"""Results on disk: what `compress evaluate` writes, and what it, or a compressed folder's report, gives back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compressor.errors import RequestError
from compressor.evaluation.results import Difference, ModelFigures

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """One run of `compress evaluate`: the model, what it was compared with, and what that depends on.

    `settings` are the request, fully resolved; `baseline` and `differences` belong together.
    """

    schema: int
    baseline: ModelFigures | None
    model: ModelFigures
    differences: tuple[Difference, ...]
    settings: dict[str, Any]
    notes: tuple[str, ...]
    timings_s: dict[str, float]
    hardware: dict[str, str | int | None]
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = TypeAdapter(EvaluationFile).dump_python(self, mode="json")
        return data


def read_models(path: Path) -> tuple[ModelFigures, ...]:
    """The models of a file of `compress evaluate`, of a compression.json, or of a folder with one; baseline first.

    Raises:
        RequestError: the file cannot be read, or holds no figures.
    """
    file = path / "compression.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"{file} cannot be read: {error.strerror}; give a file that compress evaluate --output wrote."
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{file} is no JSON ({error}); give a file that compress evaluate --output wrote, or a compression.json."
        ) from None
    entries = _entries(content)
    if not entries:
        raise RequestError(
            f"{file} holds no evaluation; give a file that compress evaluate --output wrote, or the compression.json "
            "of a run without --no-evaluate."
        )
    try:
        return tuple(TypeAdapter(ModelFigures).validate_json(json.dumps(entry)) for entry in entries)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(
            f"{file}: {place}: {first['msg']}; it was written by another version: measure again."
        ) from None


def _entries(content: object) -> list[Any]:
    if not isinstance(content, Mapping):
        return []
    inner = content.get("evaluation")
    content = inner if isinstance(inner, Mapping) else content
    names = ("before", "after") if "after" in content else ("baseline", "model")
    return [content[name] for name in names if isinstance(content.get(name), Mapping)]
