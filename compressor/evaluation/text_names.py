"""Texts in tables and figures: files are called by no more of their paths than tells them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from compressor.evaluation.results import ModelFigures


def shortly_named(models: Sequence[ModelFigures]) -> list[ModelFigures]:
    """The models with the names that their texts have in what is shown of all of them together."""
    short = short_names([text.name for model in models for text in model.texts])
    return [
        replace(model, texts=tuple(replace(text, name=short[text.name]) for text in model.texts)) for model in models
    ]


def short_names(names: Sequence[str]) -> Mapping[str, str]:
    """Each name's: of a path to a file or from the root the shortest end that no other name has, others as they are."""
    known = set(names)
    return {name: _short(name, known - {name}) for name in known}


def _short(name: str, others: set[str]) -> str:
    parts = PurePath(name).parts
    if not (PurePath(name).suffix or PurePath(name).is_absolute()):
        return name  # a data set of the Hub is called org/name
    for count in range(1, len(parts)):
        end = parts[-count:]
        if all(PurePath(other).parts[-count:] != end for other in others):
            return str(PurePath(*end))
    return name
