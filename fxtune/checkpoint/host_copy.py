"""Copies of a run's tensors in host memory, as they are at one moment, so that a checkpoint is written while training goes on.

On a GPU a stream of its own copies them into pinned buffers, which are used again by the next snapshot. The copy runs beside the
next step's forward and backward, which only read weights; what changes them has to wait, on the device: `wait_on_device` before the
optimizer's update. On a CPU they are cloned, at the speed of memory.

What it costs is host memory: as much as is saved (a LoRA of rank 16 on 8B: 0.5 GB; full fine-tuning of 8B in bfloat16: 48 GB).
Where a host has not twice that, nothing is copied (`take` gives None), and a checkpoint is written while the loop waits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxtune.system.host import memory
from fxtune.system.oom import MemoryExhausted, catch_out_of_memory

BLOCK = 64 * 2**20
"""Small tensors share pinned blocks of this many bytes: pinning has a price for each piece, and torch rounds each up to a power
of two."""
ALIGNMENT = 64

Tensors = dict[str, torch.Tensor]


class HostCopy:
    """At most one moment at a time: what `take` gave is overwritten by the next one."""

    def __init__(self) -> None:
        self._layout: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._pinned: Tensors = {}
        """A buffer for each tensor that lives on a GPU."""
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._device: torch.device | None = None
        self._sources: list[torch.Tensor] = []
        """Held until they are copied: some were made for the snapshot, and their memory must not be given out before."""

    def take(self, tensors: Mapping[str, torch.Tensor]) -> Tensors | None:
        """Copies of `tensors`, not to be read before `arrived`; None where this host has no room for them."""
        there = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_cuda}
        here = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_cuda}
        new = sum(tensor.nbytes for tensor in here.values())
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in there.items()}
        if layout != self._layout:
            new += sum(tensor.nbytes for tensor in there.values())
        if 2 * new > memory()[1]:
            return None
        if layout != self._layout and not self._pin(there):
            return None
        copies = catch_out_of_memory(
            lambda: {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in here.items()}
        )
        if isinstance(copies, MemoryExhausted):
            return None
        return {**copies, **self._copy(there)}

    def arrived(self) -> None:
        """Wait, on the host, until the copies hold what `take` was given. Any thread may."""
        if self._copied is not None:
            self._copied.synchronize()
        self._sources = []

    def wait_on_device(self) -> None:
        """Let what is issued to the device from now on wait until the copies are made. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def _copy(self, there: Tensors) -> Tensors:
        if not there:
            return {}
        self._device = device = next(iter(there.values())).device
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._sources = list(there.values())
        with torch.cuda.stream(self._stream):
            for name, tensor in there.items():
                self._pinned[name].copy_(tensor, non_blocking=True)
            self._copied = self._stream.record_event()
        return dict(self._pinned)

    def _pin(self, there: Tensors) -> bool:
        """Make a pinned buffer for each of `there`. Returns whether the host could."""
        self._pinned, self._layout = {}, {}
        room = {name: -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for name, tensor in there.items()}
        left, block, used = sum(room.values()), torch.empty(0, dtype=torch.uint8), 0
        try:
            for name, tensor in there.items():
                if used + room[name] > block.nbytes:
                    block, used = torch.empty(max(min(BLOCK, left), room[name]), dtype=torch.uint8, pin_memory=True), 0
                self._pinned[name] = block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                used += room[name]
                left -= room[name]
        except RuntimeError:  # the driver pins no more: torch has no class of its own for that
            self._pinned = {}
            return False
        self._layout = {name: (tensor.shape, tensor.dtype) for name, tensor in there.items()}
        return True
