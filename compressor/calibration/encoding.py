"""From one document to token ids, in pieces and only as far as they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from compressor.calibration.documents import ChatDocument, Document, clean_text
from compressor.errors import RequestError
from compressor.tokenization import encode_texts, require_embedding, special_prefix, with_prefix

PIECE_CHARACTERS = 1 << 16


class DocumentEncoder:
    """Encodes documents with the model's own tokenizer, for a model with `vocab_size` embeddings.

    A text gets the tokens that the tokenizer puts before a sequence (`<s>`) once, also where it
    begins with them already. A conversation is rendered by the chat template, which writes those
    tokens itself. Nothing is put at the end; `separator` is the token that goes between two texts,
    None where the tokenizer has none.

    Raises:
        RequestError: the separator has no embedding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        end = tokenizer.eos_token_id
        self.separator = end if isinstance(end, int) else None
        self._require_embedding(-1 if self.separator is None else self.separator)
        word = self._encode("a")
        self._prefix = special_prefix(tokenizer)
        # Some tokenizers put a space before every text, a second one where it begins with one.
        two_words = self._encode("a b")
        self._adds_space = two_words == word + self._encode("b") != word + self._encode(" b")
        self._conversations = 0
        self._refused = 0
        self._first_refusal = ""

    def encode(self, document: Document, limit: int) -> list[int]:
        """The first `limit` token ids of `document`; none where it has no tokens.

        Text is cut into pieces of at most 65,536 characters between two words and encoded until
        there are enough tokens, so neither time nor memory grows with what is not needed.

        Raises:
            RequestError: a token that has no embedding, or a conversation where the tokenizer has no
                chat template.
        """
        chunks: Iterable[str]
        if isinstance(document, ChatDocument):
            chunks, prefix = self._rendered(document), []
        else:
            chunks, prefix = document.chunks, self._prefix
        ids: list[int] = []
        for number, piece in enumerate(pieces(chunks, PIECE_CHARACTERS)):
            if number and self._adds_space:
                piece = piece.removeprefix(" ")
            ids += self._encode(piece)
            if len(ids) >= limit:
                break
        ids = with_prefix(ids, prefix)[:limit] if ids else ids
        self._require_embedding(max(ids, default=-1))
        return ids

    def problems(self) -> tuple[str, ...]:
        """What to tell the user about the conversations seen so far."""
        if not self._refused:
            return ()
        return (
            f"the chat template refused {self._refused:,} of {self._conversations:,} conversations "
            f"(first: {self._first_refusal})",
        )

    def _require_embedding(self, token: int) -> None:
        require_embedding(self._tokenizer, token, self._vocab_size)

    def _rendered(self, document: ChatDocument) -> tuple[str, ...]:
        if self._tokenizer.chat_template is None:
            raise RequestError(
                "the calibration source holds conversations and the model's tokenizer has no chat template; "
                "name a column that holds text, or use another source."
            )
        self._conversations += 1
        messages = cast("list[dict[str, str]]", [_cleaned(message) for message in document.messages])
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            self._refused += 1
            self._first_refusal = self._first_refusal or " ".join(str(error).split())
            return ()
        return (str(rendered),)

    def _encode(self, text: str) -> list[int]:
        (encoded,) = encode_texts(self._tokenizer, [text])
        return encoded.ids


def pieces(chunks: Iterable[str], size: int) -> Iterator[str]:
    """The same text in pieces of at most `size` characters, whatever the chunks it comes in.

    A piece ends before a single space between two words, which byte-level tokenizers take as part
    of the second word; else after a line; else, in a run of `size` characters without either,
    anywhere. So the ids of the pieces are, except in the last case, the ids of the whole.
    """
    rest = ""
    for chunk in chunks:
        text = rest + chunk
        start = 0
        while len(text) - start > size:
            end = _boundary(text, start, start + size)
            yield text[start:end]
            start = end
        rest = text[start:]
    if rest:
        yield rest


def _boundary(text: str, start: int, end: int) -> int:
    """Where to cut `text[start:]`, at most at `end`, which is below `len(text)`."""
    at = text.rfind(" ", start + 1, end)
    while at > start:
        if not (text[at - 1].isspace() or text[at + 1].isspace()):
            return at
        at = text.rfind(" ", start + 1, at)
    at = text.rfind("\n", start, end)
    while at >= start:
        if not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", start, at)
    return end


def _cleaned(message: Mapping[str, object]) -> dict[str, object]:
    return {key: clean_text(value) if isinstance(value, str) else value for key, value in message.items()}
