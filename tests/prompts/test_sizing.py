"""Lengths of prompts, against counts of their own and against an exhaustive search."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from compressor.errors import RequestError
from compressor.prompts.base import CountsTogether, Prompt
from compressor.prompts.registry import find_task, generate_prompts, task_names
from compressor.prompts.sizing import Draft, fit
from tests.prompts.lm_eval_ruler import count_tokens

TASKS = [*task_names(), "niah_keys_4", "vt_2x3", "cwe_3", "recall_8"]


def whole_characters(text: str) -> int:
    return len(text) // 3 + 2


@pytest.mark.parametrize("count", [count_tokens, whole_characters])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_come_close_to_the_length_and_stay_below(task: str, count: Callable[[str], int]) -> None:
    form = find_task(task)
    for length in (1200, 3000):
        for prompt in generate_prompts(form, 8, length, count, 0, "evaluation"):
            used = count(prompt.text) + form.tokens_to_generate
            # A needle with two UUIDs, the largest unit, takes 50 tokens.
            assert length - max(0.02 * length, 60) <= used <= length


@pytest.mark.parametrize("task", [*TASKS, "niah_keys_32", "vt_4x8"])
def test_every_form_can_be_generated_at_its_minimum_length_and_not_below(task: str) -> None:
    form = find_task(task)
    minimum = form.minimum_length(count_tokens)
    for prompt in generate_prompts(form, 10, minimum, count_tokens, 3, "evaluation"):
        assert count_tokens(prompt.text) + form.tokens_to_generate <= minimum
    with pytest.raises(RequestError, match=f"length {minimum - 1}: a prompt of {task} .* at least {minimum} tokens"):
        generate_prompts(form, 1, minimum - 1, count_tokens, 3, "evaluation")


class Together(CountsTogether):
    """Notes how many texts each call counts."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def many(self, texts: Sequence[str]) -> list[int]:
        self.calls.append(len(texts))
        return [count_tokens(text) for text in texts]


@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_sized_together_and_are_those_of_one_by_one(task: str) -> None:
    together = Together()
    prompts = generate_prompts(find_task(task), 8, 1200, together, 0, "evaluation")
    assert prompts == generate_prompts(find_task(task), 8, 1200, count_tokens, 0, "evaluation")
    # The 32 smallest for the minimum, two texts that check the tokenizer, then smallest prompts, probes, whole prompts.
    assert together.calls[:5] == [1, 1, 32, 8, 8]


def test_a_whole_prompt_is_counted_few_times(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(tokenizer.encode(text).ids))
        return counted[-1]

    for task in (name for name in TASKS if name != "completion"):
        counted.clear()
        generate_prompts(find_task(task), 10, 2048, count, 0, "evaluation")
        assert sum(tokens > 1024 for tokens in counted) <= 10 * 3


@pytest.mark.parametrize(
    "tokens_of",
    [
        lambda units: 10 + 3 * units,
        lambda units: 10 + units**2 // 7,
        lambda units: 10 + 50 * (units // 25) + units,
        lambda units: 12 + int(40 * units**0.5),
        lambda units: 10 + (900 + units if units > 31 else units),
    ],
)
@pytest.mark.parametrize("budget", [10, 11, 60, 500, 905, 4096])
def test_fit_against_an_exhaustive_search(tokens_of: Callable[[int], int], budget: int) -> None:
    def build(units: int) -> Prompt:
        return Prompt("any", "x" * tokens_of(units), "", (), "all", "")

    prompt = fit(Draft(build, minimum=1, probe=4), len, budget)
    sizes = [tokens_of(units) for units in range(1, 12_000)]
    if sizes[0] > budget:
        assert prompt is None
        return
    assert prompt is not None
    best = max(size for size in sizes if size <= budget)
    following = sizes[len([size for size in sizes if size <= budget])]
    assert len(prompt.text) <= budget
    assert len(prompt.text) >= best - max(0.01 * budget, following - best)


@pytest.mark.parametrize("limit", [50, 600, 1900])
def test_a_tokenizer_that_truncates_is_refused(limit: int) -> None:
    message = f"the tokenizer gives {limit} tokens also for a longer text, and .* 1970; turn its truncation off"
    with pytest.raises(RequestError, match=message):
        generate_prompts(find_task("vt"), 1, 2000, lambda text: min(count_tokens(text), limit), 0, "evaluation")


def test_a_length_that_no_draw_fits_is_refused_by_the_form_itself() -> None:
    with pytest.raises(RequestError, match=r"length 100: a prompt of cwe with its output needs at least \d+ tokens"):
        find_task("cwe").generate(100, count_tokens, random.Random(0), "evaluation")


def test_needles_longer_than_others_are_drawn_again() -> None:
    """Where only some draws fit, the prompts are those."""

    def count(text: str) -> int:
        key = re.search(r"numbers for (\S+) is", text)
        return 100 + (10_000 if key is not None and len(key.group(1)) > 12 else text.count("\n"))

    form = find_task("niah_keys_1")
    generator = random.Random(0)
    one_by_one = tuple(form.generate(400, count, generator, "evaluation") for _ in range(10))
    assert all(count(prompt.text) < 400 for prompt in one_by_one)
    assert form.sample(10, 400, count, random.Random(0), "evaluation") == one_by_one
