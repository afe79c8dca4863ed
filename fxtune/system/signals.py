"""Being told to end: SIGTERM and SIGUSR1 by a scheduler, SIGINT by Ctrl-C.

The first one is remembered. Where there is nothing to lose (start-up, an evaluation, the forward and backward passes of a step)
it raises Stopped there and then, as Ctrl-C does; everywhere else the loop asks check() when a step is whole. So an update of the
weights is never cut in two, and nobody waits for a compiler or for the other 31 micro-batches of a step: what was broken off is
done again by the next run, to the same bits.

A second SIGTERM or Ctrl-C ends the process at once, also where Python is stuck in a call that does not come back (a disk, a
device): a thread sees to that, which reads the number of each signal from a pipe that the interpreter's own C handler writes to.
One that comes within DOUBLE seconds of the first is taken for the same one: schedulers signal the whole job, and a job script
passes on what it got. SIGUSR1 is an early warning and never hurries.

Child processes get what is sent to the whole group or job, too. It is the main process's to answer: see left_to_main().

LLVM, which compiles Triton's kernels in this process, puts handlers of its own in place of the interpreter's when it first
writes a file, and never looks again. They pass SIGTERM and SIGINT on, and drop SIGUSR1 (lib/Support/Unix/Signals.inc). So the
handlers are put back wherever the methods below are called, in each step at least.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxtune.errors import Stopped

ANSWERED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))
DOUBLE = 0.25
"""Seconds. A person's second Ctrl-C comes later than that, a forwarded signal sooner."""


class Signals:
    """What this process was told. A context that can be entered again inside itself; outside of it and in threads other than
    the main one nothing is answered, and the methods do nothing."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came."""
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
                target=_leave_on_the_second, args=(self._pipe[0],), name="fxtune-signals", daemon=True
            ).start()
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._before = {
                number: handler for number in ANSWERED if (handler := signal.getsignal(number)) is not signal.SIG_IGN
            }  # nohup, a shell's background: stays
            self._listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered == 0 and self._pipe[1] >= 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._pipe[1])  # ends the thread, which closes the other end
            self._pipe = (-1, -1)

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        self._listen()
        if self._entered and self.received is not None:
            raise Stopped(self.received)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal waits for check(), or for the next leaving()."""
        before, self._at_once = self._at_once, False
        try:
            self.check()
            yield
        finally:
            self._at_once = before

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a signal raises Stopped at once. An error that came with the signal, from a child process that died of it or
        from a library that does not like to be interrupted, is taken for it."""
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
        self.check()  # where a library swallowed it

    def _listen(self) -> None:
        """Have the interpreter's handlers in place, whoever has put others there: a system call for each, a microsecond."""
        if self._before and threading.current_thread() is threading.main_thread():
            for number in self._before:
                signal.signal(number, self._answer)

    def _answer(self, number: int, _: Any) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            if self._at_once:
                raise Stopped(self.received)


SIGNALS = Signals()
"""One for the process, as signals are."""


def leave_signals_to_main_process() -> None:
    """To be called by child processes that work for this one, before they have threads: what the main process answers must not
    end them first.

    A SIGTERM of the main process itself does: it is how multiprocessing ends the children that are left when the interpreter
    does, and then it waits for them.
    """
    for number in ANSWERED:
        signal.signal(number, signal.SIG_IGN)
    main = multiprocessing.parent_process()
    if main is not None and hasattr(signal, "sigwaitinfo"):
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # of an ignored signal nobody is told, of a blocked one who waits for it is
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_leave_with, args=(main.pid,), name="fxtune-signals", daemon=True).start()


def _leave_with(main: int | None) -> None:
    """A child's thread: end the process when it is the main one that wants that."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
        pass
    os._exit(128 + signal.SIGTERM)


def _leave_on_the_second(pipe: int) -> None:
    """The thread's work: end the process on the second SIGTERM or SIGINT."""
    first: float | None = None
    while numbers := os.read(pipe, 64):
        for number in numbers:
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            now = time.monotonic()
            if first is not None and now - first > DOUBLE:
                stop = Stopped(
                    signal.Signals(number), "came again, so this ended at once. What was saved before is whole."
                )
                os.write(2, f"\nfxtune: {stop}\n".encode())
                os._exit(stop.exit_code)
            first = first or now
    os.close(pipe)
