"""Handles running out of memory: recognises the error, frees the failed work's memory, and retries with half the rows.

An optimizer step is the same with any number of rows in a forward pass: the losses of its micro-batches are summed and
divided by the step's supervised tokens. So a step that does not fit is repeated in smaller micro-batches. An update
that runs out of memory is not repeated, because it may be half done.

An error in the middle of a pass leaves these behind:

    traceback       Its frames hold activations, logits and the batch. They are free once the `except` block has been
                    left (catch_out_of_memory), in reference cycles after a garbage collection (free_cached_memory).
    gradients       They hold part of the step's sum and are dropped (Optimizer.drop).
    side streams    They may still read memory that is about to be reused: free_cached_memory waits for the device.
    CUDA graphs     Each owns a memory pool, which is given back (Recorder.drop, Compile.drop).

On a GPU torch raises OutOfMemoryError. CUDA's libraries and the CPU's allocator raise RuntimeError. On a CPU the
kernel kills the run without an error, unless the address space is limited or accounting is strict.
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

MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "OUT_OF_MEMORY", "std::bad_alloc")
"""Texts in the RuntimeErrors of CUDA and Triton, torch's CPU allocator, cuBLAS and cuDNN, the CUDA driver, and C++."""
_TORCH_SOURCE_LINE = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. ")


@dataclass(frozen=True)
class MemoryExhausted:
    """The result of work that ran out of memory, without a reference to the failed work."""

    reason: str


def out_of_memory_reason(error: BaseException) -> str | None:
    """The first line of the message if `error`, or one of its causes, says that memory ran out; None otherwise.

    A UserError that is no MemoryShortError already tells the user what to change, so its causes are not searched.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError) and not isinstance(cause, MemoryShortError):
            return None
        text = _TORCH_SOURCE_LINE.sub("", str(cause).partition(". See documentation")[0].strip())
        if isinstance(cause, (torch.OutOfMemoryError, MemoryError, MemoryShortError)) or (
            isinstance(cause, RuntimeError) and any(message in text for message in MESSAGES)
        ):
            return text.splitlines()[0] if text else type(cause).__name__
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def process_out_of_memory(error: BaseException) -> HardwareError | None:
    """The error to show if `error` says that memory ran out and no other code has handled it; None otherwise."""
    if (found := out_of_memory_reason(error)) is None:
        return None
    return HardwareError(
        f"This process was given no more memory ({found}). Free some, or raise its limit (`ulimit -v`, the "
        "container's, the batch job's)."
    )


def catch_out_of_memory(work: Callable[[], Result]) -> Result | MemoryExhausted:
    """The result of work(), or MemoryExhausted once nothing holds what the work allocated. Raises other errors."""
    try:
        return work()
    except (RuntimeError, MemoryError, HardwareError) as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
    return MemoryExhausted(reason)  # not in the `except` block, where the error still holds its frames


def free_cached_memory(device: torch.device) -> None:
    """Free memory that is no longer referenced. Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def halved(rows: int, total: int | None = None, multiple: int = 1) -> int | None:
    """Half of `rows`, rounded up. With `total`, the largest divisor of `total` that is not above this half, so that
    all micro-batches have one shape. `multiple`: rows that stay together; the result is a multiple of them. None if
    `rows` cannot be halved."""
    if rows <= multiple:
        return None
    half = (rows + 1) // 2
    parts = range(max(half - half % multiple, multiple), 0, -multiple)
    return next(part for part in parts if total is None or total % part == 0)


class RowsExhausted(HardwareError):
    """A part of a run ran out of memory, and its rows cannot be halved. Arguments: part, rows at once, reason."""

    def __str__(self) -> str:
        part, rows, reason = self.args
        return f"{part.capitalize()} ran out of memory with {rows} row{'s' * (rows != 1)} at once: {reason}"


class RowsPerPass:
    """Rows per forward pass in each part of a run (`training`, `evaluation`, `questions`), halved to fit in memory."""

    def __init__(
        self,
        device: torch.device,
        reduced: dict[str, int] | None = None,
        note: Callable[[str], None] | None = None,
        error: Callable[..., HardwareError] | None = None,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """`reduced`: rows by part, from the checkpoint of a resumed run; updated in place.

        `note` gets a message for each halving; without it nothing is halved. `error` makes the exception for rows that
        cannot be halved, from a message and `rows`; without it this is RowsExhausted. `drop` frees memory that can be
        recreated, such as CUDA graphs.
        """
        self.device, self.note, self.error, self.drop = device, note, error, drop
        self.reduced = {} if reduced is None else reduced

    def rows(self, part: str, configured: int) -> int:
        """The rows per forward pass in `part`. `configured`: the recipe's value."""
        return min(self.reduced.get(part, configured), configured)

    def run(self, part: str, configured: int, work: Callable[[int], Result], multiple: int = 1) -> Result:
        """Call work(rows). If memory runs out, halve the rows and call it again. Raises `error` if a single row does
        not fit, or `multiple` rows that stay together."""
        while True:
            rows = self.rows(part, configured)
            result = catch_out_of_memory(partial(work, rows))
            if not isinstance(result, MemoryExhausted):
                return result
            self.free_memory()
            self.halve(part, rows, result, multiple=multiple)

    def free_memory(self) -> None:
        """Free the memory of the failed work, and memory that can be recreated."""
        self.drop()
        free_cached_memory(self.device)

    def halve(
        self, part: str, rows: int, found: MemoryExhausted, total: int | None = None, hint: str = "", multiple: int = 1
    ) -> int:
        """Reduce `part` to about half of `rows`, note this with `hint`, and return the new rows. Raises `error` if
        `rows` cannot be halved.

        `total`, `multiple`: see halved().
        """
        fewer, exhausted = halved(rows, total, multiple), RowsExhausted(part, rows, found.reason)
        if fewer is None or self.note is None:
            raise self.error(str(exhausted), rows=rows) if self.error else exhausted
        self.reduced[part] = fewer
        self.note(f"{str(exhausted).rstrip('.')}. From here on {fewer} at a time. {hint}".rstrip())
        return fewer
