"""SIGTERM and SIGHUP end a process without clean-up; here they become an exception, as Ctrl-C is one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TERMINATION = (signal.SIGTERM, signal.SIGHUP)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def termination_raises() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit(128 + number).

    A signal whose disposition is not the default (a handler of the caller's, `nohup`) keeps it, and a
    thread other than the main one, which cannot set handlers, changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _TERMINATION if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP do nothing: for clean-up, which a second Ctrl-C must not cut short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler that was not installed from Python reads as None and cannot be put back: it is left alone.
    numbers = (number for number in (signal.SIGINT, *_TERMINATION) if signal.getsignal(number) is not None)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
