"""What generated prompts ask has the answers that they name, found by readers that know the published forms alone."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import pytest

from compressor.prompts.base import Prompt
from compressor.prompts.registry import find_task, generate_prompts, task_names
from tests.prompts import reading
from tests.prompts.lm_eval_ruler import count_tokens

COUNT = 6


def prompts(task: str, length: int = 1500, haystack: str | None = None) -> tuple[Prompt, ...]:
    return generate_prompts(find_task(task, haystack), COUNT, length, count_tokens, seed=5, split="evaluation")


@pytest.mark.parametrize("task", task_names())
def test_completion_holds_the_answers_in_their_order(task: str) -> None:
    for prompt in prompts(task):
        assert prompt.task == task
        assert prompt.completion.startswith(" ")
        assert not prompt.text.endswith(" ")
        found = [prompt.completion.index(answer) for answer in prompt.answers]
        assert found == sorted(found)
        assert count_tokens(prompt.completion) <= find_task(task).tokens_to_generate


@pytest.mark.parametrize(
    ("task", "needles", "answers"),
    [
        *(("niah_single_1", 1, 1), ("niah_single_2", 1, 1), ("niah_single_3", 1, 1), ("niah_multikey_1", 4, 1)),
        *(("niah_multikey_2", None, 1), ("niah_multikey_3", None, 1), ("niah_multivalue", 4, 4)),
        *(("niah_multiquery", 4, 4), ("niah_word", 1, 1), ("niah_keys_1", 1, 1), ("niah_keys_20", 20, 1)),
    ],
)
def test_needles(task: str, needles: int | None, answers: int) -> None:
    for prompt in prompts(task):
        read = reading.read_needles(prompt.input)
        found = [value for query in read.queries for _, key, value in read.needles if key == query]
        assert sorted(found) == sorted(prompt.answers)
        assert len(prompt.answers) == answers
        keys = Counter(key for _, key, _ in read.needles)
        if needles is None:
            assert read.context.count("\n") + 1 == len(read.needles) > 10
        else:
            assert len(read.needles) == needles
        assert set(keys.values()) == {4 if task == "niah_multivalue" else 1}
        if task == "niah_multiquery":
            assert [{key: value for _, key, value in read.needles}[query] for query in read.queries] == list(
                prompt.answers
            )


def test_kinds_of_values() -> None:
    patterns = {
        "niah_single_1": r"[1-9]\d{6}",
        "niah_single_3": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
        "niah_word": r"[\w-]+-[\w-]+",
    }
    for task, pattern in patterns.items():
        assert all(re.fullmatch(pattern, prompt.answers[0]) for prompt in prompts(task))


def test_needles_stand_everywhere() -> None:
    lines = [
        prompt.input.split("\n").index(next(line for line in prompt.input.split("\n") if line.startswith("One of")))
        for prompt in generate_prompts(find_task("niah_single_1"), 60, 1000, count_tokens, 0, "evaluation")
    ]
    highest = prompts("niah_single_1", 1000)[0].input.count("\n")
    assert min(lines) <= highest // 5
    assert max(lines) >= highest - highest // 5


@pytest.mark.parametrize(
    ("task", "chains", "hops"), [("vt", 1, 4), ("vt_1x1", 1, 1), ("vt_3x2", 3, 2), ("vt_2x6", 2, 6)]
)
def test_variable_tracking(task: str, chains: int, hops: int) -> None:
    for prompt in prompts(task):
        (read,) = reading.read_tracking(prompt.text)
        assert list(prompt.answers) == reading.variables_with_value(read)
        assert len(prompt.answers) == hops + 1
        assert len(read.statements) == chains * (hops + 1)
        assert len({statement.split()[1] for _, statement in read.statements}) == len(read.statements)
        assert sum(statement.rstrip()[-1].isdigit() for _, statement in read.statements) == chains
        assert f"{hops + 1} variables are assgined the value {read.value}, they are:" in prompt.answer_prefix
        assert prompt.completion == "  " + " ".join(prompt.answers)


def test_variable_tracking_has_a_solved_example_from_4096_tokens_on() -> None:
    assert all(len(reading.read_tracking(prompt.text)) == 1 for prompt in prompts("vt", 4095))
    for prompt in prompts("vt", 4096):
        example, question = reading.read_tracking(prompt.text)
        solution = re.search(r"they are:  (.*)\n\n\n\nMemorize", prompt.input)
        assert solution is not None
        assert solution.group(1).split() == reading.variables_with_value(example)
        assert {len(variable) for variable in reading.variables_with_value(example)} == {3}
        assert {len(variable) for variable in reading.variables_with_value(question)} == {5}
        assert count_tokens(prompt.input[: solution.start()]) <= 500


@pytest.mark.parametrize(
    ("task", "length", "often", "seldom"),
    [("cwe", 1500, 6, 1), ("cwe", 4096, 30, 3), ("cwe_3", 512, 6, 1), ("cwe_10", 4095, 6, 1)],
)
def test_common_words(task: str, length: int, often: int, seldom: int) -> None:
    for prompt in prompts(task, length):
        entries = reading.read_list(prompt.input)
        counts = Counter(entries)
        common = [word for word, count in counts.items() if count == often]
        assert list(prompt.answers) == sorted(common, key=entries.index)
        assert len(common) == (10 if task == "cwe" else int(task[4:]))
        assert {count for word, count in counts.items() if word not in common} == {seldom}
        numbers = re.findall(r"(\d+)\. ", prompt.completion + " ")
        assert numbers == [str(number) for number in range(1, len(common) + 1)]


def test_common_words_keep_their_proportion_when_the_word_list_is_used_up() -> None:
    prompt = find_task("cwe").generate(4096, lambda text: len(text) // 100, random.Random(0), "evaluation")
    counts = Counter(reading.read_list(prompt.input))
    often = {counts.pop(answer) for answer in prompt.answers}
    (seldom,) = set(counts.values())
    assert seldom > 3
    assert often == {10 * seldom}


@pytest.mark.parametrize("length", [512, 1500, 4096])
def test_frequent_words(length: int) -> None:
    for prompt in prompts("fwe", length):
        (dots, *ranked) = Counter(reading.read_coded(prompt.input)).most_common(5)
        assert dots[0] == "..."
        assert [word for word, _ in ranked[:3]] == list(prompt.answers)
        counts = [count for _, count in ranked]
        assert all(first > second for first, second in itertools.pairwise(counts))


@pytest.mark.parametrize(("task", "pairs"), [("recall", 32), ("recall_2", 2), ("recall_100", 100)])
def test_recall(task: str, pairs: int) -> None:
    for prompt in prompts(task):
        begin, table, lookups = re.split(r"Lookup table\.\n|Queries\.\n", prompt.text)
        lines = [line.split(": ") for line in table.splitlines()]
        values = dict(lines)
        *answered, asked = lookups.splitlines()
        assert begin == ""
        assert len(lines) == len(values) == len(set(values.values())) == pairs
        assert all(values[key] == value for key, value in (line.split(": ") for line in answered))
        assert all(line.split(": ")[0] != asked[:-1] for line in answered)
        assert answered
        assert prompt.answers == (values[asked.removesuffix(":")],)


def test_a_given_text_is_the_haystack_and_is_read_again_after_its_end() -> None:
    text = " ".join(f"Word{index} follows here." for index in range(100))
    for prompt in prompts("niah_single_2", haystack=text):
        context = reading.read_needles(prompt.input).context
        numbers = [int(number) for number in re.findall(r"Word(\d+)", context)]
        assert set(numbers) == set(range(50, 100))
        assert all((second - first) % 50 == 1 for first, second in itertools.pairwise(numbers))
