"""Frequent words (RULER's `fwe`): coded words with frequencies of a zeta distribution; the top three are asked for."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase

from compressor.prompts.base import CountTokens, Prompt, Split
from compressor.prompts.sizing import Draft, SizedTask
from compressor.prompts.split import draw_distinct
from compressor.prompts.words import draw_letters

_ZETA_2 = math.pi**2 / 6
_DOTS = "..."
"""Stands for the most frequent word, and is no answer."""
_FEWEST_WORDS = 74
"""Total from which ranks 4 and 5, the closest that matter, have different counts: the difference exceeds 1."""


@dataclass(frozen=True)
class FrequentWordsTask(SizedTask):
    """Zeta exponent 2, words of 6 letters, a vocabulary of a fiftieth of the length (RULER's values)."""

    name: str
    tokens_to_generate: int = 50

    def draft(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Draft:
        size = max(length // 50, 5)
        coded = draw_distinct(partial(draw_letters, ascii_lowercase, 6, generator, split), size - 1)
        seed = generator.getrandbits(64)

        def build(units: int) -> Prompt:
            words = zeta_text([_DOTS, *coded], units)
            random.Random(seed).shuffle(words)
            question, answer_prefix = frequent_words_question(words)
            answers = tuple(coded[:3])
            return Prompt(self.name, question, answer_prefix, answers, "all", " " + " ".join(answers))

        return Draft(build, minimum=_FEWEST_WORDS, probe=128)


def zeta_text(vocabulary: Sequence[str], total: int) -> list[str]:
    """Every word as often as its rank says: `floor(total * rank**-2 / zeta(2))` times."""
    return [word for rank, word in enumerate(vocabulary, start=1) for _ in range(int(total / rank**2 / _ZETA_2))]


def frequent_words_question(words: Sequence[str]) -> tuple[str, str]:
    """RULER's template: the coded text with the question, and the beginning of the answer."""
    question = (
        "Read the following coded text and track the frequency of each coded word. "
        f"Find the three most frequently appeared coded words. {' '.join(words)}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    return question, " Answer: According to the coded text above, the three most frequently appeared words are:"
