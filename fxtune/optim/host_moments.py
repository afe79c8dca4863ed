"""Keeps an optimizer's moments in host memory (optimizer.offload): 4 to 8 bytes a weight less on the device.

Each weight's moments are copied to a slot on the device, updated there, and copied back. Two side streams copy, one in
each direction. While a weight is updated, the moments of the next weights arrive and the moments of the last weights
leave. The order of the last step says which weights are next. With optimizer.in_backward the copies also overlap with
the backward pass. There gradients come in bursts, so moments of several weights arrive ahead. Events keep the order of
copies and updates, and the host waits only to read moments.

The device updates, so weights and moments have the same bits as without offload, and the speed does not depend on the
host's cores (as in ZeRO-Offload, arXiv 2101.06840, which updates there). By calculation an 8B model with moments in
bfloat16 copies 32 GB in each direction, 0.6 s over PCIe 5.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from fxtune.errors import HardwareError
from fxtune.system.terminal.units import GIB

SLOTS = 2
"""Slots on the device for weights of each size."""
AHEAD = 8
"""How many weights ahead moments are copied to the device. A decoder layer has 7 matrices."""


class PinnedMemory:
    """Tensors in host memory, which is page-locked for a GPU until this object dies."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.tensors: list[torch.Tensor] = []
        if self.on_gpu:  # the end of the process unlocks its memory without a call
            weakref.finalize(self, _unlock, device, self.tensors).atexit = False

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of `value` in pages that no other tensor uses, because a page can be locked only once. (torch's
        allocator of such memory would round the size up to a power of two.) Raises HardwareError if the host cannot
        lock more memory. After a MemoryShortError the caller would repeat the update, which may be half done."""
        try:
            pages = mmap.mmap(-1, value.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            kept = torch.frombuffer(pages, dtype=value.dtype).as_strided(value.shape, value.stride())
            if self.on_gpu:
                pages.madvise(mmap.MADV_DONTFORK)  # a fork would copy locked pages, or move them
                with suppress(OSError):  # a kernel without huge pages
                    pages.madvise(mmap.MADV_HUGEPAGE)  # far fewer pages to lock
                if int(refused := torch.cuda.cudart().cudaHostRegister(kept.data_ptr(), len(pages), 0)):
                    raise OSError(str(refused))
        except OSError as error:
            size = sum(tensor.nbytes for tensor in self.tensors) / GIB
            raise HardwareError(
                f"optimizer.offload: the host cannot pin more memory: {size:.1f} GiB of moments are pinned, and "
                f"{value.nbytes / GIB:.2g} more were refused ({error}). Set it to false, or raise the limit (`ulimit "
                "-l`, or the container's)."
            ) from error
        self.tensors.append(kept)
        return kept.copy_(value)


def _unlock(device: torch.device, tensors: list[torch.Tensor]) -> None:
    torch.cuda.synchronize(device)  # copies may still be in progress
    while tensors:
        torch.cuda.cudart().cudaHostUnregister(tensors.pop().data_ptr())


@dataclass(eq=False)
class Slot:
    """Memory of the device for the moments of one weight."""

    spaces: list[torch.Tensor]
    """A flat uint8 tensor for each moment."""
    free: Any
    """The event after which the memory may be written."""


class HostMoments:
    """The moments of library optimizers that have one weight each. On a CPU the slots are copies, too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arriving, self.leaving = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        # Before `slots`: at the end it waits for copies that are in progress, and only then the slots are freed.
        self.memory = PinnedMemory(device)
        self.moments: dict[torch.optim.Optimizer, dict[str, torch.Tensor]] = {}
        """The moments of each part in `memory`, by their key in its state."""
        self.left: dict[torch.optim.Optimizer, Any] = {}
        """The event of the last copy of each part to the host."""
        self.slots: defaultdict[tuple[int, ...], list[Slot]] = defaultdict(list)
        """The slots by the bytes of the moments that they hold."""
        self.filled: dict[torch.optim.Optimizer, tuple[Slot, Any]] = {}
        """The slot of each part whose moments are on the way to the device, and the event of their arrival."""
        self.next: dict[torch.optim.Optimizer, torch.optim.Optimizer] = {}
        """For each part the part that was last updated after it."""
        self.last: torch.optim.Optimizer | None = None

    @contextmanager
    def on_device(self, part: torch.optim.Optimizer) -> Iterator[None]:
        """Let the body update `part`, whose moments are on the device meanwhile. Raises HardwareError if the host
        cannot pin memory for them."""
        self._take(part)  # from a checkpoint
        if part not in self.moments:
            yield
            self._take(part)
            return
        if self.last is not None:
            self.next[self.last] = part
        self.last = part
        if part not in self.filled:  # another order than in the last step: all slots are filled anew
            self.filled.clear()
            self._fetch(part)
        slot, arrived = self.filled.pop(part)
        views, (state,) = self._views(part, slot), part.state.values()
        self._wait(arrived)
        try:
            state.update(views)
            yield
            updated = self._event()
            with torch.cuda.stream(self.leaving):
                self._wait(updated)
                for key, kept in self.moments[part].items():
                    kept.copy_(views[key], non_blocking=True)
                slot.free = self.left[part] = self._event()
        except BaseException:
            self.settle()  # kernels of the failed update may still use the slot
            raise
        finally:
            state.update(self.moments[part])
        following: torch.optim.Optimizer | None = part
        for _ in range(AHEAD):
            following = None if following is None else self.next.get(following)
            if following in self.filled:
                continue
            if following is part or following not in self.moments or not self._fetch(following):
                break

    def settle(self) -> None:
        """Wait until all moments are on the host. Call this before they are read."""
        if self.leaving is not None:
            torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Release the memory of all moments. Call this before a checkpoint replaces them."""
        self.settle()
        for table in (self.moments, self.left, self.filled):
            table.clear()
        self.last = None
        self.memory = PinnedMemory(self.device)

    def _take(self, part: torch.optim.Optimizer) -> None:
        """Move the moments of `part` to the host, if it has moments. The count of steps stays on the device."""
        for state in filter(None, part.state.values() if part not in self.moments else ()):
            self.moments[part] = {key: self.memory.copy(value) for key, value in state.items() if key != "step"}
            state.update(self.moments[part])

    def _fetch(self, part: torch.optim.Optimizer) -> bool:
        """Start to copy the moments of `part` to a slot of their size. Returns False if all those slots are filled."""
        sizes = tuple(kept.nbytes for kept in self.moments[part].values())
        slots, filled = self.slots[sizes], [slot for slot, _ in self.filled.values()]
        slot = next((slot for slot in slots if slot not in filled), None)
        if slot is None:
            if len(slots) == SLOTS:
                return False
            # Queued kernels may still use the memory that the allocator gives.
            spaces = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]
            slots.append(slot := Slot(spaces, self._event()))
        else:
            slots.append(slots.pop(slots.index(slot)))  # the slot that was used last comes last
        with torch.cuda.stream(self.arriving):
            self._wait(slot.free)
            self._wait(self.left.get(part))
            for key, view in self._views(part, slot).items():
                view.copy_(self.moments[part][key], non_blocking=True)
            self.filled[part] = slot, self._event()
        return True

    def _views(self, part: torch.optim.Optimizer, slot: Slot) -> dict[str, torch.Tensor]:
        """The moments of `part` in a slot. For compiled updates they are no views of one tensor."""
        views = dict[str, torch.Tensor]()
        for (key, kept), space in zip(self.moments[part].items(), slot.spaces, strict=True):
            empty = torch.empty(0, dtype=kept.dtype, device=self.device)
            views[key] = empty.set_(space.untyped_storage(), 0, kept.shape, kept.stride())
        return views

    def _event(self) -> Any:
        """An event of the current stream; None on a CPU."""
        return None if self.leaving is None else torch.cuda.current_stream(self.device).record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
