"""Ctrl-C and SIGTERM end a run with one sentence: nothing half-written, and how to go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compressor.errors import CompressorError
from compressor.export.interrupts import termination_raises
from compressor.launched import launch


class InterruptedRunError(CompressorError):
    """The run was stopped from outside; `exit_code` is the shell's for the signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def explained_interrupts(output: Path, saved: Sequence[Path] | None) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into `InterruptedRunError`.

    Raises:
        InterruptedRunError: a signal came; what there is of `saved` holds what is done so far. None is for a run that
            keeps nothing to go on with.
    """
    with termination_raises():
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as stop:
            code = stop.code if isinstance(stop, SystemExit) else 130
            if not isinstance(code, int) or code <= 128:
                raise  # not a signal: the reader of the output went away, say
            if saved is None:
                hint = "run it again"
            elif any(path.exists() for path in saved):
                hint = "give --resume to go on with what is done so far"
            else:
                hint = "nothing was saved yet that --resume could go on with"
            raise InterruptedRunError(
                f"interrupted: {output} was not written{_by_launcher(code)}; {hint}.", code
            ) from None


def _by_launcher(code: int) -> str:
    """A launcher ends all processes by this signal, not by that of Ctrl-C, when one of them is lost."""
    if code != 128 + signal.SIGTERM or launch().count == 1:
        return ""
    return " (the launcher ended this process: it was stopped itself, or lost another process, which it then names)"


@contextmanager
def explained_termination() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `InterruptedRunError`; Ctrl-C is the command's own to explain.

    Raises:
        InterruptedRunError: one of them came.
    """
    with termination_raises():
        try:
            yield
        except SystemExit as stop:
            if not isinstance(stop.code, int) or stop.code <= 128:
                raise  # argparse's
            raise InterruptedRunError("terminated; nothing was written.", stop.code) from None
