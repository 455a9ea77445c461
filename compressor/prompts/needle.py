"""Needles in a haystack (RULER's `niah`): values are assigned to keys in a long context, and some are asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from compressor.prompts.base import CountTokens, Prompt, Split
from compressor.prompts.haystacks import Haystack
from compressor.prompts.sizing import Draft, SizedTask
from compressor.prompts.split import draw_distinct, draw_unused
from compressor.prompts.words import ValueKind, draw_value


@dataclass(frozen=True)
class NeedleTask(SizedTask):
    """`keys` keys of `values` values each, of which `queries` keys are asked for (Hsieh et al. 2024, section 3)."""

    name: str
    haystack: Haystack
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: ValueKind = "words"
    value_kind: ValueKind = "numbers"
    tokens_to_generate: int = 128

    def draft(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Draft:
        draw_key = partial(draw_value, self.key_kind, generator, split)
        draw = partial(draw_value, self.value_kind, generator, split)
        keys = draw_distinct(draw_key, self.keys)
        values = draw_distinct(draw, self.keys * self.values)
        assigned = {key: values[index * self.values : (index + 1) * self.values] for index, key in enumerate(keys)}
        needles = [needle(self.value_kind, key, value) for key in keys for value in assigned[key]]
        generator.shuffle(needles)
        queries = generator.sample(keys, self.queries)
        # Distractors are drawn while the prompt grows, so from a stream of their own. None has a needle's key or value.
        hay = random.Random(generator.getrandbits(64))

        def distractor() -> str:
            key = draw_unused(partial(draw_value, self.key_kind, hay, split), keys)
            value = draw_unused(partial(draw_value, self.value_kind, hay, split), values)
            return needle(self.value_kind, key, value)

        context = self.haystack.context(needles, distractor, generator, split)
        answers = tuple(value for query in queries for value in assigned[query])
        return Draft(
            build=lambda units: self._prompt(context(units), queries, answers),
            minimum=self.haystack.minimum(len(needles)),
            probe=self.haystack.probe,
        )

    def _prompt(self, context: str, queries: Sequence[str], answers: tuple[str, ...]) -> Prompt:
        question, answer_prefix = needle_question(self.value_kind, context, queries, len(answers))
        completion = " " + ", ".join(answers)
        return Prompt(self.name, question, answer_prefix, answers, "all", completion)


def needle(kind: ValueKind, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def needle_question(kind: ValueKind, context: str, queries: Sequence[str], answers: int) -> tuple[str, str]:
    """RULER's template, in the singular for one answer: context and question, and the beginning of the answer."""
    query = ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]
    one = answers == 1
    noun = kind[:-1] if one else kind
    hidden = f"A special magic {noun} is hidden" if one else f"Some special magic {noun} are hidden"
    what = "What is the" if one else "What are all the"
    question = (
        f"{hidden} within the following text. Make sure to memorize it. "
        f"I will quiz you about the {noun} afterwards.\n{context}\n"
        f"{what} special magic {noun} for {query} mentioned in the provided text?"
    )
    verb = "is" if one else "are"
    return question, f" The special magic {noun} for {query} mentioned in the provided text {verb}"
