"""Gathers the divided weights of layers by the copy engines of the GPUs, which leave all multiprocessors to products.

NCCL's own kernels wait for multiprocessors that products hold, and products wait for NCCL's kernels. For a base of
70B in fp8 on two H200, kernels gather for 490 ms of a step, and copies for 182 ms (docs/log.md). NCCL copies by itself
if the memory that it fills is symmetric, which means registered by all ranks at the same offsets, and if
NCCL_CTA_POLICY is 2. world.py sets this variable, unless the user has set it; another value switches the copies off.
The bits are the same.

Ranks must fill the same buffer in the same gather, so layers take buffers in turn, and not by what is free on a rank.
"""

from __future__ import annotations

import math
import os
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxtune.distributed.world import World
from fxtune.errors import first_line
from fxtune.upstream.torch import SymmetricMemory

POLICY = ("NCCL_CTA_POLICY", "2")
OLDEST_NCCL = (2, 28)
BUFFERS = 2
"""torch gathers a layer while it copies the last gathered layer out of its buffer."""


class CopyEngineGather:
    """For torch's FSDPModule.set_custom_all_gather. The layers of a model share one."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self.memory = memory
        self.buffers: dict[int, list[torch.Tensor]] = {}
        """Buffers by their size in bytes."""
        self.taken: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        """For each size the tensors that were handed out, newest last."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor for one gather. All ranks call this in the same order."""
        length = math.prod(size) * dtype.itemsize
        buffers, taken = self.buffers.setdefault(length, []), self.taken.setdefault(length, [])
        if len(taken) < BUFFERS:
            buffers.append(self.memory.empty(length))
        else:
            assert taken.pop(0)() is None, "torch holds two gathered layers at a time"
            buffers.append(buffers.pop(0))
        tensor = buffers[-1].view(dtype).view(*size)
        taken.append(weakref.ref(tensor))
        return tensor

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def copy_engine_gather(world: World) -> tuple[CopyEngineGather | None, str]:
    """The gather by copy engines for the ranks that divide weights, or None, and what gathers. All ranks call this."""
    if world.device.type != "cuda":
        return None, "gloo"
    name, value = POLICY
    devices = world.gather((socket.gethostname(), world.device.index), "comparing hosts")
    own = {devices[rank] for rank in dist.get_process_group_ranks(world.weights_group)}
    numbers = {number for _, number in own}
    why_not, memory = None, None
    if os.environ.get(name) != value:
        why_not = f"{name} is {os.environ.get(name)}"
    elif torch.cuda.nccl.version()[:2] < OLDEST_NCCL:
        why_not = f"copy engines need NCCL {'.'.join(map(str, OLDEST_NCCL))}"
    elif len({host for host, _ in own}) > 1:
        why_not = "the ranks are on several hosts"
    elif not all(torch.cuda.can_device_access_peer(a, b) for a in numbers for b in numbers if a != b):
        why_not = "the GPUs cannot read each other's memory"
    else:
        try:
            memory = SymmetricMemory(world.device, world.weights_group)
            memory.empty(1)
        except (RuntimeError, ImportError, AttributeError) as error:
            why_not = f"torch {torch.__version__} gives no symmetric memory here: {first_line(error)}"
    reasons = world.gather(why_not, "choosing how to gather weights")
    if (reason := next(filter(None, reasons), None)) is not None:
        return None, f"NCCL's kernels, because {reason}"
    assert memory is not None
    return CopyEngineGather(memory), "copy engines"
