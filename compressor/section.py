"""What all sections of settings are: strict, frozen, of a size that can be read. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from compressor.abbreviation import cut, cut_word, shown
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


_SENTENCES = {
    "model_type": '"{}" is no section; write its settings below it, each as NAME: VALUE',
    "int_type": '"{}" is no whole number',
    "string_too_short": '"{}" is empty; name something, or leave it out',
    "too_short": "name at least one",
    "string_pattern_mismatch": '"{}" is no device; give auto, cpu, cuda or cuda:N',
}


_MOST_MISTAKES = 20


def describe(error: ValidationError, model: type[BaseModel], name: Callable[[str], str] = str) -> list[str]:
    """A line for each mistake in settings of `model`, of many for the first ones; `name` is what the user knows one as.

    No value is shown at a length that nobody reads.
    """
    lines = []
    for problem in error.errors()[:_MOST_MISTAKES]:
        path = name(".".join(part for part in problem["loc"] if isinstance(part, str)))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path} is not a setting{_known(problem['loc'], model)}")
        elif isinstance(cause := problem.get("ctx", {}).get("error"), SettingsError):
            lines.append(cause.told(partial(_field_of, problem["loc"], name)))
        elif problem["type"] == "value_error":
            lines.append(f"{path}: {message}" if path else message)
        elif problem["type"] in _SENTENCES:
            given = problem["input"]
            word = cut_word(given) if isinstance(given, str) else shown(given)
            lines.append(f"{path}: " + _SENTENCES[problem["type"]].format(word))
        else:
            lines.append(f"{path}: {message} (got {shown(problem['input'])})")
    if error.error_count() > _MOST_MISTAKES:
        lines.append(f"{error.error_count() - _MOST_MISTAKES:,} more mistakes follow; correct these first.")
    return [cut(line) for line in lines]


def _field_of(location: tuple[int | str, ...], name: Callable[[str], str], field: str) -> str:
    return name(".".join([*(part for part in location if isinstance(part, str)), field]))


def _known(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """What would be a setting there."""
    for part in location[:-1]:
        field = model.model_fields.get(str(part))
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return known_settings(str(location[-1]), list(model.model_fields))


def known_settings(given: str, known: Sequence[str]) -> str:
    """The end of a sentence on `given`, which is none of `known`: the nearest of them, and all."""
    nearest = difflib.get_close_matches(given, known, n=1)
    meant = f"did you mean {nearest[0]}? Known here" if nearest else "known here"
    return f"; {meant}: {', '.join(known)}."
