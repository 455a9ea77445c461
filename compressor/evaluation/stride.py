"""Whether windows can slide. Imports no torch."""

from __future__ import annotations

from compressor.errors import RequestError


def require_stride(stride: int, length: int) -> None:
    """Raises:
    RequestError: a window of `length` tokens would not overlap the one `stride` tokens before it.
    """
    if not 1 <= stride < length:
        raise RequestError(
            f"a stride of {stride} does not fit windows of {length} tokens; use one from 1 to {length - 1}."
        )
