"""A held-out text as the windows that a model reads: as many as were asked for, where the text has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from compressor.calibration.documents import TextDocument
from compressor.calibration.text import DocumentStream
from compressor.errors import RequestError
from compressor.evaluation.windows import (
    Document,
    Window,
    disjoint_windows,
    encode_document,
    rolling_windows,
    sliding_windows,
)

Windowing = Literal["disjoint", "sliding", "rolling"]
MOST_UNUSABLE_DOCUMENTS = 100_000
"""Conversations and texts too short to predict anything that are passed over, before a text counts as read."""
_CHARACTERS_PER_TOKEN = 32
"""First guess of how much of a text a number of tokens needs; few tokens of any vocabulary hold more."""


@dataclass(frozen=True, slots=True)
class Windowed:
    """How texts are cut: at most `windows` windows of `length` tokens, `stride` new ones in each where they slide."""

    windowing: Windowing
    length: int
    stride: int
    windows: int

    @property
    def step(self) -> int:
        return self.stride if self.windowing == "sliding" else self.length

    @property
    def predicted(self) -> int:
        """Tokens that this many full windows of one text predict."""
        if self.windowing == "rolling":
            return self.windows * self.length
        if self.windowing == "sliding":
            return self.length - 1 + (self.windows - 1) * self.stride
        return self.windows * (self.length - 1)

    def count(self, tokens: int) -> int:
        """Windows that a document of so many tokens gives; 0 where it predicts nothing."""
        if self.windowing == "rolling":
            return -(-tokens // self.length)
        if tokens < 2:
            return 0
        if self.windowing == "sliding":
            return 1 + max(0, -(-(tokens - self.length) // self.stride))
        return -(-(tokens - 1) // self.length)


def text_windows(
    stream: DocumentStream, tokenizer: PreTrainedTokenizerBase, cut: Windowed
) -> tuple[list[Window], str | None]:
    """The first windows of a text's documents, and what to say where they are fewer or shorter than asked for.

    Raises:
        RequestError: no document has a token to predict, or the tokenizer has no token that rolling windows begin with.
    """
    documents = list(_usable(stream, tokenizer, cut))
    if cut.windowing == "sliding":
        windows = sliding_windows(documents, cut.length, cut.stride, cut.windows)
    elif cut.windowing == "rolling":
        windows = rolling_windows(documents, cut.length, _prefix_token(tokenizer), cut.windows)
    else:
        windows = disjoint_windows(documents, cut.length, cut.windows)
    predicted = sum(window.predicted for window in windows)
    if predicted >= cut.predicted:
        return windows, None
    if len(windows) < cut.windows:
        return windows, f"{len(windows):,} of {cut.windows:,} windows, as the text has no more"
    share = f"{predicted:,} of {cut.predicted:,} tokens"
    return windows, f"{share} in {cut.windows:,} windows, as its documents end between them"


def _usable(stream: DocumentStream, tokenizer: PreTrainedTokenizerBase, cut: Windowed) -> list[Document]:
    """Documents that give a window, until there are as many windows as asked for; the last one is cut behind them."""
    documents: list[Document] = []
    missing, texts, unusable = cut.windows, 0, 0
    for document in stream:
        if missing <= 0 or unusable == MOST_UNUSABLE_DOCUMENTS:
            break
        encoded = None
        if isinstance(document, TextDocument):
            texts += 1
            encoded = _encode(document, tokenizer, cut.length + missing * cut.step)
        count = 0 if encoded is None else cut.count(len(encoded.tokens))
        if encoded is not None and count:
            documents.append(encoded)
        missing -= count
        unusable += not count
    if documents:
        return documents
    if texts:
        raise RequestError(
            f"none of {texts:,} documents of the text {stream.source.name} has two tokens; use a longer text, or check "
            "the tokenizer's files."
        )
    raise RequestError(f"the text {stream.source.name} holds conversations only; perplexity needs plain text.")


def _encode(document: TextDocument, tokenizer: PreTrainedTokenizerBase, limit: int) -> Document | None:
    """Its first `limit` tokens; None where it has none. No more of it is read than that takes."""
    chunks, text, size = iter(document.chunks), "", _CHARACTERS_PER_TOKEN * limit
    while True:
        parts = [text]
        read = len(text)
        while read < size and (chunk := next(chunks, None)) is not None:
            parts.append(chunk)
            read += len(chunk)
        text, ended = "".join(parts), read < size
        try:
            encoded = encode_document(tokenizer, text, limit)
        except RequestError:  # no token at all, which more of the text may have
            encoded = None
        if ended or (encoded is not None and len(encoded.tokens) >= limit):
            return encoded
        size *= 2


def _prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise RequestError(
        "rolling windows begin with a BOS or EOS token and the tokenizer has neither; use disjoint windows."
    )
