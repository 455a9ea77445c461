"""Sequences of retrieval prompts for calibration: whole, with their answers, and apart from those of any evaluation."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.calibration.tokenizer import load_tokenizer
from compressor.calibration.tokens import token_sha256
from compressor.cli import main
from compressor.demo import calibration_text_path
from compressor.errors import RequestError
from compressor.evaluation.prompt_sets import make_prompt_sets, minimum_lengths
from compressor.evaluation.prompt_tokens import TokenCounter
from compressor.prompts.base import Prompt
from compressor.prompts.registry import UNSEEN, find_task, task_names
from compressor.retrieval_tokens import RetrievalTokens, calibration_forms, retrieval_sequences
from tests.calibration.tiny_tokenizers import trained_tokenizer
from tests.prompts import reading
from tests.prompts.test_splits import drawn_items

VOCAB_SIZE = 8192
LENGTH = 1024
SEED = 3
CALIBRATION_FORMS = tuple(name for name in task_names() if name not in UNSEEN)
BEGINNINGS = (
    r"(A special magic \w+ is|Some special magic \w+ are) hidden within the following text\. ",
    r"Memorize and track the chain\(s\) of variable assignment",
    r"Below is a numbered list of words\. ",
    r"Lookup table\.\n",
)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(demo_model, trust_remote_code=False)


@pytest.fixture(scope="module")
def made(tokenizer: PreTrainedTokenizerBase) -> RetrievalTokens:
    return retrieval_sequences(tokenizer, VOCAB_SIZE, 36, LENGTH, SEED)


@pytest.fixture(scope="module")
def pieces(tokenizer: PreTrainedTokenizerBase, made: RetrievalTokens) -> list[str]:
    """What stands between the separators: prompts with their completions, the last of a sequence cut."""
    return [piece for sequence in made.sequences for piece in split(tokenizer, sequence)]


def split(tokenizer: PreTrainedTokenizerBase, sequence: Tensor) -> list[str]:
    return cast("str", tokenizer.decode(sequence)).split(cast("str", tokenizer.eos_token))


def evaluation_prompts(tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Prompt]:
    tasks = [find_task(name) for name in task_names()]
    sets = make_prompt_sets(tasks, (LENGTH, 640), 3, seed, tokenizer, VOCAB_SIZE)
    return [prompt for prompt_set in sets for prompt in prompt_set.prompts]


def items(piece: str) -> set[str]:
    """Keys, values, variables and words that a piece holds whole, named as `drawn_items` names them."""
    found = {item for _, key, value in reading.NEEDLE.findall(piece) for item in (key, value)}
    pairs = [item for item in found if not re.search(r"\d", item) and item.count("-") == 1]
    found |= {f"{place} {word}" for pair in pairs for place, word in enumerate(pair.split("-"))}
    found |= {item for match in re.findall(r"VAR (\w{5}) = (?:VAR )?(\w{5})\s", piece) for item in match}
    found |= {item for match in re.findall(r"^([A-Z]{2}\d): (\S+)\n", piece, re.MULTILINE) for item in match}
    if piece.startswith("Below"):
        found |= set(re.findall(r"(?<=\d\. )(\S+)(?= \d+\. |\n)", piece))
    return found


def passages(context: str) -> set[str]:
    """Twelve words in a row of a text haystack; shorter ones may be phrases."""
    words = re.sub(reading.NEEDLE, " ", context).split()
    return {" ".join(words[start : start + 12]) for start in range(len(words) - 11)}


def hay(piece: str) -> str:
    """The text haystack of a needle prompt, whole or cut."""
    after = piece.partition("afterwards.\n")[2].partition("\nWhat ")[0]
    return "" if reading.NOISE in after else after


@pytest.mark.parametrize("seed", [SEED, 0, 1])
def test_nothing_of_an_evaluation_occurs(seed: int, tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> None:
    prompts = evaluation_prompts(tokenizer, seed)
    asked = set().union(*(drawn_items(prompt) for prompt in prompts if prompt.task != "completion"))
    seen = set().union(*map(items, pieces))
    assert min(len(asked), len(seen)) > 1000
    assert not asked & seen
    texts = [prompt.input if prompt.task == "completion" else hay(prompt.input) for prompt in prompts]
    evaluation_hay, calibration_hay = (set().union(*map(passages, some)) for some in (texts, map(hay, pieces)))
    assert min(len(evaluation_hay), len(calibration_hay)) > 2000
    assert not evaluation_hay & calibration_hay


def test_the_readers_see_every_item_of_a_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    """So that what they do not find is not there."""
    for prompt in evaluation_prompts(tokenizer, SEED):
        if prompt.task in CALIBRATION_FORMS:
            assert drawn_items(prompt) <= items(prompt.text + prompt.completion + "\n")
        if prompt.task in ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue"):
            assert len(passages(hay(prompt.input))) > 100


def test_every_form_but_the_unseen_ones(made: RetrievalTokens, pieces: list[str]) -> None:
    assert made.tasks == CALIBRATION_FORMS
    begun = [next((form for form in BEGINNINGS if re.match(form, piece)), piece) for piece in pieces if len(piece) > 80]
    assert set(begun) == set(BEGINNINGS)
    queries = [re.search(r"\nWhat (?:is|are).* for (.*) mentioned", piece) for piece in pieces]
    assert sum(query is not None for query in queries) > 20
    assert all(", " not in query.group(1) for query in queries if query is not None)


def given_and_right_answers(piece: str) -> tuple[list[str], list[str]]:
    """What stands behind the question of a whole prompt, and what a reader of the prompt makes of it."""
    if piece.startswith("Memorize"):
        (read,) = reading.read_tracking(piece)
        return piece.partition("they are:  ")[2].split(" "), reading.variables_with_value(read)
    if piece.startswith("Below"):
        entries = reading.read_list(piece)
        common = {word for word in entries if entries.count(word) > 1}
        return re.findall(r"\d+\. (\S+)", piece.partition("Answer:")[2]), sorted(common, key=entries.index)
    if piece.startswith("Lookup"):
        table, lookups = (re.findall(r"^(\w+): (\S+)$", part, re.MULTILINE) for part in piece.split("Queries.\n"))
        key, value = lookups[-1]
        return [value], [dict(table)[key]]
    question, answer = re.split(r"(?<=provided text\?)", piece)
    needles = reading.read_needles(question)
    (query,) = needles.queries
    given = re.split(r" in the provided text (?:is|are) ", answer)[1].split(", ")
    return sorted(given), sorted(value for _, key, value in needles.needles if key == query)


def test_sequences_are_whole_prompts_with_their_answers_and_the_beginning_of_one(
    tokenizer: PreTrainedTokenizerBase, made: RetrievalTokens
) -> None:
    prompts, quarters = 0, set()
    for sequence in made.sequences:
        assert sequence.dtype == torch.int64
        assert sequence.shape == (LENGTH,)
        first, *others = split(tokenizer, sequence)
        assert others, "the first is whole"
        quarters.add(len(tokenizer(first)["input_ids"]) * 4 // LENGTH)
        for piece in [first, *others[:-1]]:
            given, right = given_and_right_answers(piece)
            assert given == right != []
            prompts += 1
    assert prompts == made.prompts
    assert len(quarters) > 2


def test_the_same_arguments_give_the_same_tokens(tokenizer: PreTrainedTokenizerBase, made: RetrievalTokens) -> None:
    fewer = retrieval_sequences(tokenizer, VOCAB_SIZE, 5, LENGTH, SEED)
    assert token_sha256(fewer.sequences) == token_sha256(made.sequences[:5])
    other = retrieval_sequences(tokenizer, VOCAB_SIZE, 12, LENGTH, SEED + 1)
    values = [
        {item for sequence in some for piece in split(tokenizer, sequence) for item in re.findall(r"\d{7}", piece)}
        for some in (made.sequences[:12], other.sequences)
    ]
    assert min(map(len, values)) > 10
    assert not values[0] & values[1]


def test_separators(tokenizer: PreTrainedTokenizerBase, demo_model: Path) -> None:
    plain = load_tokenizer(demo_model, trust_remote_code=False)
    plain.eos_token = None
    (sequence,) = retrieval_sequences(plain, VOCAB_SIZE, 1, LENGTH, SEED).sequences
    (separated,) = retrieval_sequences(tokenizer, VOCAB_SIZE, 1, LENGTH, SEED).sequences
    kept = separated[separated != tokenizer.eos_token_id]
    assert torch.equal(sequence[: len(kept)], kept)
    corpus = calibration_text_path().read_text(encoding="utf-8")[:20_000]
    for end in ("</s>", "<s>"):
        begun = trained_tokenizer("byte", corpus)
        begun.eos_token = end
        begin, stop = begun.bos_token_id, begun.eos_token_id
        ids = [ids for sequence in retrieval_sequences(begun, 400, 3, 2048, 0).sequences for ids in sequence.tolist()]
        starts = [at for at, token in enumerate(ids) if token == begin]
        assert set(range(0, len(ids), 2048)) < set(starts)
        if stop == begin:
            assert all(after - before > 1 for before, after in itertools.pairwise(starts))
        else:
            assert all(at % 2048 == 0 or ids[at - 1] == stop for at in starts)
            assert ids.count(stop) in (len(starts) - 3, len(starts))


def test_short_lengths_are_raised_to_what_a_form_needs(tokenizer: PreTrainedTokenizerBase) -> None:
    minimums = dict(minimum_lengths([find_task(name) for name in CALIBRATION_FORMS], tokenizer))
    for length in (300, 512, 2048):
        forms = calibration_forms(tokenizer, length)
        assert {form.task for form in forms} == {task for task, minimum in minimums.items() if minimum <= length}
        for form in forms:
            for drawn, wanted in zip(form.lengths, (length // 4, length // 2, length), strict=True):
                choices = [some for some in (length // 4, length // 2, length) if some >= minimums[form.task]]
                assert drawn == min(some for some in choices if some >= wanted)


def test_a_sequence_that_no_form_fits_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ratio", "0.5", "--device", "cpu", "--output-dir", str(tmp_path / "out"), "--no-evaluate", "--dry-run"]
    words += ["--sequence-length", "100", "--retrieval-share"]
    assert main([*words, "0.5"]) == 2
    error = capsys.readouterr().err
    stated = re.search(
        r"--sequence-length 100 is too short for retrieval prompts: the shortest form needs (\d+) tokens of this "
        r"tokenizer; raise --sequence-length to (\d+) or more, or give --retrieval-share 0\.",
        error,
    )
    assert stated is not None
    least = int(stated.group(1))
    assert least == int(stated.group(2))
    assert main([*words, "0"]) == 0
    count_tokens = TokenCounter(tokenizer)
    assert least == min(find_task(name).minimum_length(count_tokens) for name in CALIBRATION_FORMS)
    assert len(retrieval_sequences(tokenizer, VOCAB_SIZE, 2, least, 0).tasks) == 1
    with pytest.raises(RequestError, match=f"--sequence-length {least - 1} is too short"):
        retrieval_sequences(tokenizer, VOCAB_SIZE, 2, least - 1, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RequestError, match="the model has embeddings for 500 tokens"):
        retrieval_sequences(tokenizer, 500, 1, LENGTH, 0)
