"""What is raised where memory does not suffice: by Python, by torch on either device, by triton and by cuBLAS."""

from __future__ import annotations

_SAID = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left. torch's own error is a RuntimeError, as are the others."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error).lower() for said in _SAID)


def told(error: BaseException) -> str:
    """One sentence with what was said, and what needs less."""
    said = " ".join(str(error).split())[:200].rstrip(". ") or "no memory is left"
    return (
        f"out of memory ({said}): give a smaller --batch-size, shorter sequences or --low-memory where the command has "
        "them, or a device that nothing else uses; --resume goes on from what a run kept."
    )
