"""Ctrl-C and its like wait while something is done that must be done whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP that arrive inside reach their handlers at the end; the list has those so far.

    Only handlers written in Python wait: a signal whose disposition is the system's, or is to be ignored, keeps it.
    A thread other than the main one, which no handler interrupts, changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    handlers = {number: handler for number in _NUMBERS if callable(handler := signal.getsignal(number))}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    try:
        for number in handlers:
            signal.signal(number, note)
        yield arrived
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for missed in dict.fromkeys(arrived):
            handlers[signal.Signals(missed)](missed, None)
