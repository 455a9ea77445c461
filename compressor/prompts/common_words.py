"""Common words (RULER's `cwe`): a numbered list of words, of which a few occur more often than the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from compressor.prompts.base import CountTokens, Prompt, Split
from compressor.prompts.sizing import Draft, SizedTask
from compressor.prompts.words import all_words

FREQUENT_FROM = 4096
"""From this length on a common word occurs 30 times and an uncommon one 3 times; below, 6 times and once (RULER)."""


@dataclass(frozen=True)
class CommonWordsTask(SizedTask):
    """`common` common words; RULER has 10. Fewer make the form fit into shorter contexts."""

    name: str
    common: int = 10

    @property
    def tokens_to_generate(self) -> int:  # type: ignore[override]
        """RULER's 120 for 10 words."""
        return 12 * self.common

    def draft(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Draft:
        """One uncommon word is a unit. Where they run out, every word occurs more often, in the same proportion."""
        # No list of `length` tokens has more words than that; 256 are enough for the smallest prompt and its probe.
        words = generator.sample(all_words(split), min(len(all_words(split)), max(length, 256)))
        common, uncommon = words[: self.common], words[self.common :]
        often, seldom = (30, 3) if length >= FREQUENT_FROM else (6, 1)
        seed = generator.getrandbits(64)

        def build(units: int) -> Prompt:
            times = -(-units // len(uncommon))
            entries = common * (often * times) + uncommon[: units // times] * (seldom * times)
            random.Random(seed).shuffle(entries)
            return self._prompt(entries, common)

        return Draft(build, minimum=self.common, probe=32)

    def _prompt(self, entries: Sequence[str], common: Sequence[str]) -> Prompt:
        """The answers stand in the order in which they first occur, which a model can know; RULER's order is random."""
        answers = tuple(sorted(common, key=entries.index))
        question, answer_prefix = common_words_question(entries, len(answers))
        return Prompt(self.name, question, answer_prefix, answers, "all", f" {numbered(answers)}")


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def common_words_question(entries: Sequence[str], common: int) -> tuple[str, str]:
    """RULER's template without its solved example, as in lm-eval: list and question, and the answer's beginning."""
    question = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{numbered(entries)}\n"
        f"Question: What are the {common} most common words in the above list?"
    )
    return question, f" Answer: The top {common} words that appear most often in the list are:"
