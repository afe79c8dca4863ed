"""The errors a user can mend. Each class is an exit code; each message says what, where and what to change.

`ValueError` is their root because that is what they are: a value somebody gave. A bug of ours stays an `AssertionError`
or whatever Python raised, with its traceback.
"""

from __future__ import annotations

import difflib
import os
import signal
import stat
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave cannot be used. The message alone must be enough to mend it."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, a config group or a command-line override is wrong."""

    exit_code = 2


class DataError(UserError):
    """A dataset, a row or a chat template is wrong."""

    exit_code = 3


class HardwareError(UserError):
    """This machine cannot do what was asked."""

    exit_code = 4


class MemoryShortError(HardwareError):
    """Memory ran out in the middle of some work. The message says what to change; half as many rows at once may do, too
    (fxtune/system/oom.py), and are tried first.
    """


class NumbersError(UserError):
    """Training went non-finite and stopped before it could harm the weights."""

    exit_code = 5


class StorageError(UserError):
    """A disk, a checkpoint or a run folder cannot be used."""

    exit_code = 6


class HubError(StorageError):
    """Something of the hub is not on this disk, and the hub cannot be reached for it."""


class CheckError(UserError):
    """What `fxtune verify` or `fxtune doctor` looked at is not as it should be. Their tables said so already."""

    exit_code = 1


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end, and it does so in order. Nothing is wrong, so it is no UserError; libraries let it
    pass as they do Ctrl-C. What a scheduler runs again after it goes on: EX_TEMPFAIL of sysexits.h.
    """

    def __init__(self, number: signal.Signals, outcome: str = "") -> None:
        self.signal = number
        self.outcome = outcome
        """What was saved, and what the same command will do; set by whoever knows."""

    @property
    def exit_code(self) -> int:
        return 130 if self.signal is signal.SIGINT else 75

    def __str__(self) -> str:
        name = "Ctrl-C" if self.signal is signal.SIGINT else self.signal.name
        return f"{name}: {self.outcome or 'ended before anything was at stake. Give the same command again.'}"


FILE, FOLDER = "a file", "a folder"


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What lies at `path`, links followed, as a message says it: FILE, FOLDER or what nobody may open, since whoever opens a
    pipe waits for somebody who writes to it, and some devices never end. None: nothing, or nothing that can be seen."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return FILE if stat.S_ISREG(mode) else FOLDER if stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def first_line(error: BaseException) -> str:
    """The name of an error and the first line of its message; where that only introduces the next one, both."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["(no message)"]
    return f"{type(error).__name__}: {' '.join(lines[:2] if lines[0].endswith(':') else lines[:1])}".rstrip(".:")


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is most like `word`, in upper or lower case; None if none is like it.

    `cutoff`: difflib's ratio, from 0 (anything) to 1 (the same).
    """
    by_lower = {option.lower(): option for option in known}
    close = difflib.get_close_matches(word.lower(), by_lower, 1, cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown `word`: "; did you mean `lora`?", or ". There are: lora, rope.", or a full stop."""
    known = list(known)
    close = nearest(word, known, cutoff)
    if close is not None:
        return f"; did you mean `{close}`?"
    return f". There are: {', '.join(known)}." if 0 < len(known) <= 12 else "."
