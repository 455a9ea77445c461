"""What a calibration source yields: rows, and the documents in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MESSAGES_COLUMN = "messages"
"""The usual column of conversations; it is read where the asked column is absent."""


@dataclass(frozen=True, slots=True)
class TextDocument:
    """One text, as consecutive chunks: a long file is never held as a whole."""

    chunks: Iterable[str]


@dataclass(frozen=True, slots=True)
class ChatDocument:
    """One conversation, to be rendered by the tokenizer's chat template.

    Every message has a `role` (str) and a `content` (str, or a list of parts).
    """

    messages: tuple[Mapping[str, object], ...]


Document = TextDocument | ChatDocument


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, or one whole text file.

    `place` tells a user where it stands ("line 2", "b.jsonl line 2"); `document` is None where it
    has no usable text; `fields` are the names of its columns, none for a text file.
    """

    place: str
    document: Document | None
    fields: Sequence[str] = ()
    whole_file: bool = False


class RowReader(Protocol):
    """Reads one file or data set; each call of `rows` starts again from its beginning."""

    def rows(self) -> Iterator[Row]: ...


def document_of_row(row: Mapping[str, object], column: str) -> Document | None:
    """The document in `column` of `row`, or in `messages` where there is no such column.

    A usable value is a text with a character that is neither white space nor NUL, or a conversation.
    """
    if column in row:
        value = row[column]
        if isinstance(value, str):
            text = clean_text(value)
            return TextDocument((text,)) if has_text(text) else None
    else:
        value = row.get(MESSAGES_COLUMN)
    return _conversation(value)


def columns_to_read(available: Sequence[str], column: str) -> tuple[str, ...]:
    """The columns of a table that `document_of_row` looks at."""
    if column in available:
        return (column,)
    return (MESSAGES_COLUMN,) if MESSAGES_COLUMN in available else ()


def clean_text(text: str) -> str:
    r"""`text` without byte-order marks, with `\n` for every line end and `?` for lone surrogates.

    A lone surrogate (JSON can spell one) has no UTF-8 form, and tokenizers refuse it.
    """
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-8", "replace").decode("utf-8")


def has_text(text: str) -> bool:
    """Whether `text` has a character that is neither white space nor NUL, of which unwritten parts of files consist."""
    return bool(text.replace("\x00", "").strip())


def _conversation(value: object) -> ChatDocument | None:
    if not isinstance(value, list) or not value:
        return None
    for message in value:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str | list)
        ):
            return None
    return ChatDocument(tuple(value))
