"""Words, numbers and identifiers that prompts are made of. The words are wonderwords', as in RULER."""

from __future__ import annotations

import random
import uuid
from functools import cache
from typing import Literal

from wonderwords import RandomWord

from compressor.prompts.base import Split
from compressor.prompts.split import draw_in_split, in_split

ValueKind = Literal["numbers", "words", "uuids"]
"""What keys and values of needles are: 7 digits, an adjective and a noun with a hyphen between, a version 4 UUID."""


@cache
def _lists() -> RandomWord:
    return RandomWord()


@cache
def word_list(category: Literal["noun", "adjective", "verb"], split: Split) -> tuple[str, ...]:
    """The split's words of one category without white space in them, sorted."""
    words: list[str] = _lists().filter(include_categories=[category], exclude_with_spaces=True)
    return tuple(word for word in sorted(set(words)) if in_split(word, split))


@cache
def all_words(split: Split) -> tuple[str, ...]:
    """The split's nouns, adjectives and verbs, sorted."""
    nouns, adjectives, verbs = (word_list(category, split) for category in ("noun", "adjective", "verb"))
    return tuple(sorted({*nouns, *adjectives, *verbs}))


def draw_value(kind: ValueKind, generator: random.Random, split: Split) -> str:
    """A key or value of a needle that is the split's; of a pair of words, both are."""
    if kind == "numbers":
        return draw_number(7, generator, split)
    if kind == "uuids":
        return draw_in_split(lambda: str(uuid.UUID(int=generator.getrandbits(128), version=4)), split)
    adjective = generator.choice(word_list("adjective", split))
    return f"{adjective}-{generator.choice(word_list('noun', split))}"


def draw_number(digits: int, generator: random.Random, split: Split) -> str:
    """A number of the split that does not begin with 0."""
    return draw_in_split(lambda: str(generator.randrange(10 ** (digits - 1), 10**digits)), split)


def draw_letters(letters: str, count: int, generator: random.Random, split: Split) -> str:
    """`count` of the letters, together an item of the split."""
    return draw_in_split(lambda: "".join(generator.choices(letters, k=count)), split)
