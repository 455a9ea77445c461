"""What all sections of settings are: strict, frozen, with lists that name nothing twice. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from compressor.errors import RequestError

Value = TypeVar("Value")


class Section(BaseModel):
    """Settings of one kind; a field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SettingsError(ValueError):
    """What is wrong with several fields of a section together; in `sentence`, `{field}` stands for each of `fields`."""

    def __init__(self, sentence: str, *fields: str) -> None:
        super().__init__(sentence.format(**{field: field for field in fields}))
        self._sentence, self._fields = sentence, fields

    def told(self, name: Callable[[str], str]) -> str:
        """The sentence, with what `name` calls each field."""
        return self._sentence.format(**{field: name(field) for field in self._fields})


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
            return f"{value} is named twice; leave one out."
    return None
