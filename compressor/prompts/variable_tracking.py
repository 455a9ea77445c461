"""Variable tracking (RULER's `vt`): which variables hold a value that is passed along a chain of assignments."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase

from compressor.prompts.base import CountTokens, Prompt, Split
from compressor.prompts.haystacks import NOISE
from compressor.prompts.sizing import Draft, SizedTask, fit
from compressor.prompts.split import draw_distinct
from compressor.prompts.words import draw_letters, draw_number

EXAMPLE_FROM = 4096
"""RULER's shortest length. From it on RULER's solved example stands in front; it takes 500 tokens."""
_EXAMPLE_LENGTH = 500


@dataclass(frozen=True)
class Chain:
    """`VAR first = value`, then each variable from the one before."""

    value: str
    variables: tuple[str, ...]

    def assignments(self) -> list[str]:
        """RULER's statements, with the space that ends all but the first."""
        copies = zip(self.variables[1:], self.variables, strict=False)
        first = f"VAR {self.variables[0]} = {self.value}"
        return [first, *(f"VAR {target} = VAR {source} " for target, source in copies)]


@dataclass(frozen=True)
class VariableTrackingTask(SizedTask):
    """`chains` chains of `hops` copies each, of which the variables of one are asked for."""

    name: str
    chains: int = 1
    hops: int = 4

    @property
    def tokens_to_generate(self) -> int:  # type: ignore[override]
        """RULER's 30 for 5 variables."""
        return 6 * (self.hops + 1)

    def draft(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Draft:
        example = ""
        if length >= EXAMPLE_FROM:
            solved = fit(self._draft(3, generator, split), count_tokens, _EXAMPLE_LENGTH - self.tokens_to_generate)
            example = "" if solved is None else f"{solved.text}{solved.completion}\n\n\n\n"
        return self._draft(5, generator, split, example)

    def _draft(self, letters: int, generator: random.Random, split: Split, example: str = "") -> Draft:
        """Variables have `letters` letters: RULER's have 5, and 3 in its example."""
        per_chain = self.hops + 1
        names = draw_distinct(
            partial(draw_letters, ascii_uppercase, letters, generator, split), self.chains * per_chain
        )
        values = draw_distinct(partial(draw_number, 5, generator, split), self.chains)
        chains = [
            Chain(value, tuple(names[index * per_chain : (index + 1) * per_chain]))
            for index, value in enumerate(values)
        ]
        seed = generator.getrandbits(64)

        def build(units: int) -> Prompt:
            # Begun anew, so that the same number of lines gives the same prompt.
            positions = random.Random(seed)
            context = hide_chains(chains, units, lambda lines: sorted(positions.sample(range(lines), per_chain)))
            question, answer_prefix = tracking_question(context, chains[0])
            answers = chains[0].variables
            return Prompt(self.name, example + question, answer_prefix, answers, "all", "  " + " ".join(answers))

        # A chain's statements stand in front of different lines.
        return Draft(build, minimum=per_chain + 1, probe=4)


def hide_chains(chains: Sequence[Chain], noise_lines: int, positions: Callable[[int], Sequence[int]]) -> str:
    """Noise with the statements of one chain after the other inserted, each in its order.

    `positions` gives, for a number of lines, the ascending indexes of those that the chain's statements stand before.
    """
    lines = [NOISE + "\n"] * noise_lines
    for chain in chains:
        for offset, (index, statement) in enumerate(zip(positions(len(lines)), chain.assignments(), strict=True)):
            lines.insert(index + offset, statement)
    return " ".join(lines)


def tracking_question(context: str, chain: Chain) -> tuple[str, str]:
    """RULER's template, its misspelling included: the context with the question, and the beginning of the answer.

    RULER's answers follow after two spaces: one ends its template, one is put in front of every answer.
    """
    question = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\n"
        f"Question: Find all variables that are assigned the value {chain.value} in the text above."
    )
    answer_prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(chain.variables)} variables are assgined the value {chain.value}, they are:"
    )
    return question, answer_prefix
