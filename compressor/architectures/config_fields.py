"""Fields of config.json whose values no model can have, refused before stock classes read them or run with them.

The stock classes check some types and few ranges, and make something for every layer that a config speaks of.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from compressor.abbreviation import shown
from compressor.errors import RequestError

_MAX_LAYERS = 100_000
_MAX_CHUNK = 65_536
_MAX_INTEGER = torch.iinfo(torch.int64).max
_MAX_FLOAT = torch.finfo(torch.float32).max
# Tokenizers write 10^30 where there is none, and training scripts copy it.
_WITHOUT_LIMIT = frozenset({"model_max_length"})
_LAYER_COUNTS = ("num_hidden_layers", "depth")
_LAYER_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_NAMES = ("model_type", "dtype", "torch_dtype")
_PARTS = ("text_config", "vision_config")


def refuse_impossible_config(raw_config: Mapping[str, Any]) -> None:
    """What must be known of a parsed config.json, and of the configs nested in it, before a stock config is made.

    Raises:
        RequestError: it speaks of more layers than any model has, a name is no string, a part is no object, or a number
            is none that tensors can hold.
    """
    for part in _PARTS:
        value = raw_config.get(part)
        if value is not None and not isinstance(value, Mapping):
            raise RequestError(f"config.json has {part} = {shown(value)}; it must be an object, or left out.")
    nested = [(f"{key}.", value) for key, value in raw_config.items() if isinstance(value, Mapping)]
    for prefix, config in (("", raw_config), *nested):
        for field in _NAMES:
            value = config.get(field)
            if value is not None and not isinstance(value, str):
                raise RequestError(
                    f"config.json has {prefix}{field} = {shown(value)}; it must be a string, or left out."
                )
        for field, value in config.items():
            wanted = _wanted_number(field, value)
            if wanted is not None:
                raise RequestError(f"config.json has {prefix}{field} = {shown(value)}; it must be {wanted}.")
        for field, count in _layers(config):
            if count > _MAX_LAYERS:
                raise RequestError(
                    f"config.json says {count} layers, more than {_MAX_LAYERS}; correct {prefix}{field}."
                )


def _wanted_number(field: str, value: Any) -> str | None:
    """What a field must be, in words, where it holds what no tensor and no table of tokens takes."""
    if isinstance(value, bool):
        return "a whole number, or left out" if field.endswith("_token_id") else None
    if isinstance(value, int) and abs(value) > _MAX_INTEGER and field not in _WITHOUT_LIMIT:
        return f"a whole number of at most {_MAX_INTEGER}"
    if isinstance(value, float) and (math.isnan(value) or _MAX_FLOAT < abs(value) < math.inf):
        return f"a number of at most {_MAX_FLOAT:.4g}"
    return None


def _layers(config: Mapping[str, Any]) -> Iterable[tuple[str, int | float]]:
    for field in _LAYER_COUNTS:
        if isinstance(config.get(field), int | float):
            yield field, config[field]
    for field in _LAYER_LISTS:
        if isinstance(config.get(field), list | str):
            yield field, len(config[field])


@dataclass(frozen=True, slots=True)
class FieldRule(ABC):
    """What one field of a stock config must be; `field` is its name."""

    field: str

    @abstractmethod
    def wanted(self, value: Any, config: PretrainedConfig) -> str | None:
        """What the value must be, in words, where it is something else."""


@dataclass(frozen=True, slots=True)
class Count(FieldRule):
    """A whole number of at least 1 and at most `most`, and of at most the field `of`, where that one is over 0."""

    most: int | None = None
    of: str | None = None
    optional: bool = False

    def wanted(self, value: Any, config: PretrainedConfig) -> str | None:
        total = None if self.of is None else getattr(config, self.of)
        if (value is None and self.optional) or (self.of is not None and not total):
            return None
        limits = [limit for limit in (self.most, total) if limit is not None]
        if type(value) is int and value >= 1 and all(value <= limit for limit in limits):
            return None
        least = "a whole number of at least 1"
        if self.of is not None:
            return f"{least} and at most {self.of}, which is {total}"
        return least if self.most is None else f"{least} and at most {self.most}"


@dataclass(frozen=True, slots=True)
class Number(FieldRule):
    """A finite number; `optional` lets it be left out."""

    positive: bool = False
    negative: bool = False
    optional: bool = False

    def wanted(self, value: Any, config: PretrainedConfig) -> str | None:
        if value is None and self.optional:
            return None
        if _is_number(value) and math.isfinite(value) and not (
            (self.positive and value <= 0) or (self.negative and value >= 0)
        ):  # fmt: skip
            return None
        sign = "number over 0" if self.positive else "number below 0" if self.negative else "number"
        return f"a {sign}" + (", or left out" if self.optional else "")


@dataclass(frozen=True, slots=True)
class Numbers(FieldRule):
    """A list of `count` numbers."""

    count: int

    def wanted(self, value: Any, config: PretrainedConfig) -> str | None:
        fits = isinstance(value, list | tuple) and len(value) == self.count and all(map(_is_number, value))
        return None if fits else f"a list of {self.count} numbers"


@dataclass(frozen=True, slots=True)
class Interval(FieldRule):
    """Two numbers, the first no larger than the second, which may be infinite."""

    def wanted(self, value: Any, config: PretrainedConfig) -> str | None:
        fits = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value))
        return None if fits and value[0] <= value[1] else "two numbers, the least and the largest"


@dataclass(frozen=True, slots=True)
class Exactly(FieldRule):
    """What follows from other fields, and is written out beside them."""

    derived: Sequence[int]

    def wanted(self, value: Any, config: PretrainedConfig) -> str | None:
        return None if value == list(self.derived) else f"{list(self.derived)}, which follows from other fields"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def chunk(field: str) -> Count:
    """Of the tokens that a scan takes at once: the stock classes pad sequences to a multiple of it."""
    return Count(field, most=_MAX_CHUNK)


def refuse_fields(config: PretrainedConfig, rules: Iterable[FieldRule]) -> None:
    """Hold the decoder's stock config against what its family needs.

    Raises:
        RequestError: a field's value is something that the stock classes take and cannot run with.
    """
    decoder = config.get_text_config(decoder=True)
    prefix = "" if decoder is config else "text_config."
    for rule in rules:
        value = getattr(decoder, rule.field)
        wanted = rule.wanted(value, decoder)
        if wanted is not None:
            raise RequestError(f"config.json has {prefix}{rule.field} = {shown(value)}; it must be {wanted}.")
