"""Signals of this process: deferred, held, at once. Signals to whole runs: tests/faults/test_signals.py."""

from __future__ import annotations

import os
import signal

import pytest

from fxtune.errors import Stopped
from fxtune.system.process.signals import SIGNALS


def send(number: signal.Signals = signal.SIGUSR1) -> None:
    """Send a signal to this process; Python handles it before the next statement."""
    os.kill(os.getpid(), number)


def test_signal_stops_at_once_outside_of_deferred_work():
    with SIGNALS, pytest.raises(Stopped) as stopped:
        send()
    assert (stopped.value.signal, stopped.value.exit_code) == (signal.SIGUSR1, 75)


def test_deferred_signal_takes_effect_at_the_next_check():
    with SIGNALS, SIGNALS.deferred():
        SIGNALS.check()
        send()
        with pytest.raises(Stopped, match="SIGUSR1"):
            SIGNALS.check()
        with pytest.raises(Stopped), SIGNALS.interruptible():
            raise AssertionError("its body does not run")


def test_held_signal_is_only_recorded():
    with SIGNALS:
        with SIGNALS.held():
            send()
            assert SIGNALS.received is signal.SIGUSR1
        with pytest.raises(Stopped):
            SIGNALS.check()


def test_error_that_follows_a_signal_is_the_signal():
    """A library may turn the interruption of its work into an error of its own."""

    def library() -> None:
        try:
            send()
        except Stopped:
            raise ValueError("of a library") from None

    with SIGNALS, pytest.raises(Stopped), SIGNALS.interruptible():
        library()


def test_signal_is_forgotten_with_the_work_that_it_ended():
    """Otherwise ranks that train on in this process would stop once more."""
    with SIGNALS, pytest.raises(Stopped):
        send()
    assert SIGNALS.received is None


def test_handlers_are_restored_and_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with SIGNALS, SIGNALS:  # it is reentrant
            send()
            SIGNALS.check()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGUSR1) == before
