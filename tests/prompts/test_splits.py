"""Nothing that an evaluation prompt asks or answers occurs in a calibration prompt."""

from __future__ import annotations

import random
import re

import pytest
from wonderwords import RandomWord

from compressor.prompts.base import Prompt, Split
from compressor.prompts.registry import find_task, generate_prompts, task_names
from compressor.prompts.words import word_list
from tests.prompts import reading
from tests.prompts.lm_eval_ruler import count_tokens

# The texts of `completion` are not drawn from words.
DRAWN = [name for name in task_names() if name != "completion"]
TASKS = [*DRAWN, "niah_keys_8", "vt_3x3", "cwe_3", "recall_16"]


def generated(task: str, split: Split) -> list[Prompt]:
    generator = random.Random(1)
    form = find_task(task)
    return [form.generate(1200, count_tokens, generator, split) for _ in range(30)]


def drawn_items(prompt: Prompt) -> set[str]:
    """Keys, values, variables and words; of a pair of words, each with its place."""
    if prompt.task.startswith("niah"):
        items = {item for _, key, value in reading.read_needles(prompt.input).needles for item in (key, value)}
        pairs = [item for item in items if not re.search(r"\d", item) and item.count("-") == 1]
        return items | {f"{place} {word}" for pair in pairs for place, word in enumerate(pair.split("-"))}
    if prompt.task.startswith("vt"):
        (read,) = reading.read_tracking(prompt.text)
        return set(" ".join(statement for _, statement in read.statements).split()) - {"VAR", "="}
    if prompt.task.startswith("cwe"):
        return set(reading.read_list(prompt.input))
    if prompt.task == "fwe":
        return set(reading.read_coded(prompt.input)) - {"..."}
    return set(re.findall(r"^(\w+): ", prompt.text, re.MULTILINE)) | set(
        re.findall(r": (.+)$", prompt.text, re.MULTILINE)
    )


@pytest.mark.parametrize("task", TASKS)
def test_keys_values_and_words(task: str) -> None:
    evaluation, calibration = (
        set().union(*map(drawn_items, generated(task, split))) for split in ("evaluation", "calibration")
    )
    assert len(evaluation) > 30
    assert len(calibration) > 30
    assert not evaluation & calibration


@pytest.mark.parametrize("haystack", [None, " ".join(f"Here is word{index}." for index in range(4000))])
def test_text_haystacks(haystack: str | None) -> None:
    form = find_task("niah_single_2", haystack)

    def passages(split: Split) -> set[str]:
        prompts = [form.generate(1200, count_tokens, random.Random(seed), split) for seed in range(20)]
        words = [re.sub(reading.NEEDLE, " ", reading.read_needles(prompt.input).context).split() for prompt in prompts]
        # Shorter ones may be phrases: "Now it came to pass in the days" begins two books of the bundled texts.
        return {" ".join(text[start : start + 12]) for text in words for start in range(len(text) - 11)}

    evaluation, calibration = passages("evaluation"), passages("calibration")
    assert len(evaluation) > 2000
    assert len(calibration) > 2000
    assert not evaluation & calibration


@pytest.mark.parametrize("category", ["noun", "adjective", "verb"])
def test_word_lists_are_halves(category: str) -> None:
    evaluation, calibration = set(word_list(category, "evaluation")), set(word_list(category, "calibration"))
    whole = {word for word in RandomWord().filter(include_categories=[category]) if " " not in word}
    assert evaluation | calibration == whole
    assert not evaluation & calibration
    assert abs(len(evaluation) - len(calibration)) < 0.1 * len(whole)


def test_streams_of_splits_lengths_and_seeds_are_unrelated() -> None:
    form = find_task("vt")

    def values(length: int, seed: int, split: Split) -> set[str]:
        prompts = generate_prompts(form, 40, length, count_tokens, seed, split)
        return {reading.read_tracking(prompt.text)[0].value for prompt in prompts}

    base = values(500, 0, "evaluation")
    # By chance two of 40 values among 45,000 meet once in 28 comparisons.
    assert all(len(base & other) <= 2 for other in (values(501, 0, "evaluation"), values(500, 1, "evaluation")))
    assert not base & values(500, 0, "calibration")
