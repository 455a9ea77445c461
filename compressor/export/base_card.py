"""What the README.md of the model that is cut says in its metadata, which the card of the result passes on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

TEXT_GENERATION = "text-generation"
"""The Hub's name of the task that every model here can do."""
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", re.DOTALL)
_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+_-]*")


@dataclass(frozen=True)
class BaseLicense:
    """The Hub's licence fields: an identifier such as `apache-2.0`, several, or `other` with a name and a link."""

    identifier: str | tuple[str, ...]
    name: str | None
    link: str | None


def read_license(source: Path) -> BaseLicense | None:
    """The licence that the metadata of the README.md in `source` names; None where it names none that can be read."""
    metadata = _read_metadata(source)
    identifiers = _identifiers(metadata.get("license"))
    if not identifiers:
        return None
    name, link = (_line_or_none(metadata.get(key)) for key in ("license_name", "license_link"))
    # The Hub takes a list as well, and most readers of cards expect a word.
    return BaseLicense(identifiers[0] if len(identifiers) == 1 else identifiers, name, link)


def read_pipeline_tag(source: Path) -> str:
    """The task that the README.md in `source` names: a multimodal model keeps its other towers, and so its task."""
    tags = _identifiers(_read_metadata(source).get("pipeline_tag"))
    return tags[0] if len(tags) == 1 else TEXT_GENERATION


def _read_metadata(source: Path) -> dict[str, object]:
    card = source / "README.md"
    try:
        # What is no regular file may be a pipe, which would be waited for.
        text = card.read_text(encoding="utf-8-sig", errors="replace") if card.is_file() else ""
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


def _identifiers(value: object) -> tuple[str, ...]:
    """Of a word or a list of words, in lower case as the Hub has them; none where one is no identifier."""
    words = [word.lower() if isinstance(word, str) else "" for word in (value if isinstance(value, list) else [value])]
    return tuple(dict.fromkeys(words)) if all(_IDENTIFIER.fullmatch(word) for word in words) else ()


def _line_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value and value.isprintable() else None
