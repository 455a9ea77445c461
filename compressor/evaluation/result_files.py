"""Results on disk: what `compress evaluate` writes, and what it, or a compressed folder's report, gives back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compressor.errors import RequestError
from compressor.evaluation.result_checks import inconsistencies
from compressor.evaluation.results import Difference, ModelFigures
from compressor.file_kinds import refuse_no_file
from compressor.json_text import parse_json

SCHEMA = 1
REPORT = "compression.json"
"""What a run leaves in its output folder; its schema has the same number."""


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
        RequestError: the file cannot be read, holds no figures, or figures that do not fit each other.
    """
    folder = os.path.isdir(path)  # noqa: PTH112 - pathlib raises for a name that is too long
    file = path / REPORT if folder else path
    if folder and not file.exists() and (path / "config.json").exists():
        raise RequestError(
            f"{path} is a model folder without {REPORT}; run compress evaluate {path} --output FILE and give that file."
        )
    content = _read_json(file)
    entries = _entries(content)
    if not entries:
        raise RequestError(
            f"{file} holds no evaluation; give a file that compress evaluate --output wrote, or the {REPORT} "
            "of a run without --no-evaluate."
        )
    schema = content.get("schema") if isinstance(content, Mapping) else None
    if type(schema) is not int or schema != SCHEMA:
        raise RequestError(
            f"{file} has schema {schema!r} and this version reads {SCHEMA}; it was written by another version: "
            "measure again."
        )
    return tuple(_figures(file, entry) for entry in entries)


def _read_json(file: Path) -> Any:
    remedy = "give a file that compress evaluate --output wrote"
    refuse_no_file(file, str(file), remedy)
    try:
        return parse_json(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}; {remedy}.") from None
    except ValueError as error:
        raise RequestError(
            f"{file} is no JSON ({error}); give a file that compress evaluate --output wrote, or a {REPORT}."
        ) from None


def _figures(file: Path, entry: Any) -> ModelFigures:
    try:
        figures = TypeAdapter(ModelFigures).validate_json(json.dumps(entry, allow_nan=False))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RequestError(
            f"{file}: {place}: {first['msg']}; it was written by another version: measure again."
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file}: {error}; no figure is NaN or infinite: measure again.") from None
    problem = next(inconsistencies(figures), None)
    if problem is not None:
        raise RequestError(f"{file}: {figures.model}: {problem}; the file was changed or damaged: measure again.")
    return figures


def _entries(content: object) -> list[Any]:
    if not isinstance(content, Mapping):
        return []
    inner = content.get("evaluation")
    content = inner if isinstance(inner, Mapping) else content
    names = ("before", "after") if "after" in content else ("baseline", "model")
    return [content[name] for name in names if isinstance(content.get(name), Mapping)]
