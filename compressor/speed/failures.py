"""What a measurement may fail with: such a cell is recorded as failed, and the next one begins."""

from __future__ import annotations

import importlib.util

from compressor.out_of_memory import is_out_of_memory

MEASURING_ERRORS: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Of torch (CUDA errors are RuntimeErrors), of stock classes that meet an unusual shape, and of triton."""

if importlib.util.find_spec("triton") is not None:
    from triton.errors import TritonError

    MEASURING_ERRORS += (TritonError,)


def reason(error: Exception) -> str:
    """One line of at most 300 characters."""
    if is_out_of_memory(error):
        return "out of memory"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
