"""As many windows as were asked for, whatever documents the text is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from compressor.calibration.text import TextSource, open_documents
from compressor.calibration.tokenizer import load_tokenizer
from compressor.errors import RequestError
from compressor.text_windows import Windowed, Windowing, text_windows
from tests.tiny_models import save_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """One token a character."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return load_tokenizer(save_tiny_tokenizer(folder), trust_remote_code=False)


def cut(
    folder: Path, tokenizer: PreTrainedTokenizerBase, documents: list[str], windowed: Windowed
) -> tuple[list[int], str | None]:
    """Tokens of every window, and the note."""
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    windows, note = text_windows(open_documents(TextSource(str(path), held_out=True)), tokenizer, windowed)
    return [len(window.tokens) for window in windows], note


@pytest.mark.parametrize("windowing", ["disjoint", "sliding"])
def test_documents_of_one_token_take_nothing_from_the_others(
    windowing: Windowing, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    documents = [*("a" * 500), "b" * 1000, "c" * 1000]
    lengths, note = cut(tmp_path, tokenizer, documents, Windowed(windowing, 10, 5, 7))
    assert (lengths, note) == ([10] * 7, None)


@pytest.mark.parametrize(
    ("documents", "windowed", "expected", "note"),
    [
        (["a" * 25], Windowed("disjoint", 10, 5, 9), [10, 10, 5], "3 of 9 windows, as the text has no more"),
        (["a" * 21, "b" * 9], Windowed("disjoint", 10, 5, 3), [10, 10, 9], "26 of 27 tokens in 3 windows"),
        (["a" * 4, "b" * 4, "c" * 4], Windowed("disjoint", 10, 5, 3), [4, 4, 4], "9 of 27 tokens in 3 windows"),
        (["a" * 20], Windowed("sliding", 10, 5, 3), [10, 10, 10], None),
        (["a" * 19], Windowed("sliding", 10, 5, 3), [10, 10, 10], "18 of 19 tokens in 3 windows"),
        (["a" * 20], Windowed("rolling", 10, 5, 2), [11, 11], None),
        (["a" * 19], Windowed("rolling", 10, 5, 3), [11, 11], "2 of 3 windows"),
    ],
)
def test_what_is_less_than_was_asked_for_is_said(
    documents: list[str],
    windowed: Windowed,
    expected: list[int],
    note: str | None,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    lengths, said = cut(tmp_path, tokenizer, documents, windowed)
    assert lengths == expected
    assert said == note if note is None else note in str(said)


@pytest.mark.parametrize("windowing", ["disjoint", "sliding", "rolling"])
@pytest.mark.parametrize("tokens", range(1, 40))
def test_windows_are_counted_before_they_are_cut(
    windowing: Windowing, tokens: int, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    windowed = Windowed(windowing, 7, 3, 10**6)
    lengths = [] if windowed.count(tokens) == 0 else cut(tmp_path, tokenizer, ["a" * tokens], windowed)[0]
    assert len(lengths) == windowed.count(tokens)


def test_tokens_that_hold_many_characters_leave_no_window_out(tmp_path: Path, demo_model: Path) -> None:
    """Lines of hyphens: 63 characters a token, and the file is read in parts."""
    tokenizer = load_tokenizer(demo_model, trust_remote_code=False)
    line = "-" * 4000 + "\n"
    assert len(tokenizer(line)["input_ids"]) < 4000 / 48
    path = tmp_path / "lines.txt"
    path.write_text(line * 120)
    windows, note = text_windows(open_documents(TextSource(str(path))), tokenizer, Windowed("disjoint", 64, 32, 80))
    assert ([len(window.tokens) for window in windows], note) == ([64] * 80, None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a"}, {"text": "b"}], "none of 2 documents of the text .* has two tokens"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "holds conversations only"),
    ],
)
def test_texts_that_predict_nothing(
    rows: list[dict[str, object]], message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RequestError, match=message):
        text_windows(open_documents(TextSource(str(path))), tokenizer, Windowed("disjoint", 10, 5, 2))
