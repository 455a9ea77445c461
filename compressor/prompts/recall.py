"""Associative recall: a table of key-value pairs, lookups in it, and a last key whose value is asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from compressor.prompts.base import CountTokens, Prompt, Split
from compressor.prompts.sizing import Draft, SizedTask
from compressor.prompts.split import draw_distinct, draw_in_split
from compressor.prompts.words import all_words


@dataclass(frozen=True)
class RecallTask(SizedTask):
    """`pairs` pairs. Answered lookups of the others fill the length: what is asked for stands in the table alone.

    The task is that of multi-query associative recall (Arora et al. 2023, arXiv 2312.04927) in words.
    """

    name: str
    pairs: int
    tokens_to_generate: int = 16

    def draft(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Draft:
        """One answered lookup is a unit."""
        keys = draw_distinct(lambda: draw_key(generator, split), self.pairs)
        table = dict(zip(keys, generator.sample(all_words(split), self.pairs), strict=True))
        asked = generator.choice(keys)
        others = [key for key in keys if key != asked]
        lookups = random.Random(generator.getrandbits(64))
        answered: list[str] = []

        def build(units: int) -> Prompt:
            while len(answered) < units:
                answered.append(lookups.choice(others))
            question = recall_question(table, answered[:units])
            answer = table[asked]
            return Prompt(self.name, question, f"{asked}:", (answer,), "all", f" {answer}")

        return Draft(build, minimum=0, probe=32)


def draw_key(generator: random.Random, split: Split) -> str:
    """Two letters and a digit."""
    return draw_in_split(lambda: "".join(generator.choices(ascii_uppercase, k=2)) + str(generator.randrange(10)), split)


def recall_question(table: dict[str, str], answered: Sequence[str]) -> str:
    pairs = "".join(f"{key}: {value}\n" for key, value in table.items())
    lookups = "".join(f"{key}: {table[key]}\n" for key in answered)
    return f"Lookup table.\n{pairs}Queries.\n{lookups}"
