"""Windows against lm-eval's own functions and plain loops; words and bytes against the text itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from compressor.errors import RequestError
from compressor.evaluation.windows import (
    Document,
    Window,
    disjoint_windows,
    encode_document,
    join_documents,
    rolling_windows,
    sliding_windows,
)

TEXTS = (
    "One of the special magic numbers for long-hope is: 8090293.",
    "  Leading space, a tab\tand\n\n\na few  lines \n",
    "naïve café, 東京の天気は\u3000晴れ 🙂🙂 and \u00a0 spaces of another kind",
    "word",
    "\n",
)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_model)
    return loaded


def numbered(total: int) -> Document:
    """Token i is i + 100, ends i words and i * i bytes."""
    order = torch.arange(total)
    return Document(order + 100, order, order * order)


def lm_eval_words(text: str) -> int:
    return len(re.split(r"\s+", text))


def predicted_tokens(windows: list[Window]) -> list[int]:
    return [token for window in windows for token in window.tokens[-window.predicted :].tolist()]


@pytest.mark.parametrize("total", [1, 2, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 50])
def test_rolling_windows_are_those_of_lm_eval(total: int, length: int) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    expected = utils.get_rolling_token_windows(
        list(range(100, 100 + total)), prefix_token=5, max_seq_len=length, context_len=1
    )
    found = rolling_windows([numbered(total)], length, prefix=5)
    for window, (context, continuation) in zip(found, map(utils.make_disjoint_window, expected), strict=True):
        assert window.tokens.tolist() == context + continuation
        assert window.predicted == len(continuation)


def test_rolling_windows_by_hand() -> None:
    windows = rolling_windows([numbered(7)], 3, prefix=5)
    assert [(window.tokens.tolist(), window.predicted) for window in windows] == [
        ([5, 100, 101, 102], 3),
        ([102, 103, 104, 105], 3),
        ([103, 104, 105, 106], 1),
    ]
    assert [window.words for window in windows] == [0 + 1 + 2, 3 + 4 + 5, 6]
    assert [window.bytes for window in windows] == [0 + 1 + 4, 9 + 16 + 25, 36]


@pytest.mark.parametrize("total", [2, 9, 10, 11, 12, 13, 31])
@pytest.mark.parametrize(("length", "stride"), [(10, 3), (10, 1), (10, 9), (2, 1)])
def test_sliding_windows_predict_every_token_once_from_enough_context(total: int, length: int, stride: int) -> None:
    document = numbered(total)
    windows = sliding_windows([document], length, stride)
    assert predicted_tokens(windows) == document.tokens[1:].tolist()
    for number, window in enumerate(windows):
        tokens = window.tokens.tolist()
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        assert len(tokens) <= length
        assert number == 0 or len(tokens) == length
        assert number == 0 or window.predicted <= stride
        assert number == 0 or len(tokens) - window.predicted >= length - stride
    assert [window.predicted for window in windows[1:-1]] == [stride] * len(windows[1:-1])


@pytest.mark.parametrize(("total", "lengths"), [(2, [2]), (5, [5]), (6, [5]), (7, [5, 2]), (15, [5, 5, 5]), (3, [3])])
def test_disjoint_windows(total: int, lengths: list[int]) -> None:
    windows = disjoint_windows([numbered(total)], 5)
    assert [len(window.tokens) for window in windows] == lengths
    assert [window.predicted for window in windows] == [length - 1 for length in lengths]
    assert torch.cat([window.tokens for window in windows]).tolist() == list(range(100, 100 + sum(lengths)))
    assert windows[0].bytes == sum(order * order for order in range(1, lengths[0]))


def test_clusters_are_documents_or_the_windows_of_one() -> None:
    several = disjoint_windows([numbered(12), numbered(1), numbered(6)], 5)
    assert [window.cluster for window in several] == [0, 0, 0, 2]
    assert [window.cluster for window in disjoint_windows([numbered(12)], 5)] == [0, 1, 2]
    assert [window.cluster for window in sliding_windows([numbered(12)], 5, 4)] == [0, 1, 2]


def test_limit_takes_the_first_windows() -> None:
    documents = [numbered(12), numbered(30)]
    whole, part = disjoint_windows(documents, 5), disjoint_windows(documents, 5, limit=4)
    assert len(whole) == 3 + 6
    assert [window.tokens.tolist() for window in part] == [window.tokens.tolist() for window in whole[:4]]


@pytest.mark.parametrize("text", TEXTS)
def test_words_and_bytes_are_those_of_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    document = encode_document(tokenizer, text)
    assert document.words is not None
    assert document.bytes is not None
    assert document.tokens.tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert int(document.words.sum()) == lm_eval_words(text)
    assert int(document.bytes.sum()) == len(text.encode("utf-8"))
    windows = rolling_windows([document], 3, prefix=0)
    assert sum(window.words or 0 for window in windows) == lm_eval_words(text)
    assert sum(window.bytes or 0 for window in windows) == len(text.encode("utf-8"))


def test_counts_stop_where_the_predicted_text_stops(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "The needle lies in the middle of a long haystack, and nobody looks for it there."
    document = encode_document(tokenizer, text)
    assert document.words is not None
    assert document.bytes is not None
    for count in range(1, len(document.tokens)):
        beginning = tokenizer.decode(document.tokens[:count])
        assert isinstance(beginning, str)
        assert text.startswith(beginning)
        assert int(document.bytes[:count].sum()) == len(beginning)
        assert int(document.words[:count].sum()) == lm_eval_words(beginning) - 1
        cut = encode_document(tokenizer, text, limit=count)
        assert cut.words is not None
        assert int(cut.words.sum()) == lm_eval_words(beginning)


@pytest.mark.parametrize("limit", [1, 10, 500, 4000])
def test_a_limit_gives_the_first_tokens_of_the_whole(tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
    text = "".join(TEXTS) * 60 + " " * 9000 + "end"
    whole, part = encode_document(tokenizer, text), encode_document(tokenizer, text, limit)
    assert part.tokens.tolist() == whole.tokens[:limit].tolist()
    assert part.bytes is not None
    assert whole.bytes is not None
    assert part.bytes.tolist() == whole.bytes[:limit].tolist()


def test_a_limit_spares_the_rest_of_a_long_text(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    stock: Any = type(tokenizer)._encode_plus

    def counting(self: PreTrainedTokenizerBase, text: str, *rest: Any, **settings: Any) -> Any:
        read.append(len(text))
        return stock(self, text, *rest, **settings)

    monkeypatch.setattr(type(tokenizer), "_encode_plus", counting)
    encode_document(tokenizer, "a few words and " * 100_000, limit=64)
    assert read
    assert sum(read) < 20_000


def test_joined_documents_are_one_stream(tokenizer: PreTrainedTokenizerBase) -> None:
    documents = [encode_document(tokenizer, text) for text in TEXTS[:3]]
    stream = join_documents(documents, separator=0)
    assert stream.words is not None
    assert stream.bytes is not None
    expected = [*documents[0].tokens, 0, *documents[1].tokens, 0, *documents[2].tokens]
    assert stream.tokens.tolist() == [int(token) for token in expected]
    assert int(stream.words.sum()) == sum(map(lm_eval_words, TEXTS[:3]))
    assert int(stream.bytes.sum()) == sum(len(text.encode()) for text in TEXTS[:3])
    assert len(join_documents(documents, None).tokens) == len(stream.tokens) - 2
    assert join_documents([documents[0], Document(torch.tensor([1, 2]))], 0).words is None


def test_a_text_without_tokens_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RequestError, match="^the tokenizer gives no token for a text of 0 characters"):
        encode_document(tokenizer, "")


def test_windows_that_predict_nothing_are_refused() -> None:
    with pytest.raises(RequestError, match="^windows of 1 tokens predict nothing; use at least 2"):
        disjoint_windows([numbered(9)], 1)
    with pytest.raises(RequestError, match="^windows of 0 tokens predict nothing; use at least 1"):
        rolling_windows([numbered(9)], 0, prefix=5)
    with pytest.raises(RequestError, match="^none of 2 texts has two tokens, the longest has 1"):
        disjoint_windows([numbered(1), numbered(0)], 8)


@pytest.mark.parametrize("stride", [0, 10])
def test_a_stride_outside_the_window_is_refused(stride: int) -> None:
    with pytest.raises(
        RequestError, match=f"^a stride of {stride} does not fit windows of 10 tokens; use one from 1 to 9"
    ):
        sliding_windows([numbered(30)], 10, stride)
