"""What the README.md of the model that is cut says in its metadata, which the card of the result passes on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

TEXT_GENERATION = "text-generation"
"""The Hub's name of the task that every model here can do."""
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---(?:\n|$)", re.DOTALL)


@dataclass(frozen=True)
class BaseLicense:
    """The Hub's licence fields: an identifier such as `apache-2.0`, or `other` with a name and a link."""

    identifier: str
    name: str | None
    link: str | None


def read_license(source: Path) -> BaseLicense | None:
    """The licence that the metadata of the README.md in `source` names; None where it names none that can be read."""
    metadata = _read_metadata(source)
    identifier, name, link = (_text_or_none(metadata.get(key)) for key in ("license", "license_name", "license_link"))
    return None if identifier is None else BaseLicense(identifier, name, link)


def read_pipeline_tag(source: Path) -> str:
    """The task that the README.md in `source` names: a multimodal model keeps its other towers, and so its task."""
    return _text_or_none(_read_metadata(source).get("pipeline_tag")) or TEXT_GENERATION


def _read_metadata(source: Path) -> dict[str, object]:
    try:
        text = (source / "README.md").read_bytes().decode("utf-8-sig", "replace").replace("\r\n", "\n")
    except OSError:
        return {}
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}
    try:
        # Builds strings, lists and mappings only.
        metadata = yaml.load(match.group(1), Loader=yaml.BaseLoader)
    # It may be anybody's: yaml lets through what a deep nesting or an escape beyond Unicode raises.
    except (yaml.YAMLError, RecursionError, OverflowError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _text_or_none(value: object) -> str | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) and value else None
