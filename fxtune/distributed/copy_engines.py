"""Gathers the divided weights of layers by the copy engines of the GPUs.

NCCL's own kernels wait for multiprocessors that products hold, and products wait for NCCL's kernels. Copy engines need
no multiprocessor (docs/distributed.md has figures). NCCL uses them if NCCL_CTA_POLICY is 2 and the memory that it
fills is symmetric, which means registered by all ranks at the same offsets. world.py sets the variable, unless the
user has set it; another value switches the copies off. The bits are the same.

All ranks must fill the same buffer in the same gather. So layers take two buffers in turn, and not a buffer that is
free on their own rank, as torch's memory pool would. The embedding and the head are gathered by kernels.
"""

from __future__ import annotations

import math
import os
import socket
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxtune.distributed.world import NCCL, World
from fxtune.errors import first_line
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.upstream import torch as upstream

POLICY = "NCCL_CTA_POLICY"
OLDEST_NCCL = (2, 28)
BUFFERS = 2
"""torch gathers the next layer while it copies the previous layer out of its buffer."""
_ALIVE: weakref.WeakSet[CopyEngineGather] = weakref.WeakSet()
"""The gathers of all divided models of this process. Models that live at the same time have their own buffers."""
FAILURES = (RuntimeError, ImportError, AttributeError, TypeError)
"""What torch raises where it has no symmetric memory, or has it in another form."""


class CopyEngineGather:
    """The object for torch's FSDPModule.set_custom_all_gather. All layers of a model share one object."""

    def __init__(self, buffers: Sequence[torch.Tensor], owner: object = None) -> None:
        """`buffers`: flat uint8 tensors of symmetric memory, each large enough for a whole layer. `owner`: has the
        memory's pool, which must outlive the buffers."""
        self.buffers, self.owner = list(buffers), owner
        self.taken: list[weakref.ref[torch.Tensor]] = []
        """Weak references to the tensors that torch got, newest last, one for each buffer in use."""
        _ALIVE.add(self)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor for one gather. All ranks call this in the same order."""
        if len(self.taken) == len(self.buffers) and self.taken.pop(0)() is not None:
            raise RuntimeError("a pass ended before all layers that it had gathered were used")
        self.buffers.append(buffer := self.buffers.pop(0))
        tensor = buffer[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)
        self.taken.append(weakref.ref(tensor))
        return tensor

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        # torch 2.13 deprecates the older name.
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


def gathered_bytes(weights: Iterable[torch.Tensor], parts: int, cast: torch.dtype | None) -> int:
    """The bytes that ranks gather of divided `weights`, with rows padded to a multiple of the `parts`. `cast`: the
    dtype in which they are sent; None: their own."""
    return sum(
        -(-len(weight) // parts) * parts * math.prod(weight.shape[1:]) * (cast or weight.dtype).itemsize
        for weight in weights
    )


def copy_engine_gather(world: World, sizes: Iterable[int]) -> tuple[CopyEngineGather | None, str]:
    """The gather by copy engines for layers of `sizes` bytes, or None, and what gathers, in words. All ranks call it.

    Raises torch.OutOfMemoryError if the buffers do not fit.
    """
    if world.device.type != "cuda":
        return None, "gloo"
    devices = world.gather((socket.gethostname(), world.device.index), "comparing hosts")
    own = {devices[rank] for rank in dist.get_process_group_ranks(world.weights_group)}
    reasons, gather = world.gather(_why_not(own), "choosing how to gather weights"), None
    if not any(reasons):
        why_not, anew = None, bool(world.agree(len(_ALIVE)))
        try:
            memory = upstream.symmetric_memory(world.device, world.weights_group)
            gather = CopyEngineGather(memory.buffers(BUFFERS, max(sizes), anew), memory)
        except FAILURES as error:
            if isinstance(error, RuntimeError) and out_of_memory_reason(error):
                raise
            why_not = f"torch {torch.__version__} gives no symmetric memory here: {first_line(error)}"
        reasons = world.gather(why_not, "choosing how to gather weights")
    if (reason := next(filter(None, reasons), None)) is not None:
        return None, f"NCCL's kernels, because {reason}"
    return gather, "copy engines"


def _why_not(own: set[tuple[str, int]]) -> str | None:
    """Why this rank cannot gather by copy engines. `own`: host and number of each GPU of the group. If each rank sees
    only its own GPU, all have the number 0, and the registration of memory shows whether they reach each other."""
    numbers = {number for _, number in own}
    if os.environ.get(POLICY) != NCCL[POLICY]:
        return f"{POLICY} is {os.environ.get(POLICY)}"
    if torch.cuda.nccl.version()[:2] < OLDEST_NCCL:
        return f"copy engines need NCCL {'.'.join(map(str, OLDEST_NCCL))}"
    if len({host for host, _ in own}) > 1:
        return "the ranks are on several hosts"
    if not all(torch.cuda.can_device_access_peer(a, b) for a in numbers for b in numbers if a != b):
        return "the GPUs cannot read each other's memory"
    return None
