"""Limits the CPU time and memory of untrusted work, such as rendering a chat template.

A sandbox keeps untrusted code from files and functions, but not from `'x' * 10**10` or ten nested loops. So the
operating system enforces the limits: a timer of this process's own CPU time, which Python checks also inside a long
`repr`, power or regular expression, and a limit on the address space. Both together take less than 10 microseconds.

Linux has both, macOS the timer. In threads other than the main one, where signals do not arrive, work runs without
limits.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 10.0
"""Limit on CPU time. Rendering a chat template takes a ten-thousandth of that per conversation."""
BYTES = 2 << 30
"""Limit on additional address space. A row of 100 MB takes a fifth of that."""
REPEAT = 0.1
"""Seconds between two alarms: Python swallows one that is raised in a __del__ or in a callback of the garbage
collector."""

_active = False  # whether the main thread, the only one that can be limited, is inside limit_resources()
_armed = False


class LimitExceeded(BaseException):
    """The work exceeded a limit; the message names it. A BaseException, so `except Exception` does not catch it."""


@contextmanager
def limit_resources(seconds: float = SECONDS, more: int = BYTES) -> Iterator[None]:
    """Run the body with at most `seconds` of CPU time and at most `more` bytes of additional address space.

    Raises LimitExceeded. Afterwards the previous limits and handlers are restored. A nested call does nothing.
    """
    global _active, _armed
    if _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    _active = True
    handler = signal.signal(signal.SIGVTALRM, _on_alarm)
    address_space = _limit_address_space(more)
    try:
        try:
            _armed = True
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, REPEAT)
            yield
        finally:
            _armed = False
    except _TimeUp:
        raise LimitExceeded(f"more than {seconds:g} s of processor time") from None
    except MemoryError:
        raise LimitExceeded(f"more than {more / 2**20:,.0f} MiB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, address_space)
        _active = False


class _TimeUp(BaseException):
    """A BaseException, so that no `except Exception` in between catches it."""


def _on_alarm(_: int, __: FrameType | None) -> None:
    if _armed:
        raise _TimeUp


def _limit_address_space(more: int) -> tuple[int, int] | None:
    """Limit the address space to `more` bytes beyond its size now. Returns the previous limits; None: not possible."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            used = int(statm.read(32).split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([used + more, *limits]), hard))
    except (OSError, ValueError):
        return None
    return soft, hard
