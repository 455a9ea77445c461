"""Signals that wait."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from compressor.export.interrupts import termination_raises
from compressor.recovery.signals import deferred_signals


def test_ctrl_c_comes_at_the_end() -> None:
    done = []
    handler = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is handler


def test_termination_comes_at_the_end() -> None:
    done = []

    def work() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append(1)

    with termination_raises():
        with pytest.raises(SystemExit) as stop:
            work()
        assert stop.value.code == 128 + signal.SIGTERM
    assert done == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_each_signal_reaches_its_own_handler_once() -> None:
    arrived = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        with deferred_signals():
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGHUP):
                signal.raise_signal(number)
            assert arrived == []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert arrived == [signal.SIGHUP, signal.SIGINT]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with deferred_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_exception_inside_puts_the_handlers_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), deferred_signals():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_changes_nothing() -> None:
    seen = []

    def work() -> None:
        with deferred_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]
