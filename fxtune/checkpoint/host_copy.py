"""Copies of tensors in host memory, so that a checkpoint is written while training goes on.

On a GPU a side stream copies into pinned buffers, which the next copy reuses. The copy overlaps the next forward and
backward pass, which only read weights. The optimizer's update waits for the copy on the device (`wait_on_device`). On
a CPU tensors are cloned.

The cost is host memory of the checkpoint's size (LoRA of rank 16 on 8B: 0.5 GB; full fine-tuning of 8B in bfloat16: 48
GB). If less than twice this size is free, `take` copies nothing and returns None. Then the loop waits while the
checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxtune.system.machine.host import memory
from fxtune.system.process.oom import MemoryExhausted, catch_out_of_memory

BLOCK = 64 * 2**20
"""Small tensors share pinned blocks of this many bytes: each pinned allocation is slow, and torch rounds it up to a
power of two."""
ALIGNMENT = 64

Tensors = dict[Any, torch.Tensor]
"""Tensors by name. A name may have any type."""


class HostCopy:
    """One copy at a time: `take` overwrites the previous copy."""

    def __init__(self) -> None:
        self._layout: dict[Any, tuple[torch.Size, torch.dtype]] = {}
        self._pinned: Tensors = {}
        """A buffer for each tensor that is on a GPU."""
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        self._sources: list[torch.Tensor] = []
        """The tensors being copied. They are kept alive because some exist only for the copy."""

    def take(self, tensors: Mapping[Any, torch.Tensor], sharers: int = 1) -> Tensors | None:
        """Copies of `tensors`, to be read after `wait_on_host`; None if this host has no memory for them.

        `sharers`: the number of processes of this host that make equally large copies at the same time.
        """
        on_gpu = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_cuda}
        on_host = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_cuda}
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in on_gpu.items()}
        allocated = [*on_host.values(), *(on_gpu.values() if layout != self._layout else ())]
        if 2 * sharers * sum(tensor.nbytes for tensor in allocated) > memory()[1]:
            return None
        if layout != self._layout:
            self._pinned, self._layout = {}, {}
            try:
                self._pinned = dict(_pinned_buffers(on_gpu))
            except RuntimeError:  # the driver cannot pin more memory; torch has no other exception for this
                return None
            self._layout = layout
        clones = catch_out_of_memory(
            lambda: {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in on_host.items()}
        )
        if isinstance(clones, MemoryExhausted):
            return None
        self._copy(on_gpu)
        return {**clones, **{name: self._pinned[name] for name in on_gpu}}

    def wait_on_host(self) -> None:
        """Wait until the copies are complete. May be called from any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        self._sources = []

    def wait_on_device(self) -> None:
        """Let the device begin later work only after the copies are complete. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _copy(self, on_gpu: Mapping[Any, torch.Tensor]) -> None:
        if not on_gpu:
            return
        self._sources = list(on_gpu.values())
        self._device = device = self._sources[0].device
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name, tensor in on_gpu.items():
                self._pinned[name].copy_(tensor, non_blocking=True)
            self._copied = self._stream.record_event()


def _pinned_buffers(tensors: Mapping[Any, torch.Tensor]) -> Tensors:
    """A pinned buffer for each of `tensors`. Raises RuntimeError if the host cannot pin this much memory."""
    sizes = {name: -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for name, tensor in tensors.items()}
    left, block, used = sum(sizes.values()), torch.empty(0, dtype=torch.uint8), 0
    buffers = {}
    for name, tensor in tensors.items():
        if used + sizes[name] > block.nbytes:
            block, used = torch.empty(max(min(BLOCK, left), sizes[name]), dtype=torch.uint8, pin_memory=True), 0
        buffers[name] = block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        used += sizes[name]
        left -= sizes[name]
    return buffers
