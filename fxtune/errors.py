"""Errors that a user can fix. Each class has an exit code. Each message says what is wrong, where, and what to change.

A bug of fxtune raises an `AssertionError` or another Python error, and shows its traceback.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something that the user gave cannot be used. The message alone must tell how to fix it."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, a config group or a command-line override is wrong."""


class UnavailableError(ConfigError):
    """An option cannot act on this model, or with the installed version of a library.

    If nobody demanded the option, the run goes on without it (techniques/withdrawal.py).
    """

    def __init__(self, why: str, key: str = "") -> None:
        """`key`: the technique that cannot act, or the technique and its option, such as `liger.rope`. Pipeline sets
        an empty `key` to the technique's name."""
        super().__init__(why)
        self.why, self.key = why, key

    def __str__(self) -> str:
        if not self.key or self.why.startswith("techniques."):
            return self.why
        key, off = (self.key, "off") if "." in self.key else (f"{self.key}.enabled", "false")
        return f"techniques.{key}: {self.why}. Set it to {off}."


class DataError(UserError):
    """A dataset, a row or a chat template is wrong."""

    exit_code = 3


class HardwareError(UserError):
    """This machine cannot run the recipe."""

    exit_code = 4


class MemoryShortError(HardwareError):
    """Memory ran out. If possible, the caller repeats the work with fewer rows at once (system/process/oom.py)."""


class NumbersError(UserError):
    """Loss or gradients were not finite, and training stopped before they could reach the weights."""

    exit_code = 5


class StorageError(UserError):
    """A disk, a checkpoint or a run folder is not usable."""

    exit_code = 6


class HubError(StorageError):
    """Files are not on this disk, and the hub that has them cannot be reached."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = tuple(dict.fromkeys(reasons))
        listed = "".join(f"\n  {why}" for why in self.reasons)
        several = f"{len(self.reasons)} files or data sets of this recipe are missing here:{listed}"
        super().__init__(several if len(self.reasons) > 1 else self.reasons[0])


class RankError(UserError):
    """Another process of the same run died, or cannot be reached."""

    exit_code = 7


class LostRankError(RankError):
    """The connection to another rank broke because that rank ended. A message of that rank, if any, says why."""


class CheckError(UserError):
    """`fxtune verify` or `fxtune doctor` found something wrong. The command has shown it in a table before."""

    exit_code = 1


class Ended(Exception):
    """A command has ended and printed its outcome. The process ends with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Stopped(KeyboardInterrupt):
    """A signal told this process to end, and it ends in an orderly way. This is a KeyboardInterrupt because libraries
    do not catch one.

    Except after Ctrl-C, the exit code is EX_TEMPFAIL of sysexits.h, which tells a scheduler to run the command again.
    """

    def __init__(self, number: signal.Signals, outcome: str = "") -> None:
        self.signal = number
        self.outcome = outcome
        """A text on what was saved, and on what the same command will do. The trainer sets it."""

    @property
    def exit_code(self) -> int:
        return 130 if self.signal is signal.SIGINT else 75

    def __str__(self) -> str:
        name = "Ctrl-C" if self.signal is signal.SIGINT else self.signal.name
        return f"{name}: {self.outcome or 'ended before there was anything to save. Give the same command again.'}"


FILE, FOLDER = "a file", "a folder"


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of file at `path`, after links are followed: FILE, FOLDER, or words for a file that must not be opened
    because reading it may never end. None if `path` does not exist or cannot be accessed."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # ValueError means that no file can have this name
        return None
    return FILE if stat.S_ISREG(mode) else FOLDER if stat.S_ISDIR(mode) else "a pipe, a socket or a device"


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its message, with the second line if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["(no message)"]
    return f"{type(error).__name__}: {' '.join(lines[:2] if lines[0].endswith(':') else lines[:1])}".rstrip(".:")


def not_written(what: str, problem: OSError, way_out: str = "") -> StorageError:
    """Make the error for a file that the system did not write. Its message says how to solve such a problem.

    `what`: a clause, such as "runs/a cannot be written". `way_out`: another solution, such as "or set run.dir".
    """
    text = problem.strerror or str(problem)
    return StorageError(f"{what}: {text}. {_REMEDIES.get(problem.errno or 0, _REMEDY)}{way_out and f', {way_out}'}.")


@contextmanager
def writing(what: str, way_out: str = "") -> Iterator[None]:
    """In the body an OSError becomes the error of not_written()."""
    try:
        yield
    except OSError as error:
        raise not_written(what, error, way_out) from error


@contextmanager
def readable(what: str, remedy: str) -> Iterator[None]:
    """In the body, a file that cannot be read, or whose content is not as its writer leaves it, raises StorageError.

    `what`: a clause, such as "runs/a.json cannot be read". `remedy`: a sentence.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        plain = isinstance(error, (OSError, ValueError))
        reason = getattr(error, "strerror", None) or (str(error) if plain else first_line(error))
        raise StorageError(f"{what}: {reason}. {remedy}") from error


_REMEDY = "Free space there or mend its permissions"
_REMEDIES = {
    errno.ENOSPC: "Free space there",
    errno.EDQUOT: "Free space there",
    errno.EACCES: "Mend its permissions",
    errno.EPERM: "Mend its permissions",
    errno.EROFS: "The disk can only be read: make it writable",
    errno.ENOENT: "Make the folder, and give the same command again",
    errno.ENOTDIR: "A part of this path is a file: remove or rename the file",
}


def shortened(value: object, limit: int = 60) -> str:
    """A value as text in one line. A text longer than `limit` is cut to its first and its last part."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-(limit // 2) :]}"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name in `known` that is most similar to `word`, ignoring case. None if difflib rates all names below
    `cutoff`. A name with the same letters in another order is preferred to all other names."""
    by_lower, word = {option.lower(): option for option in known}, word.lower()
    same_letters = [option for option in by_lower if sorted(option) == sorted(word)]
    close = difflib.get_close_matches(word, same_letters or by_lower, 1, cutoff)
    return by_lower[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown `word`: "; did you mean `lora`?", ". There are: lora, rope." or "."."""
    known = list(known)
    if close := nearest(word, known, cutoff):
        return f"; did you mean `{close}`?"
    return f". There are: {', '.join(known)}." if 0 < len(known) <= 12 else "."
