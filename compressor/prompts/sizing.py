"""Prompts of a wanted length from a form that grows by units, in few passes of the tokenizer over a whole prompt."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from compressor.errors import RequestError
from compressor.prompts.base import CountTokens, Prompt, Split, Task, count_all

_SLACK = 0.01
"""Share of the length that a prompt may fall short of it, if that is more than one unit."""
_ESTIMATES = 4
"""Guesses from the tokens of a unit before the search halves its interval instead."""
_MINIMUM_DRAWS = 32
_REDRAWS = 64

Search = Generator[str, int, Prompt]
"""Asks for the tokens of one text after the other, and ends with a prompt."""


@dataclass(frozen=True)
class Draft:
    """A prompt whose words are drawn and whose size is open.

    `build` gives the prompt of so many units (noise lines, words of text, list entries), the same for the same number,
    and longer for a larger one. It is called with `minimum` or more. `probe` units more than that measure one unit.
    """

    build: Callable[[int], Prompt]
    minimum: int
    probe: int


class SizedTask(Task):
    """A form that grows by units."""

    @abstractmethod
    def draft(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Draft:
        """A new prompt of a form that may depend on the length (RULER's counts do)."""

    def minimum_length(self, count_tokens: CountTokens) -> int:
        """Enough for each of 32 draws of the smallest form."""
        generator = random.Random(0)
        drafts = [self.draft(0, count_tokens, generator, "evaluation") for _ in range(_MINIMUM_DRAWS)]
        return self.tokens_to_generate + max(_smallest(drafts, count_tokens))

    def generate(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Prompt:
        """See `Task.generate`.

        Raises:
            RequestError: 64 draws of the smallest form were all longer than `length`.
        """
        return self.sample(1, length, count_tokens, generator, split)[0]

    def sample(
        self, count: int, length: int, count_tokens: CountTokens, generator: random.Random, split: Split
    ) -> tuple[Prompt, ...]:
        """See `Task.sample`; the sizes of all prompts are searched together.

        Raises:
            RequestError: as `generate`.
        """
        state = generator.getstate()
        drafts = [self.draft(length, count_tokens, generator, split) for _ in range(count)]
        searches = begin_searches(drafts, count_tokens, length - self.tokens_to_generate)
        if len(searches) < count:
            # What is drawn again is drawn before the next prompt, so that more prompts begin with the same ones.
            generator.setstate(state)
            searches = [self._search(length, count_tokens, generator, split) for _ in range(count)]
        return tuple(answered(searches, count_tokens))

    def _search(self, length: int, count_tokens: CountTokens, generator: random.Random, split: Split) -> Search:
        for _ in range(_REDRAWS):
            draft = self.draft(length, count_tokens, generator, split)
            searches = begin_searches([draft], count_tokens, length - self.tokens_to_generate)
            if searches:
                return searches[0]
        raise too_short(self, length, self.minimum_length(count_tokens))


def too_short(task: Task, length: int, minimum: int) -> RequestError:
    return RequestError(
        f"length {length}: a prompt of {task.name} with its output needs at least {minimum} tokens of this tokenizer; "
        f"ask for {minimum} or more, or leave {task.name} out."
    )


def fit(draft: Draft, count_tokens: CountTokens, budget: int) -> Prompt | None:
    """The largest prompt of at most `budget` tokens, to within one unit or 1%; None if the smallest is longer.

    Raises:
        RequestError: a longer text has no more tokens.
    """
    searches = begin_searches([draft], count_tokens, budget)
    return answered(searches, count_tokens)[0] if searches else None


def begin_searches(drafts: Sequence[Draft], count_tokens: CountTokens, budget: int) -> list[Search]:
    """The searches for the prompts that `fit` gives, in order, without the drafts whose smallest prompt is too long."""
    smallest = _smallest(drafts, count_tokens)
    return [_search(draft, fixed, budget) for draft, fixed in zip(drafts, smallest, strict=True) if fixed <= budget]


def _smallest(drafts: Sequence[Draft], count_tokens: CountTokens) -> list[int]:
    """Tokens of the smallest prompt of each."""
    return count_all(count_tokens, [draft.build(draft.minimum).text for draft in drafts])


def answered(searches: Sequence[Search], count_tokens: CountTokens) -> list[Prompt]:
    """What each search finds. The texts that they ask for are counted together, so that tokenizers can share the work.

    Raises:
        RequestError: as `fit`.
    """
    found: dict[int, Prompt] = {}
    asked = {number: next(search) for number, search in enumerate(searches)}
    while asked:
        counts = count_all(count_tokens, list(asked.values()))
        for number, tokens in zip(list(asked), counts, strict=True):
            try:
                asked[number] = searches[number].send(tokens)
            except StopIteration as end:
                found[number] = end.value
                del asked[number]
    return [found[number] for number in range(len(searches))]


def _search(draft: Draft, fixed: int, budget: int) -> Search:
    """`fixed` are the tokens of the smallest prompt.

    Two short texts give the tokens of a unit, and each pass over a whole prompt corrects the estimate. Between the
    largest size known to fit and the smallest known not to, the search always ends.
    """
    fitting, best = draft.minimum, draft.build(draft.minimum)
    tokens = fixed
    probe = yield draft.build(fitting + draft.probe).text
    if probe <= fixed:
        raise _truncated(fixed, budget)
    unit = (probe - fixed) / draft.probe
    too_large: int | None = None
    attempts, units = 0, fitting
    while (slack := budget - tokens) < 0 or slack >= max(unit, _SLACK * budget):
        attempts += 1
        # Where units are small, the middle of the range that is close enough is the easiest to hit.
        aim = _SLACK * budget / 2 if _SLACK * budget > 2 * unit else 0.0
        estimate = units + int((slack - aim) / unit) - (slack < 0)
        units = _next_size(estimate, fitting, too_large, halve=attempts > _ESTIMATES)
        if units == fitting:
            return best
        prompt, before = draft.build(units), tokens
        tokens = yield prompt.text
        if tokens > budget:
            too_large = units
        elif too_large is None and tokens <= before and units - fitting >= draft.probe:
            raise _truncated(tokens, budget)
        else:
            fitting, best = units, prompt
        # A unit stays positive also where the first ones add no token.
        unit = max((tokens - fixed) / (units - draft.minimum), unit / 8)
    return best


def _truncated(tokens: int, budget: int) -> RequestError:
    return RequestError(
        f"the tokenizer gives {tokens} tokens also for a longer text, and the prompt should have {budget}; "
        "turn its truncation off."
    )


def _next_size(estimate: int, fitting: int, too_large: int | None, halve: bool) -> int:
    """A size between the two that are known, or `fitting` when there is none between."""
    if too_large is None:
        return max(estimate, fitting + 1)
    if too_large - fitting == 1:
        return fitting
    if halve:
        return (fitting + too_large) // 2
    return min(max(estimate, fitting + 1), too_large - 1)
