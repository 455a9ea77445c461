"""The texts that a probe reads: pieces of whole segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compressor.calibration.text import DocumentStream
from compressor.errors import RequestError
from compressor.text_windows import Windowed, text_windows

WINDOWS_PER_DOCUMENT = 64
"""Pieces of a text that are looked through for each document asked for, before shorter ones are taken."""


def probe_documents(
    stream: DocumentStream, tokenizer: PreTrainedTokenizerBase, length: int, every: int, count: int
) -> tuple[tuple[Tensor, ...], list[str]]:
    """The first `count` pieces of a text with `length` tokens, or the longest there are; whole multiples of `every`.

    Raises:
        RequestError: the text has no piece of `every` tokens.
    """
    asked = count
    while True:
        windows, _ = text_windows(stream, tokenizer, Windowed("disjoint", length, length, asked))
        full = [window.tokens for window in windows if len(window.tokens) == length]
        if len(full) >= count or len(windows) < asked or asked >= WINDOWS_PER_DOCUMENT * count:
            break
        asked = min(4 * asked, WINDOWS_PER_DOCUMENT * count)
    pieces = sorted((window.tokens for window in windows), key=lambda tokens: -len(tokens))[:count]
    return _whole_segments(pieces, stream.source.name, length, every, count)


def concatenated_documents(
    stream: DocumentStream, tokenizer: PreTrainedTokenizerBase, length: int, every: int, count: int
) -> tuple[tuple[Tensor, ...], list[str]]:
    """`count` pieces of `length` tokens of the documents joined, with the end-of-sequence token between each two.

    Raises:
        RequestError: all documents together have fewer than `every` tokens.
    """
    wanted, asked = count * length, 8
    while True:
        windows, _ = text_windows(stream, tokenizer, Windowed("disjoint", wanted, wanted, asked))
        if len(windows) < asked or sum(len(window.tokens) for window in windows) >= wanted:
            break
        asked *= 4
    end = tokenizer.eos_token_id
    parts: list[Tensor] = []
    for window in windows:
        parts += [torch.tensor([end])] if parts and isinstance(end, int) else []
        parts.append(window.tokens)
    pieces = list(torch.cat(parts)[:wanted].split(length))
    return _whole_segments(pieces, stream.source.name, length, every, count)


def _whole_segments(
    pieces: Sequence[Tensor], name: str, length: int, every: int, count: int
) -> tuple[tuple[Tensor, ...], list[str]]:
    """Pieces, the longest first, cut to multiples of `every`, and what to say where they are less than asked for."""
    least = max(every, 2)  # a token alone has no loss
    cut = tuple(tokens[: len(tokens) // every * every] for tokens in pieces if len(tokens) >= least)
    if not cut:
        raise RequestError(
            f"the longest piece of the text {name} has {len(pieces[0])} tokens and a segment {every}; "
            "give a longer --text, or a lower --every."
        )
    notes = []
    whole = length // every * every
    if whole < length:
        notes.append(f"documents of {whole:,} tokens instead of {length:,}: whole segments of {every}")
    if len(cut) < count:
        notes.append(f"{len(cut)} of {count} documents, as the text has no more of {least} tokens")
    shortest = min(len(tokens) for tokens in cut)
    if shortest < whole:
        notes.append(
            f"documents of {shortest:,} to {len(cut[0]):,} tokens instead of {whole:,}: the text has no longer"
        )
    return cut, notes
