"""Records which operators ran and how long kernels took.

These records are the evidence that an option acted. They come from the device, not from the config.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fxtune.upstream.torch import TorchDispatchMode

MAX_LENGTH = 60


@dataclass(frozen=True)
class Observed:
    calls: int
    kernels: frozenset[str] = field(default_factory=frozenset)
    """Names of the kernels that ran on the device. Empty on a CPU, or if the profiler cannot see kernels (CUPTI)."""


def observe_operators(run: Callable[[], Any], patterns: Mapping[str, str]) -> dict[str, Observed]:
    """Call `run` twice. For each of `patterns`, count the operators and kernels of the second call that match it.

    A pattern matches operators (`aten::softmax`) or kernels of the device. If the profiler sees any kernels, an
    operator that launched no kernel does not count. The first call is a warm-up: code is compiled and loaded on first
    use.
    """
    run()
    events = _profile(run)
    sees_device = any(_on_device(event) for event in events)
    found = {}
    for name, pattern in patterns.items():
        hits = [event for event in events if re.search(pattern, event.name)]
        on_device = [event.name for event in hits if _on_device(event)]
        launched = [_kernels(event) for event in hits if event.device_type == DeviceType.CPU]
        calls = sum(1 for kernels in launched if kernels or not sees_device)
        found[name] = Observed(max(calls, len(on_device)), frozenset(on_device).union(*launched))
    return found


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run in its context, by the key that `key(name, arguments)` returns. Operators with the
    key None are not counted."""

    supports_higher_order_operators = True  # flex_attention is such an operator

    def __init__(self, key: Callable[[str, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self.key, self.counts = key, Counter()  # type: tuple[Any, Counter[Any]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (key := self.key(str(getattr(func, "overloadpacket", func)), args)) is not None:
            self.counts[key] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class KernelTimes:
    """Times of the kernels of a GPU, or of operators where there is no GPU."""

    by_name: dict[str, tuple[float, int]] = field(default_factory=dict)
    """(seconds, calls) of each kernel or operator."""
    exchanging: float | None = None
    """Seconds in which the GPU does nothing but exchange with other ranks (NCCL); None without a GPU."""


def kernel_times(run: Callable[[], Any]) -> KernelTimes:
    """Call `run` once and time its kernels."""
    cuda = _uses_cuda()
    if cuda:
        torch.cuda.synchronize()
    found = KernelTimes()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in _profile(run):
        # A host range (`Optimizer.step`) appears a second time on the device, as an annotation.
        if _on_device(event) == cuda and not getattr(event, "is_user_annotation", False):
            seconds, calls = found.by_name.get(event.name, (0.0, 0))
            spent = event.device_time_total if cuda else event.self_cpu_time_total
            found.by_name[event.name] = seconds + spent / 1e6, calls + 1
            spans["nccl" in event.name.lower()].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    if cuda:
        found.exchanging = uncovered(spans[True], spans[False])
    return found


def uncovered(spans: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """Length of the time inside at least one of `spans` and outside of all `others`. A span is (begin, end)."""
    spans, others = list(spans), list(others)
    return _length([*spans, *others]) - _length(others)


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the time inside at least one of the spans."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def short_name(kernel: str) -> str:
    """A kernel's name without template arguments and compiler prefixes, at most MAX_LENGTH characters."""
    name = re.sub(r"^(void |kernel_cutlass_)", "", kernel).partition("<")[0]
    return name if len(name) <= MAX_LENGTH else name[: MAX_LENGTH - 3] + "..."


def _profile(run: Callable[[], Any]) -> list[Any]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library logs each start and stop to stderr
    cuda = _uses_cuda()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as trace:
        run()
        if cuda:
            torch.cuda.synchronize()
    return list(trace.events() or [])


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _on_device(event: Any) -> bool:
    return bool(event.device_type == DeviceType.CUDA)


def _kernels(event: Any) -> frozenset[str]:
    """Names of the kernels that an operator and the operators that it called have launched."""
    return frozenset(kernel.name for kernel in event.kernels).union(*(_kernels(child) for child in event.cpu_children))
