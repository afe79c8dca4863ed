"""Limits the CPU time and memory of untrusted work, such as rendering a chat template.

A sandbox keeps untrusted code from files and functions, but not from `'x' * 10**10` or ten nested loops. A timer of
this process's CPU time sends alarms. An alarm checks the clock and the memory. It can raise an exception in the middle
of the work, also inside a long `repr`, power or regular expression. One allocation can take gigabytes between two
alarms, so the operating system limits the address space as well. The limit is twice the allowed memory, because Python
cannot even raise an error in a full address space. Setting all limits takes less than 20 microseconds.

macOS has only the limit of time, not the limit of memory. Work in other threads than the main thread has no limits,
because signals do not arrive there.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from types import FrameType, TracebackType

SECONDS = 10.0
"""Limit on CPU time. A chat template renders a conversation in a ten-thousandth of this time."""
BYTES = 2 << 30
"""Limit on additional address space. A row of 100 MB takes a fifth of this."""
INTERVAL = 0.1
"""Seconds of CPU time between two alarms. Alarms repeat, because Python swallows an exception that is raised in a
__del__ or in a callback of the garbage collector."""


class LimitExceeded(BaseException):
    """The work exceeded a limit; the message names it. A BaseException, so `except Exception` does not catch it."""


class limit_resources:
    """Run the body with at most `seconds` of CPU time and `more` bytes of additional address space. Raises
    LimitExceeded. Afterwards the previous limits and handlers are restored. Inside another limit_resources it does
    nothing."""

    _active: limit_resources | None = None
    """The instance whose body runs. One is enough, because only the main thread can be limited."""

    def __init__(self, seconds: float = SECONDS, more: int = BYTES) -> None:
        self.seconds, self.more = seconds, more

    def __enter__(self) -> None:
        if limit_resources._active or threading.current_thread() is not threading.main_thread():
            return
        limit_resources._active = self
        self.began, self.memory = time.process_time(), _address_space()
        self.handler = signal.signal(signal.SIGPROF, self._on_alarm)
        self.rlimit = _limit_address_space(self.memory + 2 * self.more) if self.memory else None
        signal.setitimer(signal.ITIMER_PROF, min(INTERVAL, self.seconds), INTERVAL)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if limit_resources._active is not self:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        if self.rlimit is not None:
            resource.setrlimit(resource.RLIMIT_AS, self.rlimit)
        signal.signal(signal.SIGPROF, self.handler)
        limit_resources._active = None
        if kind is not None and issubclass(kind, MemoryError):
            raise LimitExceeded(self._memory_reason) from None

    @property
    def _memory_reason(self) -> str:
        return f"more than {self.more / 2**20:,.0f} MiB of memory"

    def _on_alarm(self, _: int, frame: FrameType | None) -> None:
        # While an exception frees gigabytes, the next alarm may arrive where __exit__() begins. Another exception
        # there would leave the limits in place.
        while frame is not None:
            if (frame.f_code.co_filename, frame.f_code.co_name) == (__file__, "__exit__"):
                return
            frame = frame.f_back
        if time.process_time() - self.began >= self.seconds:
            raise LimitExceeded(f"more than {self.seconds:g} s of processor time")
        if self.memory and _address_space() - self.memory > self.more:
            raise LimitExceeded(self._memory_reason)


def _address_space() -> int:
    """The size of this process's address space in bytes; 0 if this system does not report it."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            return int(statm.read(32).split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def _limit_address_space(size: int) -> tuple[int, int] | None:
    """Limit the address space to `size` bytes. Returns the previous limits, or None if no limit can be set."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([size, *limits]), hard))
    except (OSError, ValueError):
        return None
    return soft, hard
