"""Ctrl-C and SIGTERM end a run with one sentence: nothing half-written, and how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressor.errors import CompressorError
from compressor.export.interrupts import termination_raises


class InterruptedRunError(CompressorError):
    """The run was stopped from outside; `exit_code` is the shell's for the signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def explained_interrupts(output: Path, saved: Path) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into `InterruptedRunError`.

    Raises:
        InterruptedRunError: a signal came; `saved` holds what is done so far, if anything.
    """
    with termination_raises():
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as stop:
            code = stop.code if isinstance(stop, SystemExit) else 130
            if not isinstance(code, int) or code <= 128:
                raise  # not a signal: the reader of the output went away, say
            kept = saved.exists()
            hint = (
                "give --resume to go on with what is done so far"
                if kept
                else "nothing was saved yet that --resume could go on with"
            )
            raise InterruptedRunError(f"interrupted: {output} was not written; {hint}.", code) from None
