"""Tokens of the Hub in files that are about to be published."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

_BLOCK_BYTES = 4 * 1024 * 1024
_LENGTH_BYTES = 8
# A placeholder of a few letters over and over is none.
_MIN_DISTINCT = 5
_ANY_TOKEN = re.compile(rb"(?<![A-Za-z0-9_])(?:hf|api_org)_([A-Za-z0-9]{34})(?![A-Za-z0-9])")
_LONGEST = 128


def blocks(content: bytes | Path, only_header: bool) -> Iterator[bytes]:
    """The bytes of a file, or, of one of safetensors with `only_header`, those before its tensors; some at a time."""
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        # The length of a header is the file's to say, which ends where it ends.
        left = int.from_bytes(file.read(_LENGTH_BYTES), "little") if only_header else None
        while block := file.read(_BLOCK_BYTES if left is None else min(left, _BLOCK_BYTES)):
            yield block
            left = None if left is None else left - len(block)


def windows(pieces: Iterator[bytes], overlap: int) -> Iterator[tuple[bytes, bool, bool]]:
    """Every piece with the last `overlap` bytes before it, and whether it is the first and the last one."""
    window, first = next(pieces, b""), True
    for piece in pieces:
        yield window, first, False
        window, first = window[-overlap:] + piece, False
    yield window, first, True


def holds_any(pieces: Iterator[bytes], words: tuple[bytes, ...]) -> bool:
    """Whether one of `words` stands in the bytes."""
    overlap = max((len(word) for word in words), default=1)
    return any(word in window for window, _, _ in windows(pieces, overlap) for word in words)


def holds_token(pieces: Iterator[bytes]) -> bool:
    """Whether a token of the Hub stands in the bytes: `hf_` and 34 letters and digits, of somebody."""
    for window, first, last in windows(pieces, _LONGEST):
        for match in _ANY_TOKEN.finditer(window):
            # At a cut, what stands before or behind is not seen; the next window or the last one has it whole.
            is_whole = (first or match.start() > 0) and (last or match.end() < len(window))
            if is_whole and len(set(match[1])) >= _MIN_DISTINCT:
                return True
    return False


def masking(token: str | None) -> Callable[[str], str]:
    """Of a line to print: the same without tokens in it."""

    def masked(line: str) -> str:
        line = line if token is None else line.replace(token, "***")
        return _ANY_TOKEN.sub(b"***", line.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    return masked
