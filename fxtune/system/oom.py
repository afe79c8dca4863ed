"""Where memory runs out, half as many rows at once: what such an error is, what it leaves behind, and how the work goes on.

A step is the same however many rows a forward pass takes: micro-batches' losses are summed and divided by what the whole step
supervises. So a step that did not fit is taken again, from its beginning and with the same rows, in more and smaller parts.

What an error in the middle of a pass leaves:

    its traceback     holds the frames, and they activations, logits and the batch. Memory is free only when the `except` block
                      has been left (attempt()), that of frames that hold each other when the garbage collector ran (release()).
    gradients         hold a part of the step's sum: they are dropped (Optimizer.drop). The weights and moments have not changed
                      before the update begins, and an error in there is not tried again: half of it may be done.
    side streams      may still read what is about to be given to others: release() waits for the device.
    recorded passes   own a pool of memory: it is given back (Recorder.drop, Compile.drop).
    random numbers    depend on the step alone, and what layers, checkpoints and autocast switch is switched back by `with`.

torch says so by a class of its own on a GPU, and by a plain RuntimeError on a CPU (where a limit of the address space or strict
accounting make an allocation fail; else the kernel ends the process), from CUDA's libraries, and as the cause of other errors.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from fxtune.errors import HardwareError, MemoryShortError, UserError

Result = TypeVar("Result")

WORDS = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "OUT_OF_MEMORY", "std::bad_alloc")
"""What says so in a RuntimeError: CUDA and Triton, torch's allocator on a CPU, cuBLAS and cuDNN, CUDA's driver, C++."""
_PLACE = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. ")
"""Where in torch's own code it was noticed."""


@dataclass(frozen=True)
class Shortage:
    """Memory ran out. Holds words alone, and nothing of what failed."""

    why: str


def shortage(error: BaseException) -> Shortage | None:
    """What `error` says of memory if that ran out, or if that is what it was raised for; None for any other error.

    An error of ours that tells the user what to change is not looked behind, unless it is a MemoryShortError.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError) and not isinstance(cause, MemoryShortError):
            return None
        text = _PLACE.sub("", str(cause).partition(". See documentation")[0].strip())
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError, MemoryShortError)) or (
            isinstance(cause, RuntimeError) and any(word in text for word in WORDS)
        ):
            return Shortage(_first_line(text) or type(cause).__name__)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def attempt(work: Callable[[], Result]) -> Result | Shortage:
    """work(), or the Shortage that it ended in: by then nothing holds what it had made. All other errors are raised."""
    try:
        return work()
    except (RuntimeError, MemoryError, HardwareError) as error:
        found = shortage(error)
        if found is None:
            raise
    return found  # outside of the block: in it, the error holds its frames


def release(device: torch.device) -> None:
    """Give back what nobody holds any more. Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def fewer(rows: int, of: int | None = None) -> int | None:
    """How many rows to try next: half of them, rounded up, or the largest number below that by which `of` rows come in equal
    parts, so that they have one shape. None: there is no less than one.
    """
    if rows <= 1:
        return None
    half = (rows + 1) // 2
    return half if of is None else next(part for part in range(half, 0, -1) if of % part == 0)


def too_many(part: str, rows: int, why: str) -> str:
    """What happened, in words."""
    return f"{part.capitalize()} ran out of memory with {rows} row{'s' * (rows != 1)} at once: {why}"


def _unexplained(part: str, rows: int, why: str) -> HardwareError:
    return HardwareError(too_many(part, rows, why))


class Halving:
    """How many rows at once the parts of a run take (`training`, `evaluation`, `questions`), where memory made them fewer."""

    def __init__(
        self,
        device: torch.device,
        rows: dict[str, int] | None = None,
        note: Callable[[str], None] | None = None,
        explain: Callable[[str, int, str], HardwareError] = _unexplained,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """`rows`: by part, from an earlier stretch of the run; it is kept up to date in place.

        `note`: told once of each halving; None: nothing is halved. `explain`: the error to raise where nothing is left to halve,
        of the part, its rows at once and why. `drop`: lets go of what can be made again.
        """
        self.device, self.known, self.note, self.explain, self.drop = (
            device,
            {} if rows is None else rows,
            note,
            explain,
            drop,
        )

    def rows(self, part: str, whole: int) -> int:
        """How many rows at once `part` takes now; `whole`: as the recipe says."""
        return min(self.known.get(part, whole), whole)

    def within(self, part: str, whole: int, work: Callable[[int], Result]) -> Result:
        """work(rows at once), as often as it takes until it fits. Raises what `explain` makes where it does not with one."""
        while True:
            rows = self.rows(part, whole)
            found = attempt(partial(work, rows))
            if not isinstance(found, Shortage):
                return found
            self.make_room()
            self.less(part, rows, found)

    def make_room(self) -> None:
        """Give back what the failed work held, and what can be made again."""
        self.drop()
        release(self.device)

    def less(self, part: str, rows: int, found: Shortage, of: int | None = None, meaning: str = "") -> int:
        """Take fewer rows at once for `part` from here on than the `rows` that were too many, say so, return how many.

        `of` as fewer() has it. `meaning`: what else there is to say. Raises what `explain` makes where that cannot be.
        """
        less = fewer(rows, of)
        if less is None or self.note is None:
            raise self.explain(part, rows, found.why)
        self.known[part] = less
        self.note(f"{too_many(part, rows, found.why).rstrip('.')}. From here on {less} at a time. {meaning}".rstrip())
        return less


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
