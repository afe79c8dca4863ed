"""Global switches of torch: resets them, switches to kernels that give the same bits each time, and names operators
without such a kernel."""

from __future__ import annotations

import gc
import re

import torch

_WITHOUT = re.compile(r"\b(\S+) does not have a deterministic implementation")


def use_deterministic_kernels(on: bool) -> None:
    """Switch deterministic kernels on or off for this process. When on, operators without one raise RuntimeError."""
    if torch.are_deterministic_algorithms_enabled() != on:  # if possible without the call, which imports the compiler
        torch.use_deterministic_algorithms(on)
    # In deterministic mode torch fills each torch.empty with NaN by default, which costs a pass over every result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def nondeterministic_operator(error: BaseException) -> str | None:
    """The operator whose missing deterministic kernel raised `error` or one of its causes; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if found := _WITHOUT.search(str(cause)):  # by its text: a plugin's error is a UserError with torch's message
            return found[1]
        cause = cause.__cause__ or cause.__context__
    return None


def reset_process() -> None:
    """Free the GPU memory of an earlier run in this process, and undo its global switches."""
    if not torch.cuda.is_initialized():
        return
    gc.collect()  # a wrapped forward refers to its module, so only the collector frees a model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # techniques.precision sets these two switches, unless it is off.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
