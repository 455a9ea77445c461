"""Texts as tokens, and the windows a model reads them in.

Figures depend on how a text is cut. Three ways are offered, each named for what others call it:

- `disjoint_windows`: windows of `length` tokens one after the other; the first token of each is read and
  not predicted.
- `sliding_windows`: windows that overlap, so that every token but the first of a text is predicted once,
  from at least `length - stride` tokens. https://huggingface.co/docs/transformers/perplexity
- `rolling_windows`: lm-eval's `loglikelihood_rolling`: a prefix token in front, so that every token is
  predicted once, from at least one token. https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.errors import RequestError
from compressor.evaluation.stride import require_stride
from compressor.tokenization import encode_texts

_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """The tokens of one text, and how much of the text ends with each.

    `tokens`, `words` and `bytes` are int64 [T]. Bytes are of UTF-8. Words are counted as lm-eval counts them,
    `len(re.split(r"\\s+", text))`: every run of white space ends a word, where it begins, and so does the end of
    the text. `words` and `bytes` are None where only tokens are known.
    """

    tokens: Tensor
    words: Tensor | None = None
    bytes: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """What the model reads at once: `tokens` int64 [T], of which the last `predicted` (below T) count.

    `words` and `bytes` are those of the predicted tokens. Windows of one `cluster` are not independent of
    each other: standard errors are taken over clusters.
    """

    tokens: Tensor
    predicted: int
    cluster: int
    words: int | None = None
    bytes: int | None = None


def encode_document(tokenizer: PreTrainedTokenizerBase, text: str, limit: int | None = None) -> Document:
    """Tokens of `text` without special tokens: the first `limit`, all of them with None.

    Counts of words and bytes need a tokenizer that tells the position of its tokens in the text; without,
    they are None. A text cut at `limit` is counted as far as its last token.

    Raises:
        RequestError: the tokenizer gives no token.
    """
    part = text
    ids: list[int] = []
    ends: np.ndarray | None = None
    for part in _beginnings(text, limit):
        ids, ends = _encode(tokenizer, part)
        # What follows a cut can change the last tokens before it, so more than `limit` are wanted.
        if limit is not None and len(ids) >= limit + 16:
            break
    if not ids:
        raise RequestError(
            f"the tokenizer gives no token for a text of {len(text):,} characters; use another text, or check the "
            "tokenizer's files."
        )
    tokens = torch.tensor(ids[:limit], dtype=torch.long)
    if ends is None:
        return Document(tokens)
    ends = np.maximum.accumulate(ends)
    if len(part) == len(text) and len(tokens) == len(ids):
        ends[-1] = len(text)  # what the tokenizer dropped at the end belongs to the text
    words, bytes_ = _counts(text, ends[: len(tokens)])
    return Document(tokens, words, bytes_)


def join_documents(documents: Sequence[Document], separator: int | None) -> Document:
    """One stream of tokens, `separator` (a token without text, predicted like the others) between each two."""
    parts: list[Document] = []
    for document in documents:
        if parts and separator is not None:
            nothing = torch.zeros(1, dtype=torch.long)
            parts.append(Document(nothing + separator, nothing, nothing))
        parts.append(document)
    words = [part.words for part in parts if part.words is not None]
    bytes_ = [part.bytes for part in parts if part.bytes is not None]
    return Document(
        torch.cat([part.tokens for part in parts]),
        torch.cat(words) if len(words) == len(parts) else None,
        torch.cat(bytes_) if len(bytes_) == len(parts) else None,
    )


def disjoint_windows(documents: Sequence[Document], length: int, limit: int | None = None) -> list[Window]:
    """Windows of `length` tokens without overlap; the first token of each is not predicted.

    A shorter window ends a document; a single token that is left over is dropped. `limit` is the number
    of windows over all documents, the first ones. Clusters are documents; windows where there is one document.

    Raises:
        RequestError: `length` below 2, or no document with two tokens.
    """

    def spans(total: int) -> Iterator[_Span]:
        for start in range(0, total - 1, length):
            yield _Span(start, start + 1, min(start + length, total))

    _require_length(length, 2)
    return _windows(documents, spans, limit)


def sliding_windows(documents: Sequence[Document], length: int, stride: int, limit: int | None = None) -> list[Window]:
    """Windows of at most `length` tokens, the first predicting all but its first token, the others the next `stride`.

    Every token of a document but its first is predicted once, from as many tokens before it as fit. `limit` and
    clusters as in `disjoint_windows`.

    Raises:
        RequestError: `length` below 2, `stride` outside [1, length - 1], or no document with two tokens.
    """
    _require_length(length, 2)
    require_stride(stride, length)
    return _windows(documents, lambda total: _overlapping(total, length, stride), limit)


def rolling_windows(documents: Sequence[Document], length: int, prefix: int, limit: int | None = None) -> list[Window]:
    """lm-eval's `loglikelihood_rolling` for a model that reads at most `length` tokens at once.

    `prefix` is the token that stands before a document: lm-eval takes the tokenizer's beginning-of-sequence
    token, and where it has none its end-of-sequence token. A window has up to `length + 1` tokens, of which the
    last is predicted and not read. `limit` and clusters as in `disjoint_windows`.

    Raises:
        RequestError: `length` below 1, or no document with a token.
    """
    _require_length(length, 1)
    nothing = torch.zeros(1, dtype=torch.long)
    start = Document(nothing + prefix, nothing, nothing)
    prefixed = [join_documents([start, document], None) for document in documents]
    return _windows(prefixed, lambda total: _overlapping(total, length + 1, length), limit)


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens [start, end) are read, tokens [predicted, end) count."""

    start: int
    predicted: int
    end: int


def _overlapping(total: int, length: int, stride: int) -> Iterator[_Span]:
    """Spans of at most `length` tokens whose predictions follow each other, `stride` a span after the first."""
    end = min(length, total)
    yield _Span(0, 1, end)
    while end < total:
        first, end = end, min(end + stride, total)
        yield _Span(end - length, first, end)


def _windows(documents: Sequence[Document], spans: Callable[[int], Iterator[_Span]], limit: int | None) -> list[Window]:
    windows: list[Window] = []
    for number, document in enumerate(documents):
        for span in spans(len(document.tokens)) if len(document.tokens) > 1 else ():
            if len(windows) == limit:
                return windows
            cluster = number if len(documents) > 1 else len(windows)
            windows.append(_window(document, span, cluster))
    if not windows:
        longest = max((len(document.tokens) for document in documents), default=0)
        raise RequestError(
            f"none of {len(documents)} texts has two tokens, the longest has {longest}; use a longer text."
        )
    return windows


def _window(document: Document, span: _Span, cluster: int) -> Window:
    counted = slice(span.predicted, span.end)
    return Window(
        tokens=document.tokens[span.start : span.end],
        predicted=span.end - span.predicted,
        cluster=cluster,
        words=None if document.words is None else int(document.words[counted].sum()),
        bytes=None if document.bytes is None else int(document.bytes[counted].sum()),
    )


def _require_length(length: int, minimum: int) -> None:
    if length < minimum:
        raise RequestError(f"windows of {length} tokens predict nothing; use at least {minimum}.")


def _beginnings(text: str, limit: int | None) -> Iterator[str]:
    """Longer and longer beginnings of `text`, so that the cost follows `limit` and not the text."""
    size = len(text) if limit is None else 8 * limit + 256
    while size < len(text):
        yield text[:size]
        size *= 2
    yield text


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], np.ndarray | None]:
    """Token ids, and int64 [T] the position in `text` where each token ends."""
    (encoded,) = encode_texts(tokenizer, [text], offsets=True)
    if encoded.offsets is None:
        return encoded.ids, None
    return encoded.ids, np.array([end for _, end in encoded.offsets], dtype=np.int64)


def _counts(text: str, ends: np.ndarray) -> tuple[Tensor, Tensor]:
    """Words and bytes, int64 [T], of the parts of `text` that end at `ends` int64 [T], ascending."""
    text = text[: ends[-1]]
    code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    sizes = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    bytes_before = np.concatenate([[0], sizes.cumsum()])
    runs = np.array([match.start() for match in _SPACE.finditer(text)], dtype=np.int64)
    words = np.diff(np.searchsorted(runs, ends), prepend=0)
    words[-1] += 1
    return torch.from_numpy(words.astype(np.int64)), torch.from_numpy(np.diff(bytes_before[ends], prepend=0))
