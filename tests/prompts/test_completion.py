"""Completion prompts: the bundled set, their length, and local files of the form that lm-eval's tasks read."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from lm_eval.tasks.squad_completion.task import SQUADCompletion, contains_score

from benchmarks import completion_prompts
from compressor.calibration.tokenizer import load_tokenizer
from compressor.demo import calibration_text_path
from compressor.errors import RequestError
from compressor.prompts.base import CountTokens, Prompt
from compressor.prompts.completion import (
    CompletionFileTask,
    CompletionTask,
    Passage,
    bundled_passages,
    load_completion_file,
)


@pytest.fixture(scope="module")
def count_tokens(demo_model: Path) -> CountTokens:
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    return lambda text: len(tokenizer(text)["input_ids"])


def prompts(count: int, length: int, count_tokens: CountTokens, seed: int = 0) -> tuple[Prompt, ...]:
    return CompletionTask().sample(count, length, count_tokens, random.Random(seed), "evaluation")


def test_every_answer_stands_in_its_document_and_not_in_the_question() -> None:
    passages = bundled_passages()
    assert len(passages) >= 256
    assert len({(passage.context, passage.question) for passage in passages}) == len(passages)
    for passage in passages:
        assert passage.value in passage.context
        assert passage.value.lower() not in passage.question.lower()
        assert len(passage.question.strip()) >= 12
        if passage.kind == "lookup":
            assert passage.context.lower().count(passage.value.lower()) == 1
            assert passage.context.count(f"{passage.question} {passage.value}") == 1


def test_three_domains_and_two_kinds() -> None:
    counts = Counter((passage.domain, passage.kind) for passage in bundled_passages())
    assert counts.keys() == {(domain, kind) for domain in ("prose", "docs", "code") for kind in ("cloze", "lookup")}
    assert min(counts.values()) >= 24


def test_no_passage_is_in_the_calibration_text() -> None:
    calibration = calibration_text_path().read_text(encoding="utf-8")
    assert [passage for passage in bundled_passages() if passage.context[:60] in calibration] == []


def test_the_bundled_set_is_what_its_script_makes_of_the_text(
    shared_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "completion.jsonl"
    monkeypatch.setattr("sys.argv", ["completion_prompts", "--text", str(shared_text), "--output", str(output)])
    completion_prompts.main()
    assert [Passage(**json.loads(line)) for line in output.read_text("utf-8").splitlines()] == list(bundled_passages())


@pytest.mark.parametrize("length", [512, 2048])
def test_prompts_fill_their_length_and_the_answer_is_in_the_document_alone(
    length: int, count_tokens: CountTokens
) -> None:
    by_question = {(passage.question, passage.value): passage for passage in bundled_passages()}
    for prompt in prompts(24, length, count_tokens):
        assert 0.95 * length <= count_tokens(prompt.text) + 48 <= length
        (answer,) = prompt.answers
        passage = by_question[prompt.answer_prefix, answer]
        filler, found, rest = prompt.input.rpartition(passage.context)
        assert found
        assert rest == ("\n\n" if passage.kind == "lookup" else "")
        assert answer.lower() not in filler.lower()
        assert prompt.completion == f" {answer}"


def test_prompts_are_those_of_their_seed_and_no_passage_comes_twice(count_tokens: CountTokens) -> None:
    first = prompts(64, 512, count_tokens)
    assert first == prompts(64, 512, count_tokens)
    assert first != prompts(64, 512, count_tokens, seed=1)
    assert len({(prompt.answer_prefix, prompt.answers) for prompt in first}) == 64
    assert len(prompts(300, 512, count_tokens)) == 300  # more than there are


def test_calibration_is_refused(count_tokens: CountTokens) -> None:
    message = "task completion for calibration: its texts are held out and only ever measured on; choose another task."
    for make in (CompletionTask().generate, lambda *rest: CompletionTask().sample(1, *rest)):
        with pytest.raises(RequestError, match=message):
            make(512, count_tokens, random.Random(0), "calibration")


def test_a_length_that_no_passage_fits(count_tokens: CountTokens) -> None:
    with pytest.raises(
        RequestError, match=r"length 60: a prompt of completion with its output needs at least \d+ tokens"
    ):
        prompts(1, 60, count_tokens)


ROWS = [
    {"doc_id": "a", "text": " Born in Ulm. The town of birth is \n", "value": " Ulm ", "title": "x"},
    {"text": "Key:\u2028value. Key:", "value": "Value"},
]


@pytest.mark.parametrize("lines", [True, False])
def test_local_files_are_read_as_lm_eval_reads_its_own(tmp_path: Path, lines: bool) -> None:
    path = tmp_path / "rows.json"
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) if lines else json.dumps(ROWS)
    path.write_text(text, encoding="utf-8")
    stock = SQUADCompletion.__new__(SQUADCompletion)
    loaded = load_completion_file(path)
    assert [prompt.text for prompt in loaded] == [stock.doc_to_text(row) for row in ROWS]
    assert [prompt.answers for prompt in loaded] == [(stock.doc_to_target(row),) for row in ROWS]
    for prompt in loaded:
        assert contains_score(prompt.completion, list(prompt.answers)) == 1


def test_prompts_of_a_file_that_fit_the_length(tmp_path: Path, count_tokens: CountTokens) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "word " * size + f"number {size} is", "value": str(size)} for size in (10, 20, 30, 400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = CompletionFileTask(load_completion_file(path))
    assert task.minimum_length(count_tokens) == 48 + count_tokens(rows[0]["text"])
    drawn = task.sample(4, 200, count_tokens, random.Random(0), "evaluation")
    assert [prompt.answers for prompt in drawn] == [("10",), ("20",), ("30",)]
    assert task.sample(2, 200, count_tokens, random.Random(0), "evaluation") == drawn[:2]
    assert task.generate(2048, count_tokens, random.Random(1), "evaluation") in task.prompts
    with pytest.raises(RequestError, match="length 50: a prompt of completion with its output needs at least"):
        task.generate(50, count_tokens, random.Random(0), "evaluation")
    with pytest.raises(RequestError, match="task completion for calibration"):
        task.generate(512, count_tokens, random.Random(0), "calibration")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{path} holds 0 prompts and at least 1 is needed; give rows with the fields text and value."),
        (b'{"text": "a", "value": "b"}\n{"text": "a"}\n', '{path}, row 2, has no text in the field "value"; '),
        (b'{"text": "  ", "value": "b"}', '{path}, row 1, has no text in the field "text"; '),
        (b'["a"]', '{path}, row 1, has no text in the field "text"; '),
        (b'{"text": "a", "value": "b"}\n{"text', "{path}, line 2, is not JSON ("),
        (b"\xff\xfe", "{path} cannot be read ("),
        (b"[" * 100_000, "{path}, line 1, is not JSON ("),
    ],
)
def test_broken_files_are_refused_in_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        load_completion_file(path)
    assert str(caught.value).startswith(message.format(path=path))
    assert str(caught.value).endswith(".")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        load_completion_file(tmp_path / "none.jsonl")
