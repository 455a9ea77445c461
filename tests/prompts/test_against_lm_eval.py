"""Our templates give, letter for letter, the documents of lm-eval 0.4.13's RULER tasks from the facts read off them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from compressor.demo import held_out_text_path
from compressor.prompts.common_words import common_words_question
from compressor.prompts.frequent_words import frequent_words_question, zeta_text
from compressor.prompts.haystacks import DEPTHS, insert_lines, insert_sentences
from compressor.prompts.needle import needle, needle_question
from compressor.prompts.variable_tracking import Chain, hide_chains, tracking_question
from tests.prompts import reading
from tests.prompts.lm_eval_ruler import DOCUMENTS, LENGTHS, lm_eval_documents, split_sentences


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    return lm_eval_documents(held_out_text_path())


def same(ours: tuple[str, str], document: dict[str, Any]) -> None:
    """lm-eval puts one space between a document and the beginning of its answer, and gives both without it."""
    question, answer_prefix = ours
    assert question == document["input"]
    assert answer_prefix == " " + document["gen_prefix"]


@pytest.mark.parametrize("number", range(DOCUMENTS))
@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2", "niah_multikey_3"])
def test_needles_among_lines(documents: dict[str, Any], task: str, number: int) -> None:
    document = documents[task][number]
    read = reading.read_needles(document["input"])
    kind = read.needles[0][0]
    asked = needle(kind, read.queries[0], document["outputs"][0])
    lines = read.context.split("\n")
    index = lines.index(asked)
    hay = lines[:index] + lines[index + 1 :]
    if task == "niah_single_1":
        assert set(hay) == {reading.NOISE}
    else:
        assert hay == [needle(*found) for found in read.needles if found[1] != read.queries[0]]
    context = insert_lines(hay, [asked], [index])
    same(needle_question(kind, context, read.queries, 1), document)


@pytest.mark.parametrize("number", range(DOCUMENTS))
@pytest.mark.parametrize("task", ["niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery"])
def test_needles_in_a_text(documents: dict[str, Any], task: str, number: int) -> None:
    document = documents[task][number]
    read = reading.read_needles(document["input"])
    needles = [needle(*found) for found in read.needles]
    sentences, positions, rest = [], [], read.context
    for text in needles:
        before, _, rest = rest.partition(text)
        sentences += [sentence for sentence in split_sentences(before.strip()) if sentence]
        positions.append(len(sentences))
    sentences += [sentence for sentence in split_sentences(rest.strip()) if sentence]
    context = insert_sentences(sentences, needles, positions)
    kind = read.needles[0][0]
    same(needle_question(kind, context, read.queries, len(document["outputs"])), document)


def test_depths(documents: dict[str, Any]) -> None:
    assert list(DEPTHS) == documents["DEPTHS"]


@pytest.mark.parametrize("number", range(DOCUMENTS))
def test_variable_tracking(documents: dict[str, Any], number: int) -> None:
    document = documents["vt"][number]
    example, question = reading.read_tracking(document["input"])

    def rebuilt(prompt: reading.TrackingPrompt) -> tuple[str, str, str]:
        chain = Chain(prompt.value, tuple(reading.variables_with_value(prompt)))
        positions = [line - offset for offset, (line, _) in enumerate(prompt.statements)]
        context = hide_chains([chain], prompt.noise_lines, lambda lines: positions)
        return *tracking_question(context, chain), "  " + " ".join(chain.variables)

    solved = "".join(rebuilt(example)) + "\n\n\n\n"
    ours, answer_prefix, completion = rebuilt(question)
    same((solved + ours, answer_prefix), document)
    assert completion.split() == document["outputs"]


@pytest.mark.parametrize("number", range(DOCUMENTS))
@pytest.mark.parametrize(("task", "often", "seldom"), [("cwe_short", 6, 1), ("cwe", 30, 3)])
def test_common_words(documents: dict[str, Any], task: str, often: int, seldom: int, number: int) -> None:
    document = documents[task][number]
    entries = reading.read_list(document["input"])
    common = set(document["outputs"])
    assert all(count == (often if word in common else seldom) for word, count in Counter(entries).items())
    same(common_words_question(entries, len(common)), document)


@pytest.mark.parametrize("number", range(DOCUMENTS))
def test_frequent_words(documents: dict[str, Any], number: int) -> None:
    document = documents["fwe"][number]
    words = reading.read_coded(document["input"])
    same(frequent_words_question(words), document)
    counts = Counter(words)
    size = LENGTHS["fwe"] // 50
    ranked = ["...", *document["outputs"]]
    ranked += sorted(set(counts) - set(ranked), key=lambda word: -counts[word])
    ranked += [f"unused {rank}" for rank in range(size - len(ranked))]
    totals = [total for total in range(2 * len(words)) if Counter(zeta_text(ranked, total)) == counts]
    assert totals
