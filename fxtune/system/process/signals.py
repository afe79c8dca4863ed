"""Handles the signals that end a run: SIGTERM and SIGUSR1 from a scheduler, SIGINT from Ctrl-C, SIGHUP from a terminal
that closes.

The first signal is recorded. Some phases can be interrupted, because a resumed run repeats them to the same bits:
start-up, an evaluation, the forward and backward passes of a step. There the signal raises Stopped immediately, as
Ctrl-C does. Elsewhere it takes effect when the loop calls check() after a step. So a weight update is never
interrupted, and a signal does not wait until a compiler has finished.

A second SIGTERM or Ctrl-C ends the process immediately, even if Python is stuck in a call that does not return (a
disk, a device). For this a thread reads each signal from a pipe to which the interpreter's C handler writes. A signal
within DOUBLE seconds of the first counts as the same signal: schedulers signal all processes of a job, and job scripts
forward the signals that they get. SIGUSR1 and SIGHUP never end a process immediately: SIGUSR1 is an early warning, and
both the shell and the kernel send SIGHUP.

LLVM compiles Triton's kernels in this process. It replaces the interpreter's handlers by handlers that drop SIGUSR1
(lib/Support/Unix/Signals.inc). So every method below restores the interpreter's handlers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from fxtune.errors import Stopped

HANDLED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
DOUBLE = 0.25
"""A second signal within this many seconds counts as the first signal. A person's second Ctrl-C comes later."""


class Signals:
    """The signals of this process, as a reentrant context manager. Outside the context, and in other threads than the
    main thread, the methods do nothing."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that arrived."""
        self._at_once = True
        self._entered = 0
        self._before: dict[int, Any] = {}
        self._pipe = (-1, -1)
        self._wakeup = -1

    def __enter__(self) -> Signals:
        self._entered += 1
        if self._entered == 1 and threading.current_thread() is threading.main_thread():
            self.received, self._at_once = None, True
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            threading.Thread(
                target=_exit_on_second_signal, args=(self._pipe[0],), name="fxtune-signals", daemon=True
            ).start()
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._before = {
                number: handler for number in HANDLED if (handler := signal.getsignal(number)) is not signal.SIG_IGN
            }  # signals that nohup or a background shell ignores stay ignored
            self._restore_handlers()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered == 0 and self._pipe[1] >= 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._pipe[1])  # ends the thread, which closes the other end
            self._pipe, self.received = (-1, -1), None

    def check(self) -> None:
        """Raise Stopped if a signal has arrived."""
        self._restore_handlers()
        if self._entered and self.received is not None:
            raise Stopped(self.received)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In the body a signal takes effect only at check(), or at the next interruptible()."""
        with self.held():
            self.check()
            yield

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """In the body a signal raises Stopped immediately. An error that follows a signal becomes Stopped."""
        before, self._at_once = self._at_once, True
        try:
            self.check()
            yield
        except Exception as error:
            if self._entered and self.received is not None:
                raise Stopped(self.received) from error
            raise
        finally:
            self._at_once = before
        self.check()  # in case a library swallowed the exception

    @contextmanager
    def held(self) -> Iterator[None]:
        """In the body a signal is only recorded, in `received`. Several ranks must first agree on what to do."""
        before, self._at_once = self._at_once, False
        try:
            yield
        finally:
            self._at_once = before

    def ignore(self) -> None:
        """Let this process ignore signals until it ends. When the first rank has ended, torch's agent signals the
        other ranks once more, and they must still end with their own exit codes."""
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)
            self._before.clear()

    def _restore_handlers(self) -> None:
        """Restore the interpreter's handlers, in case a library replaced them. A handler takes a microsecond."""
        if self._before and threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            if self._at_once:
                raise Stopped(self.received)


SIGNALS = Signals()
"""The only instance, because signals belong to the process."""


def leave_signals_to_main_process() -> None:
    """Call this in a child process before it starts threads. The child then ends when the main process ends, even if
    that is killed. It also ends on a SIGTERM from the main process, which multiprocessing sends at exit. The child
    ignores other signals to the process group."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    main = multiprocessing.parent_process()
    if main is None:
        return
    if hasattr(signal, "sigwaitinfo"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # sigwaitinfo sees a blocked signal, but not an ignored one
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_sigterm_from, args=(main.pid,), name="fxtune-signals", daemon=True).start()
    threading.Thread(target=lambda: (wait([main.sentinel]), os._exit(1)), daemon=True).start()


def _exit_on_sigterm_from(main: int | None) -> None:
    """Run by a thread of a child: end the process on a SIGTERM sent by the main process."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(128 + signal.SIGTERM)


def _exit_on_second_signal(pipe: int) -> None:
    """Run by a thread: end the process on the second SIGTERM or SIGINT."""
    first: float | None = None
    while numbers := os.read(pipe, 64):
        for number in numbers:
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            now = time.monotonic()
            if first is not None and now - first > DOUBLE:
                stop = Stopped(
                    signal.Signals(number), "came again, so this ended at once. Earlier checkpoints are intact."
                )
                threading.Timer(DOUBLE, os._exit, (stop.exit_code,)).start()  # a stopped terminal may block the write
                os.write(2, f"\nfxtune: {stop}\n".encode())
                os._exit(stop.exit_code)
            first = first or now
    os.close(pipe)
