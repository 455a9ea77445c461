"""What all sections of settings are: strict, frozen, of a size that can be read. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from compressor.abbreviation import cut_word, shown
from compressor.errors import RequestError

_MOST_CHARACTERS = 4096
"""Of a word: the longest path of Linux."""
_MOST_ENTRIES = 1000
_BEYOND_NUMBERS = 10**40
_WITH_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
"""Numbers that YAML 1.1, which wants a point and a sign in them, reads as words."""

Value = TypeVar("Value")


class Section(BaseModel):
    """Settings of one kind; a field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read(cls, value: Any, info: ValidationInfo) -> Any:
        for each in value if isinstance(value, list) else (value,):
            _refuse_huge(each)
        if isinstance(value, list) and len(value) > _MOST_ENTRIES:
            raise ValueError(f"{len(value):,} entries are more than are taken; give at most {_MOST_ENTRIES:,}.")
        kind = cls.model_fields[info.field_name or ""].annotation
        takes_numbers = kind is float or float in get_args(kind)
        if takes_numbers and isinstance(value, str) and _WITH_EXPONENT.fullmatch(value):
            return float(value)
        return value


class SettingsError(ValueError):
    """What is wrong with several fields of a section together; in `sentence`, `{field}` stands for each of `fields`."""

    def __init__(self, sentence: str, *fields: str) -> None:
        super().__init__(sentence.format(**{field: field for field in fields}))
        self._sentence, self._fields = sentence, fields

    def told(self, name: Callable[[str], str]) -> str:
        """The sentence, with what `name` calls each field."""
        return self._sentence.format(**{field: name(field) for field in self._fields})


def _refuse_huge(value: object) -> None:
    """Of what no setting can mean, and no later message could show."""
    if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
        raise ValueError(
            f"{shown(value)} has {len(value):,} characters, and no name or path has more than {_MOST_CHARACTERS:,}; "
            "give a shorter one."
        )
    if isinstance(value, int) and abs(value) >= _BEYOND_NUMBERS:
        raise ValueError(f"{shown(value)} is more than any setting takes; give a smaller one.")


Word = Annotated[str, Field(min_length=1)]


def accepted_by(check: Callable[[Value], object]) -> Callable[[Value], Value]:
    """A validator of values that `check` lets pass: the RequestError of one that it refuses becomes a ValueError."""

    def validator(value: Value) -> Value:
        try:
            check(value)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return value

    return validator


def once(values: list[Value]) -> list[Value]:
    """The values, as a validator gives them back.

    Raises:
        ValueError: one of them stands there twice, of which one would be measured, or both for nothing.
    """
    problem = _double(values)
    if problem is not None:
        raise ValueError(problem)
    return values


def refuse_doubles(name: str, values: Sequence[object]) -> None:
    """The same for values outside a section, which the user knows as `name`.

    Raises:
        RequestError: one of them stands there twice.
    """
    problem = _double(values)
    if problem is not None:
        raise RequestError(f"{name}: {problem}")


def _double(values: Sequence[object]) -> str | None:
    for value, count in Counter(values).items():
        if count > 1:
            return f"{cut_word(str(value))} is named twice; leave one out."
    return None
