"""Which operators really ran, seen by torch's profiler: by their names, and on a GPU by the kernels that they launched.

An option that asks for a kernel is proven by looking at what the device did, not at what a config says. And where its time went.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LONGEST_NAME = 60


@dataclass(frozen=True)
class Seen:
    calls: int
    kernels: frozenset[str] = field(default_factory=frozenset)
    """Names of what ran on the device. Empty on a CPU, and where the profiler is not allowed to look (CUPTI)."""


def operators(run: Callable[[], Any], patterns: Mapping[str, str]) -> dict[str, Seen]:
    """Call `run` twice and count, the second time, what matches each regular expression, by the same keys.

    A pattern matches operators (`aten::softmax`) or kernels of the device. Where kernels can be seen at all, an operator that
    launched none does not count. The first call is for what is compiled or loaded at first use.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its library notes each start and stop on stderr
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    run()
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], acc_events=True
    ) as trace:
        run()
        if cuda:
            torch.cuda.synchronize()
    events = list(trace.events() or [])
    sees_device = any(event.device_type == DeviceType.CUDA for event in events)
    found = {}
    for name, pattern in patterns.items():
        hits = [event for event in events if re.search(pattern, event.name)]
        on_device = [event.name for event in hits if event.device_type == DeviceType.CUDA]
        launched = [_kernels(event) for event in hits if event.device_type == DeviceType.CPU]
        calls = sum(1 for kernels in launched if kernels or not sees_device)
        found[name] = Seen(max(calls, len(on_device)), frozenset(on_device).union(*launched))
    return found


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run inside it by `key(operator's name, arguments)`. A key of None is not counted."""

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self, key: Callable[[str, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self.key, self.counts = key, Counter()  # type: tuple[Any, Counter[Any]]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (key := self.key(str(getattr(func, "overloadpacket", func)), args)) is not None:
            self.counts[key] += 1
        return func(*args, **(kwargs or {}))


def times(run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Call `run` once: seconds and calls of each kernel on the GPU, by name; without a GPU, of each operator on its own."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if cuda:
        torch.cuda.synchronize()
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])], acc_events=True
    ) as trace:
        run()
        if cuda:
            torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = {}
    for event in trace.events() or []:
        # What a range on the host spans on the device (`Optimizer.step`) is told there again, as an annotation.
        if (event.device_type == DeviceType.CUDA) == cuda and not getattr(event, "is_user_annotation", False):
            seconds, calls = found.get(event.name, (0.0, 0))
            spent = event.device_time_total if cuda else event.self_cpu_time_total
            found[event.name] = seconds + spent / 1e6, calls + 1
    return found


def short(kernel: str) -> str:
    """A kernel's name without its template arguments and what compilers put before it."""
    name = re.sub(r"^(void |kernel_cutlass_)", "", kernel).partition("<")[0]
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


def _kernels(event: Any) -> frozenset[str]:
    """Names of the kernels that an operator and those that it called ran on the device."""
    return frozenset(kernel.name for kernel in event.kernels).union(*(_kernels(child) for child in event.cpu_children))
