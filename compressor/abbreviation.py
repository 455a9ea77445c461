"""Values and sentences as messages show them: what a person reads of them, however long they are. Imports no torch."""

from __future__ import annotations

import math
import reprlib

MOST_CHARACTERS = 1000
"""Of a sentence; the longest of ours, which lists what is known, has half of them."""
_MOST_OF_A_VALUE = 100
_MOST_DIGITS = 40


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MOST_OF_A_VALUE
        self.maxlevel = 3

    def repr_int(self, number: int, level: int) -> str:
        # Python refuses to write out thousands of digits.
        if abs(number) < 10**_MOST_DIGITS:
            return repr(number)
        return f"a number of about {math.ceil(number.bit_length() * math.log10(2)):,} digits"


_SHORT_REPR = _ShortRepr()


def shown(value: object) -> str:
    """The value as Python writes it, of which the middle of a long word, most of a list, and long digits are left out.

    It takes the time of what it shows, whatever the value holds.
    """
    return _SHORT_REPR.repr(value)


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text; of one longer than `most` characters, what stands at both ends."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail]} ... {text[-tail:]}"


def cut_word(text: str) -> str:
    """The same for what a user wrote in place of a name or a number."""
    return cut(text, _MOST_OF_A_VALUE)
