"""How out-of-memory errors are recognised, and how work is retried with fewer rows."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxtune.errors import ConfigError, HardwareError, MemoryShortError
from fxtune.system.process.oom import MemoryExhausted, RowsPerPass, catch_out_of_memory, halved, out_of_memory_reason

HUGE = 1 << 58
"""Bytes that no allocator has."""


def refused() -> torch.Tensor:
    return torch.empty(HUGE, dtype=torch.uint8)


def compiled() -> None:
    """A compiler reports the error as the cause of its own."""
    try:
        refused()
    except RuntimeError as error:
        raise RuntimeError("backend='inductor' raised:") from error


def handled() -> None:
    """An error while another one is handled, such as at the end of a CUDA graph capture that failed."""
    try:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. See documentation for Memory Management"
        )
    except torch.OutOfMemoryError:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904


def raising(error: BaseException):
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "why"),
    [
        (refused, "DefaultCPUAllocator: can't allocate memory"),
        (lambda: np.empty(HUGE, np.uint8), "Unable to allocate"),
        (lambda: bytearray(HUGE), "MemoryError"),
        (compiled, "DefaultCPUAllocator"),
        (handled, "Tried to allocate 2.00 GiB"),
        (raising(MemoryShortError("the host has no more memory to pin")), "the host has no more memory to pin"),
        (
            raising(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
            "CUBLAS_STATUS",
        ),
        (raising(RuntimeError("Triton Error [CUDA]: out of memory")), "Triton Error"),
    ],
)
def test_out_of_memory_errors_are_recognised(fail, why):
    found = catch_out_of_memory(fail)
    assert isinstance(found, MemoryExhausted)
    assert why in found.reason
    assert "\n" not in found.reason
    assert "enforce fail" not in found.reason
    assert "See documentation" not in found.reason


def explained() -> None:
    try:
        refused()
    except RuntimeError as error:
        raise ConfigError("a message that says what to change") from error


@pytest.mark.parametrize(
    "fail", [explained, raising(RuntimeError("shape '[2]' is invalid")), raising(KeyboardInterrupt())]
)
def test_other_errors_are_not_out_of_memory(fail):
    with pytest.raises((ConfigError, RuntimeError, KeyboardInterrupt)) as seen:
        catch_out_of_memory(fail)
    assert out_of_memory_reason(seen.value) is None


def test_failed_work_holds_no_memory():
    class Activations:
        pass

    held = []

    def work() -> None:
        activations = Activations()
        held.append(weakref.ref(activations))
        refused()

    gc.disable()
    try:
        assert isinstance(catch_out_of_memory(work), MemoryExhausted)
        assert held[0]() is None
    finally:
        gc.enable()


@given(st.integers(2, 64), st.integers(1, 64))
def test_halved_rows_divide_the_batch(rows, times):
    whole = rows * times
    sizes = [rows]
    while (less := halved(sizes[-1], whole)) is not None:
        assert 1 <= less <= (sizes[-1] + 1) // 2
        assert less < sizes[-1]
        assert whole % less == 0
        assert not any(whole % between == 0 for between in range(less + 1, (sizes[-1] + 1) // 2 + 1))
        sizes.append(less)
    assert sizes[-1] == 1


@given(st.integers(1, 9), st.integers(1, 16), st.integers(1, 16))
def test_halved_rows_are_whole_groups(each, groups, times):
    whole = each * groups * times
    sizes = [each * groups]
    while (less := halved(sizes[-1], whole, each)) is not None:
        assert less < sizes[-1]
        assert whole % less == less % each == 0
        sizes.append(less)
    assert sizes[-1] == each


def test_rows_are_halved_until_the_work_fits():
    rows, notes, tried = {"questions": 50}, [], []

    def work(rows):
        tried.append(rows)
        return refused() if rows > 3 else rows

    halving = RowsPerPass(torch.device("cpu"), rows, notes.append)
    assert halving.run("questions", 20, work) == 3
    assert halving.run("questions", 20, work) == 3
    assert tried == [20, 10, 5, 3, 3]
    assert len(notes) == 3
    assert rows == {"questions": 3}
    with pytest.raises(HardwareError, match="Evaluation ran out of memory with 1 row at once: Default"):
        halving.run("evaluation", 2, lambda _: refused())
    with pytest.raises(HardwareError, match="with 8 rows at once"):  # nobody to tell
        RowsPerPass(torch.device("cpu")).run("evaluation", 8, lambda _: refused())
