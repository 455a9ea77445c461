"""From a range of characters of a text to the tokens that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

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


def token_span(tokenizer: PreTrainedTokenizerBase, encoded: EncodedText, begin: int, stop: int) -> Span:
    """The tokens from the first to the last that carry a character of `encoded.text[begin:stop]`.

    Without offsets, the tokens that remain as they are when the text ends at `begin` do not carry any,
    and those that remain when it ends at `stop`, and the one after them where some change, do.
    """
    if encoded.offsets is not None:
        touching = [index for index, (first, last) in enumerate(encoded.offsets) if first < stop and last > begin]
        return (touching[0], touching[-1] + 1) if touching else (0, 0)
    before, until = encode_texts(tokenizer, [encoded.text[:begin], encoded.text[:stop]])
    kept = common_length(until.ids, encoded.ids)
    return common_length(before.ids, encoded.ids), min(kept + (kept < len(until.ids)), len(encoded.ids))


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
