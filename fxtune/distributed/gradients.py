"""Adds up the gradients of replicas: every rank holds the whole model and has seen other rows of the same step.

The sum is taken once an optimizer step. Nothing is sent at earlier micro-batches. All ranks get the same bits, so
clipping, the skipping of non-finite steps and the update need no further agreement: they come out the same everywhere.

Gradients are copied into flat buckets, in the order in which the backward pass finishes them: last layer first. While
the last micro-batch is in its backward pass, a hook on each weight counts what has arrived, and the sum of a full
bucket starts beside the rest of the pass (on a GPU on NCCL's stream). Buckets start in their fixed order, whatever
order autograd takes, because all ranks must call their collectives in one order. The last bucket, which is full only
when the pass is over, starts after the ranks have agreed on the step, with the losses and metrics. So a single
bucket has no overlap. Adapters need none: at rank 16 the gradients of 8B's adapters are 168 MB, which take 0.6 ms over
NVLink in a step of 930 ms.

One rank alone may run out of memory in its last backward pass, while the others are already summing. This rank
therefore starts its remaining sums (start()) with the present content of its buckets, which takes no memory, and only
then do the ranks agree. So each rank takes part in the same sums in each attempt at a step, no rank waits for a sum
that another rank has not started, and if the ranks agree that the step failed, all of them drop the result.

There is no overlap if a gradient is not final when its hook runs: a replayed CUDA graph runs no hooks, and float16's
loss scale is divided out after the pass. There is no overlap either if ranks share rows: their backward passes call
other collectives, and two collectives at once may wait for each other.

`reduce_dtype=bfloat16` halves what is sent. Each gradient is rounded to 8 significant bits (by at most 1/256 of its
value), and so is each partial sum: N ranks round N - 1 times more. The range is float32's, so nothing overflows.
Losses and metrics stay float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxtune.distributed.parallel import ParallelConfig
from fxtune.distributed.powersgd import PowerSGD
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.system.signals import SIGNALS
from fxtune.upstream import torch as upstream

Item = TypeVar("Item")

DOING = "adding up gradients"


@dataclass
class Bucket:
    """Gradients that are sent together."""

    number: int
    """Buckets are sent in this order."""
    members: list[int]
    """Which parameters, by their number."""
    buffer: torch.Tensor
    """Flat, as large as all members together."""
    parts: list[torch.Tensor]
    """The part of the buffer of each member, in its shape."""

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients of the members into the buffer; None counts as zeros."""
        present = [
            (part, gradient) for part, gradient in zip(self.parts, gradients, strict=True) if gradient is not None
        ]
        if len(present) < len(self.parts):
            self.buffer.zero_()
        if present:
            upstream.foreach("copy_", [part for part, _ in present], [gradient for _, gradient in present])


class GradientSum:
    """Sums the gradients of `parameters` over the ranks of `world`. Holds a buffer as large as all gradients, in the
    dtype that is sent.

    For each step: backward passes of the micro-batches of arming(), then start(), then a call of this object, or
    drop() if the step is given up.
    """

    def __init__(
        self,
        world: World,
        parameters: Mapping[torch.Tensor, str],
        config: ParallelConfig,
        bucket_bytes: int = 0,
        overlap: bool = True,
    ) -> None:
        """`parameters`: their names, in the model's order. `bucket_bytes`: about how large a bucket is; 0: one bucket.
        `overlap`: whether each backward pass runs hooks and leaves gradients that are final.
        """
        self.world, self.names = world, list(parameters.values())
        self.parameters = list(parameters)
        dtype = getattr(torch, config.reduce_dtype.value)
        self.buckets = _buckets(self.parameters, dtype, world.device, bucket_bytes)
        self.compression = (
            PowerSGD(world, config.powersgd_rank, config.powersgd_start) if config.powersgd_rank else None
        )
        self.overlaps = overlap and len(self.buckets) > 1 and self.compression is None
        self._sums: list[dist.Work] = []
        """The sums that were started and not waited for, in the order of the buckets."""
        self._started = 0
        """How many buckets of this step were started."""
        self._missing: list[set[int]] = []
        """The members of each bucket whose gradient is not final. Empty: no backward pass is watched."""
        # Through a weak reference, or the hooks of a model would keep the buffers of every step object that it had.
        arrived = weakref.WeakMethod(self._arrived)
        for bucket in self.buckets if self.overlaps else ():
            for member in bucket.members:
                hook = partial(_call, arrived, bucket.number, member)
                self.parameters[member].register_post_accumulate_grad_hook(hook)

    def arming(self, micro_batches: Iterable[Item]) -> Iterator[Item]:
        """Yield `micro_batches`, and let the hooks start sums in the backward pass of the last one. A micro-batch is
        yielded when the next one is known, so that the last one is recognised."""
        self.drop()
        ahead: list[Item] = []
        for item in micro_batches:
            if ahead:
                yield ahead.pop()
            ahead.append(item)
        self._missing = [set(bucket.members) for bucket in self.buckets] if self.overlaps else []
        yield from ahead

    def start(self) -> None:
        """Start the sums of all buckets but the last that have not started. Every rank calls this once its backward
        passes are over, also if they failed, and before the ranks agree on anything."""
        self._missing = []
        while self.overlaps and self._started < len(self.buckets) - 1:
            self._start([self.parameters[member].grad for member in self.buckets[self._started].members])

    def drop(self) -> None:
        """Forget this step. Waits for the sums in flight, on the device."""
        self._missing, self._started = [], 0
        with self.world.waiting(DOING):
            while self._sums:
                self._sums.pop(0).wait()

    @torch.no_grad()
    def __call__(
        self, gradients: Sequence[torch.Tensor | None], metrics: torch.Tensor
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """The sums over the ranks of each gradient, in the dtype that is sent, and of `metrics`, float32 [metrics].
        The next step overwrites them.

        None is a gradient that this rank does not have, such as of an expert that got no token. The sum is None if no
        rank has the gradient, as in one process. Only if a gradient is None does the host wait for the device.
        """
        self._missing = []
        while self._started < len(self.buckets):
            bucket = self.buckets[self._started]
            mine = [gradients[member] for member in bucket.members]
            if self.compression is None:
                self._start(mine)
                continue
            bucket.fill(mine)
            with self.world.waiting(DOING):
                self.compression(bucket.number, bucket.buffer, bucket.parts, bucket is self.buckets[-1])
            self._started += 1
        reached = torch.ones(len(gradients), device=metrics.device)
        if any(gradient is None for gradient in gradients):
            reached.copy_(torch.tensor([float(gradient is not None) for gradient in gradients]))
        rest = torch.cat([reached, metrics])
        self._sums.append(self.world.start_sum(rest))
        self.drop()
        sums: list[torch.Tensor | None] = [None] * len(gradients)
        for bucket in self.buckets:
            for member, part in zip(bucket.members, bucket.parts, strict=True):
                sums[member] = part
        if any(gradient is None for gradient in gradients):
            for member, ranks in enumerate(rest[: len(sums)].tolist()):
                sums[member] = sums[member] if ranks else None
        return sums, rest[len(sums) :]

    @torch.no_grad()
    def _start(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start the sum of the next bucket, with these gradients of its members. No signal comes between a sum and its
        count."""
        with SIGNALS.held():
            bucket = self.buckets[self._started]
            bucket.fill(gradients)
            self._sums.append(self.world.start_sum(bucket.buffer))
            self._started += 1

    def _arrived(self, bucket: int, member: int) -> None:
        """The gradient of `member` is final. Start the buckets that are full, in their order; the last one waits."""
        if not self._missing:
            return
        if bucket < self._started:
            raise ConfigError(
                f"parallel.bucket_mib: the backward pass adds to the gradient of {self.names[member]} more than once, "
                "so its sum over the ranks cannot start beside the pass. Set parallel.bucket_mib=0."
            )
        self._missing[bucket].discard(member)
        while self._started < len(self.buckets) - 1 and not self._missing[self._started]:
            self._start([self.parameters[member].grad for member in self.buckets[self._started].members])


def _call(arrived: weakref.WeakMethod[Any], bucket: int, member: int, _: torch.Tensor) -> None:
    """A hook of autograd."""
    if (method := arrived()) is not None:
        method(bucket, member)


def _buckets(parameters: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device, size: int) -> list[Bucket]:
    """The parameters in buckets of about `size` bytes (0: one), the last parameter in the first bucket."""
    groups: list[list[int]] = [[]]
    used = 0
    for member in reversed(range(len(parameters))):
        if size and used >= size:
            groups.append([])
            used = 0
        groups[-1].append(member)
        used += parameters[member].numel() * dtype.itemsize
    buckets = []
    for number, members in enumerate(groups):
        sizes = [parameters[member].numel() for member in members]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = [
            part.view(parameters[member].shape) for part, member in zip(buffer.split(sizes), members, strict=True)
        ]
        buckets.append(Bucket(number, members, buffer, parts))
    return buckets
