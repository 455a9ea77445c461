"""Texts through a model's own tokenizer: ids, what it puts in front, and whether the model has embeddings for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

from compressor.errors import RequestError

Span = tuple[int, int]
"""A half-open range."""


@dataclass(frozen=True)
class EncodedText:
    """The tokens of `text`, and the characters of each where the tokenizer is one of `tokenizers` (a fast one)."""

    text: str
    ids: list[int]
    offsets: list[Span] | None


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool = False, offsets: bool = False
) -> list[EncodedText]:
    """Encode each text by itself, with the special tokens of a sequence around it if `special`."""
    offsets = offsets and tokenizer.is_fast
    encoded = tokenizer(
        list(texts),
        add_special_tokens=special,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        return_offsets_mapping=offsets,
        verbose=False,
    )
    ids = cast("list[list[int]]", encoded["input_ids"])
    spans = cast("list[list[Span]]", encoded["offset_mapping"]) if offsets else [None] * len(ids)
    return [EncodedText(*parts) for parts in zip(texts, ids, spans, strict=True)]


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every sequence, such as BOS; nothing where it puts nothing."""
    (bare,) = encode_texts(tokenizer, ["a"])
    (whole,) = encode_texts(tokenizer, ["a"], special=True)
    starts = range(len(whole.ids) - len(bare.ids) + 1) if bare.ids else range(0)
    found = (start for start in starts if whole.ids[start : start + len(bare.ids)] == bare.ids)
    return whole.ids[: next(found, 0)]


def with_prefix(ids: list[int], prefix: list[int]) -> list[int]:
    """Once, also where the text itself begins with BOS."""
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def require_embedding(tokenizer: PreTrainedTokenizerBase, token: int, vocab_size: int) -> None:
    """Refuse a tokenizer that does not belong to the model.

    Raises:
        RequestError: `token` has no embedding in a model with `vocab_size` of them.
    """
    if token >= vocab_size:
        raise RequestError(
            f'the tokenizer gives token {token} ("{tokenizer.convert_ids_to_tokens(token)}") and the model has '
            f"embeddings for {vocab_size:,} tokens; put the tokenizer that the model was trained with into its folder."
        )
