"""From a range of characters of a text to the tokens that carry them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from compressor.tokenization import EncodedText, Span, encode_texts


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
