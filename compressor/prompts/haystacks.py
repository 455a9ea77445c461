"""What needles are hidden in: repeated noise, other needles, or a text."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from compressor.demo import calibration_text_path, held_out_text_path
from compressor.errors import RequestError
from compressor.prompts.base import Split

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

Context = Callable[[int], str]
"""The text with its needles in it, from the number of units of hay."""

DEPTHS = tuple(round(index * 100 / 39) for index in range(40))
"""RULER's depths: percent of the sentences of a text that stand before a needle."""
_MIN_WORDS = 100
_LONG_WORD = 30
"""Characters a word, on the mean, beyond which a text has no white space between its words."""
_SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*$")
_SEPARATOR = "<|endoftext|>"


def insert_lines(lines: Sequence[str], needles: Sequence[str], indexes: Sequence[int]) -> str:
    """Lines with one needle in front of each of the lines at `indexes`; the first needle goes to the last index."""
    result = list(lines)
    for index, needle in zip(sorted(indexes, reverse=True), needles, strict=True):
        result.insert(index, needle)
    return "\n".join(result)


def insert_sentences(sentences: Sequence[str], needles: Sequence[str], positions: Sequence[int]) -> str:
    """A text with its needles, in their order, in front of the sentences at the ascending `positions`."""
    starts, ends = [0, *positions], [*positions, len(sentences)]
    pieces: list[str] = []
    for start, end, needle in zip(starts, ends, [*needles, ""], strict=True):
        pieces += [" ".join(sentences[start:end]), needle]
    return " ".join(pieces[:-1])


class Haystack(ABC):
    """A kind of hay, which grows by units."""

    probe: int
    """Units enough to measure the tokens of one."""

    @abstractmethod
    def minimum(self, needles: int) -> int:
        """Fewest units that so many needles can be hidden in."""

    @abstractmethod
    def context(
        self, needles: Sequence[str], distractor: Callable[[], str], generator: random.Random, split: Split
    ) -> Context:
        """Hay drawn for these needles; `distractor` draws a needle that nobody asks for."""


class _Lines(Haystack):
    """One line a unit."""

    probe = 4

    def minimum(self, needles: int) -> int:
        """Needles stand in front of different lines."""
        return needles


class NoiseHaystack(_Lines):
    """RULER's five sentences again and again; one line a unit."""

    def context(
        self, needles: Sequence[str], distractor: Callable[[], str], generator: random.Random, split: Split
    ) -> Context:
        seed = generator.getrandbits(64)
        return lambda units: insert_lines([NOISE] * units, needles, _sample(units, len(needles), seed))


class NeedleHaystack(_Lines):
    """Other needles; one a unit."""

    def context(
        self, needles: Sequence[str], distractor: Callable[[], str], generator: random.Random, split: Split
    ) -> Context:
        seed = generator.getrandbits(64)
        lines: list[str] = []

        def build(units: int) -> str:
            while len(lines) < units:
                lines.append(distractor())
            return insert_lines(lines[:units], needles, _sample(units, len(needles), seed))

        return build


@dataclass(frozen=True)
class TextHaystack(Haystack):
    """Sentences of a text from a random one on, from its start again after its end; one word a unit.

    A text that is handed in gives its first half to calibration and its second to evaluation. The bundled text
    has a file for each.

    Raises:
        RequestError: the text has fewer than 200 words.
    """

    text: str | None = None
    probe = 256

    def __post_init__(self) -> None:
        if self.text is None:
            return
        words = len(_words(self.text))
        if words < 2 * _MIN_WORDS:
            unspaced = len(self.text) > _LONG_WORD * max(words, 1)
            remedy = "a text with white space between words, where it is split" if unspaced else "a longer text"
            raise RequestError(
                f"haystack text of {words} words in {len(self.text):,} characters: evaluation and calibration take at "
                f"least {_MIN_WORDS} words each; hand in {remedy}."
            )

    def minimum(self, needles: int) -> int:
        return 1

    def context(
        self, needles: Sequence[str], distractor: Callable[[], str], generator: random.Random, split: Split
    ) -> Context:
        hay = self._evaluation if split == "evaluation" else self._calibration
        first = generator.randrange(len(hay.starts))
        depths = sorted(generator.sample(DEPTHS, len(needles)))

        def build(units: int) -> str:
            sentences = hay.sentences(first, units)
            return insert_sentences(sentences, needles, [len(sentences) * depth // 100 for depth in depths])

        return build

    @cached_property
    def _evaluation(self) -> _Sentences:
        return self._half(second=True) if self.text is not None else _bundled("evaluation")

    @cached_property
    def _calibration(self) -> _Sentences:
        return self._half(second=False) if self.text is not None else _bundled("calibration")

    def _half(self, second: bool) -> _Sentences:
        words = _words(self.text or "")
        middle = len(words) // 2
        return _Sentences.of(words[middle:] if second else words[:middle])


@dataclass(frozen=True)
class _Sentences:
    words: tuple[str, ...]
    starts: tuple[int, ...]
    """Index of the first word of every sentence, in ascending order, beginning with 0."""

    @classmethod
    def of(cls, words: Sequence[str]) -> _Sentences:
        """A sentence ends with a word that ends with a full stop, a question mark or an exclamation mark."""
        ends = (index + 1 for index, word in enumerate(words[:-1]) if _SENTENCE_END.search(word))
        return cls(tuple(words), (0, *ends))

    def sentences(self, first: int, count: int) -> list[str]:
        """`count` words from the start of sentence `first` on, in sentences; the last may be cut."""
        sentences: list[str] = []
        position = self.starts[first]
        while count > 0:
            following = bisect_right(self.starts, position)
            end = self.starts[following] if following < len(self.starts) else len(self.words)
            end = min(end, position + count)
            sentences.append(" ".join(self.words[position:end]))
            count -= end - position
            position = end % len(self.words)
        return sentences


@cache
def _bundled(split: Split) -> _Sentences:
    path = held_out_text_path() if split == "evaluation" else calibration_text_path()
    return _Sentences.of(_words(path.read_text(encoding="utf-8")))


def _words(text: str) -> list[str]:
    """Words of the documents of a text, which the bundled files separate by `<|endoftext|>`."""
    return text.replace(_SEPARATOR, " ").split()


def _sample(units: int, count: int, seed: int) -> list[int]:
    """The same different indexes below `units` whenever it is called with the same arguments."""
    return random.Random(seed).sample(range(units), count)
