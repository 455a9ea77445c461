"""Labels against an independent oracle: permutations, sums of bits, and Python's own arithmetic."""

from __future__ import annotations

import re

import pytest
import torch

from compressor.errors import RequestError
from compressor.evaluation.state_tracking.base import IGNORED
from compressor.evaluation.state_tracking.modular_arithmetic import ModularArithmetic
from compressor.evaluation.state_tracking.parity import Parity
from compressor.evaluation.state_tracking.registry import TASK_NAMES, find_task
from compressor.evaluation.state_tracking.word_problems import GroupWordProblem


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["s3", "s4", "a5", "s5", "s5_transpositions"])
@pytest.mark.parametrize("length", [1, 2, 7, 128])
def test_word_problem_labels_are_where_every_point_ends(name, length):
    task = find_task(name)
    assert isinstance(task, GroupWordProblem)
    batch = task.draw(16, length, length, generator())
    elements = task.group.permutations.tolist()
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        points = list(range(len(elements[0])))
        for token, label in zip(tokens, labels, strict=True):
            points = [elements[token][point] for point in points]
            assert elements[label] == points


def test_words_use_all_letters_and_no_others():
    task = find_task("s5_transpositions")
    tokens = task.draw(64, 64, 64, generator()).tokens
    elements = task.group.permutations[tokens.unique()]
    assert len(elements) == 11
    assert ((elements != torch.arange(5)).sum(1) <= 2).all()
    assert len(find_task("s5").draw(64, 64, 64, generator()).tokens.unique()) == 120


def test_parity_counts_ones():
    batch = Parity().draw(32, 3, 40, generator())
    lengths = (batch.labels != IGNORED).sum(1)
    assert 3 <= int(lengths.min()) < int(lengths.max()) <= 40
    for tokens, labels, length in zip(batch.tokens.tolist(), batch.labels.tolist(), lengths.tolist(), strict=True):
        assert labels[length:] == [IGNORED] * (40 - length)
        assert labels[:length] == [sum(tokens[: t + 1]) % 2 for t in range(length)]


@pytest.mark.parametrize("name", ["modular_arithmetic", "modular_arithmetic_sums"])
@pytest.mark.parametrize(("shortest", "longest"), [(2, 6), (3, 40), (40, 256)])
def test_arithmetic_labels_are_those_of_python(name, shortest, longest):
    task = find_task(name)
    assert isinstance(task, ModularArithmetic)
    batch = task.draw(128, shortest, longest, generator())
    seen = set()
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        text = task.text(tokens)
        seen.add(len(text))
        assert shortest <= len(text) <= longest
        assert text.count("=") == 1
        assert text.endswith("=")
        expected = torch.full((longest,), IGNORED)
        expected[len(text) - 1] = eval(text[:-1]) % 5
        assert torch.equal(labels, expected)
    assert {shortest, longest} <= seen or longest > 40


def test_arithmetic_draws_every_form():
    text = "\n".join(find_task("modular_arithmetic").text(row) for row in draw_arithmetic("modular_arithmetic"))
    for form in (r"^\d=", r"^-\d=", r"^\(\d\)=", r"^\(-\d\)=", r"\d\*\d", r"\d\+\d", r"\d-\d", r"\)[-+*]\(", r"--"):
        assert re.search(form, text, re.MULTILINE), form
    assert set(re.findall(r"\d", text)) == set("01234")
    sums = "".join(find_task("modular_arithmetic_sums").text(row) for row in draw_arithmetic("modular_arithmetic_sums"))
    assert "*" not in sums


def draw_arithmetic(name: str) -> torch.Tensor:
    return find_task(name).draw(512, 2, 24, generator()).tokens


@pytest.mark.parametrize("name", TASK_NAMES)
def test_batches_depend_on_the_generator_alone(name):
    task = find_task(name)
    state = torch.random.get_rng_state()
    first, again, other = (task.draw(8, 20, 40, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.tokens, other.tokens)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert int(first.tokens.min()) >= 0
    assert int(first.tokens.max()) < task.vocab_size
    assert set(first.labels.unique().tolist()) <= {IGNORED, *range(task.num_classes)}


def test_impossible_requests_are_refused():
    with pytest.raises(
        RequestError, match="modular_arithmetic cannot have lengths 1 to 40: the first must be at least 2"
    ):
        find_task("modular_arithmetic").draw(1, 1, 40, generator())
    with pytest.raises(RequestError, match="parity cannot have lengths 40 to 3"):
        Parity().draw(1, 40, 3, generator())
    with pytest.raises(RequestError, match="Unknown state-tracking task 'partiy': did you mean parity?"):
        find_task("partiy")
    with pytest.raises(RequestError, match="modulus 11 is not supported; give 2 to 10."):
        ModularArithmetic("x", modulus=11)
    with pytest.raises(RequestError, match="operators .* are not supported"):
        ModularArithmetic("x", operators=("/",))
