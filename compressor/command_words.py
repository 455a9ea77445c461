"""What the words of a command line are read as, and what is said of those that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressor.errors import RequestError
from compressor.home_folders import expanded

_DIGITS = 4300
"""The most that Python reads as one number."""


def filled(name: str) -> Callable[[str], str]:
    """The type of an argument that must not be empty, as a variable of the shell that is not set makes it."""

    def parse(text: str) -> str:
        if not text.strip():
            raise RequestError(f'{name} "{text}" is empty; name something, or leave it out.')
        return text

    return parse


def path(name: str) -> Callable[[str], Path]:
    """The same for a file or folder, whose `~` is a home folder."""
    parse = filled(name)
    return lambda text: expanded(parse(text))


def names(text: str) -> list[str]:
    """Words between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def number(text: str) -> Any:
    """A word that is no number is left to the section, which says what is wrong with it."""
    return int(text) if re.fullmatch(rf"-?[0-9]{{1,{_DIGITS}}}", text) else text
