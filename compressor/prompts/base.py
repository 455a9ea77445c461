"""What a prompt is, and what generates one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

CountTokens = Callable[[str], int]
"""Tokens that the model reads for a text, those that its tokenizer puts in front included."""


class CountsTogether(ABC):
    """A `CountTokens` that takes less time for many texts at once."""

    def __call__(self, text: str) -> int:
        return self.many([text])[0]

    @abstractmethod
    def many(self, texts: Sequence[str]) -> list[int]:
        """The tokens of each text."""


def count_all(count_tokens: CountTokens, texts: Sequence[str]) -> list[int]:
    """The tokens of each text."""
    if isinstance(count_tokens, CountsTogether):
        return count_tokens.many(texts)
    return [count_tokens(text) for text in texts]


Split = Literal["evaluation", "calibration"]
"""Words, keys and haystacks of the two never meet."""

Match = Literal["all", "part"]
"""RULER's scores: the share of the answers that occur in the output, or whether any does."""


@dataclass(frozen=True)
class Prompt:
    """One question to a model. It reads `text` and should go on with `completion`.

    `completion` is the ideal continuation in the task's own form, with the space that begins it; every
    one of `answers` occurs in it, in this order.
    """

    task: str
    input: str
    answer_prefix: str
    answers: tuple[str, ...]
    match: Match
    completion: str

    @property
    def text(self) -> str:
        return self.input + self.answer_prefix


class Task(ABC):
    """One prompt form."""

    name: str
    tokens_to_generate: int
    """RULER's limit on the output, which counts towards the length of a prompt."""

    @abstractmethod
    def minimum_length(self, count_tokens: CountTokens) -> int:
        """Fewest tokens of prompt and output together that the form needs."""

    @abstractmethod
    def generate(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Prompt:
        """A prompt that, with `tokens_to_generate` of output, is at most `length` tokens long and close to it."""

    def sample(
        self, count: int, length: int, count_tokens: CountTokens, generator: random.Random, split: Split
    ) -> tuple[Prompt, ...]:
        """`count` prompts as `generate` makes them."""
        return tuple(self.generate(length, count_tokens, generator, split) for _ in range(count))
