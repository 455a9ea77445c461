"""Sizes of files as a person writes them. Imports no torch, so that a recipe is checked at once."""

from __future__ import annotations

import re
from fractions import Fraction

from compressor.errors import RequestError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]i?b|b)?", re.IGNORECASE | re.ASCII)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes that `500MB` (decimal), `2GiB` (binary) or `1000000` stand for; case does not matter.

    Raises:
        RequestError: not such a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0
    if match:
        unit = (match.group(2) or "b").lower()
        base = 1024 if "i" in unit else 1000
        size = int(Fraction(match.group(1)) * base ** _POWERS.get(unit[0], 0))
    if size < 1:
        raise RequestError(
            f"size {text!r} is not a number of bytes of at least 1; write it as 500MB, 5GB, 2GiB or 1000000."
        )
    return size
