"""A limit on the processor time and the memory of work that a stranger chose, such as rendering a chat template.

A sandbox keeps foreign code from files and functions. It does not keep it from `'x' * 10**10`, from ten nested loops or from a
list that holds itself twice, forty levels deep: those ask for a machine's whole memory, or never end. What is not bounded by
the language is bounded by the operating system here: a timer that counts this process's own seconds (a busy machine does not
shorten it, and Python looks at it also inside a long `repr`, power or regular expression), and a ceiling on the address space.

Linux has both, macOS the first; elsewhere, and off the main thread, where signals do not arrive, work runs unbounded. To set
and lift both limits takes less than 10 microseconds.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS = 10.0
"""Of processor time. A chat template takes a ten-thousandth of that for a conversation."""
BYTES = 2 << 30
"""Of address space, beyond what the process had before. A row of 100 MB takes a fifth of that."""


AGAIN = 0.1
"""Seconds from one ring to the next: an exception in a callback of the garbage collector, or in a __del__, gets no further."""

_within = False  # of the main thread, the only one that is fenced
_armed = False


class LimitExceeded(BaseException):
    """The work wanted more. The message says of what. Not an Exception, so that what runs inside cannot catch it as one."""


@contextmanager
def limit_resources(seconds: float = SECONDS, more: int = BYTES) -> Iterator[None]:
    """Run the block for at most `seconds` of processor time in at most `more` bytes of further address space.

    Raises Exceeded in its place. The limits and handlers that were there before are there again afterwards. One fence inside
    another is the outer one.
    """
    global _within, _armed
    if _within or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    _within = True
    before = signal.signal(signal.SIGVTALRM, _ring)
    ceiling = _lower(more)
    try:
        try:
            _armed = True
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN)
            yield
        finally:
            _armed = False  # what rings from here on is not heard
    except _TimeUp:
        raise LimitExceeded(f"more than {seconds:g} s of processor time") from None
    except MemoryError:
        raise LimitExceeded(f"more than {more / 2**20:,.0f} MiB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        _restore(ceiling)
        _within = False


class _TimeUp(BaseException):
    """Passes by every `except Exception` on its way out."""


def _ring(_: int, __: FrameType | None) -> None:
    if _armed:
        raise _TimeUp


def _lower(more: int) -> tuple[int, int] | None:
    """Lower the ceiling of the address space; what it was before, or None where there is none to be had."""
    try:
        import resource

        statm = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            used = int(os.read(statm, 32).split()[0]) * resource.getpagesize()
        finally:
            os.close(statm)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        below = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([used + more, *below]), hard))
    except (ImportError, OSError, ValueError):  # no such limit on this system
        return None
    return soft, hard


def _restore(ceiling: tuple[int, int] | None) -> None:
    if ceiling is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, ceiling)
