"""Adds up the gradients of replicas: every rank holds the whole model and has seen other rows of the same step.

Gradients are summed once in each step. Micro-batches before the last send nothing. All ranks get the same bits, so
clipping, the skipping of non-finite steps and the update have the same result on all ranks without further agreement.

Gradients are copied into flat buckets, in the order in which the backward pass finishes them: last layer first. In the
backward pass of the last micro-batch a hook on each weight marks its gradient as final, and the sum of a complete
bucket starts while the pass goes on (on a GPU on NCCL's stream). Buckets start in a fixed order, because all ranks
must call their collectives in one order. The last bucket is complete when the pass is over. Its sum starts with those
of losses and metrics, after the ranks have agreed on the step. So a single bucket is never summed during the pass.
Adapters do not need the overlap: at rank 16 the gradients of 8B's adapters are 168 MB, 0.6 ms over NVLink in a step of
930 ms.

A rank may run out of memory in its last backward pass while the others are already summing. It then starts its
remaining sums (start_remaining()) with whatever its buckets hold. This takes no memory. Only after that the ranks
agree on the step. So no rank waits for a sum that another rank has not started. If the step has failed, all drop them.

Overlap needs a hook that runs when the gradient is final. A replayed CUDA graph runs no hooks, and with float16 a
gradient is final only after the pass, when the loss scale is divided out. Ranks that share rows cannot overlap either:
their backward passes call other collectives, and two collectives at once may wait for each other.

`compression=bfloat16` halves what is sent. Each gradient is rounded to 8 significant bits (by at most 1/256 of its
value). Each partial sum is rounded, too, N - 1 times on N ranks. bfloat16 has the range of float32, so nothing
overflows. Losses and metrics stay float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fxtune.distributed.parallel import Compression, ParallelConfig
from fxtune.distributed.powersgd import PowerSGD
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.system.process.signals import SIGNALS
from fxtune.upstream import torch as upstream

Item = TypeVar("Item")

WORK = "adding up gradients"
"""What a rank is doing while it sums, for the message about a lost rank."""


@dataclass
class Bucket:
    """Gradients that are sent together."""

    number: int
    """The place of this bucket in the order in which buckets are sent."""
    members: list[int]
    """The numbers of the parameters whose gradients are in the bucket."""
    buffer: torch.Tensor
    """A flat tensor with space for the gradients of all members."""
    parts: list[torch.Tensor]
    """For each member a view of its part of the buffer, in the parameter's shape."""

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
    """Sums the gradients of `parameters` over the ranks of `world`. The buckets take as much memory as all gradients,
    in the dtype that is sent.

    In each step, run the backward passes of the micro-batches that arming() yields, and call start_remaining(). Then
    call finish(), or drop() if the step is given up.
    """

    def __init__(
        self,
        world: World,
        parameters: Mapping[torch.Tensor, str],
        config: ParallelConfig,
        bucket_bytes: int = 0,
        overlap: bool = True,
    ) -> None:
        """`parameters`: parameter -> name, in the model's order. `bucket_bytes`: about how large a bucket is; 0: one
        bucket. `overlap`: sums may start in the backward pass, because it runs hooks on gradients that are final."""
        self.world, self.names = world, list(parameters.values())
        self.parameters = list(parameters)
        dtype = torch.bfloat16 if config.compression is Compression.bfloat16 else torch.float32
        self.buckets = _buckets(self.parameters, dtype, world.device, bucket_bytes)
        self.compression = PowerSGD(world) if config.compression is Compression.powersgd else None
        self.overlaps = overlap and len(self.buckets) > 1 and self.compression is None
        self._sums: list[dist.Work] = []
        """The sums that were started and not waited for, in the order of the buckets."""
        self._started_buckets = 0
        """The number of buckets whose sums were started in this step."""
        self._missing: list[set[int]] = []
        """For each bucket the members whose gradient is not final yet. Empty: hooks do nothing."""
        for bucket in self.buckets if self.overlaps else ():
            for member in bucket.members:
                hook = weak_hook(self._mark_final, bucket.number, member)
                self.parameters[member].register_post_accumulate_grad_hook(hook)

    def arming(self, micro_batches: Iterable[Item]) -> Iterator[Item]:
        """Yield `micro_batches`, and let the hooks start sums in the backward pass of the last micro-batch. Reads one
        micro-batch ahead to find the last one."""
        self.drop()
        held_back: list[Item] = []
        for micro_batch in micro_batches:
            if held_back:
                yield held_back.pop()
            held_back.append(micro_batch)
        self._missing = [set(bucket.members) for bucket in self.buckets] if self.overlaps else []
        yield from held_back

    def start_remaining(self) -> None:
        """Start the sums that have not started yet, except the sum of the last bucket. Every rank calls this after its
        backward passes, even if they failed, and before the ranks agree on anything."""
        self._missing = []
        while self.overlaps and self._started_buckets < len(self.buckets) - 1:
            self._start_next()

    def drop(self) -> None:
        """Forget the sums of this step. On a GPU only the device waits for sums in flight."""
        self._missing, self._started_buckets = [], 0
        with self.world.waiting(WORK):
            while self._sums:
                self._sums.pop(0).wait()

    @torch.no_grad()
    def finish(
        self, gradients: Sequence[torch.Tensor | None], metrics: torch.Tensor
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """The sum of each gradient over the ranks, in the dtype that is sent, and the sums of `metrics`, float32
        [metrics]. The next step overwrites the results.

        A gradient is None if this rank does not have it: an expert got no token, for example. Its sum is None if no
        rank has it, as in one process. The host waits for the device only if a gradient is None.
        """
        self._missing = []
        while self._started_buckets < len(self.buckets):
            bucket = self.buckets[self._started_buckets]
            members = [gradients[member] for member in bucket.members]
            if self.compression is None:
                self._start_next(members)
                continue
            bucket.fill(members)
            with self.world.waiting(WORK):
                self.compression(bucket.number, bucket.buffer, bucket.parts, bucket is self.buckets[-1])
            self._started_buckets += 1
        counts = torch.ones(len(gradients), device=metrics.device)  # the sum is the number of ranks with each gradient
        if any(gradient is None for gradient in gradients):
            counts.copy_(torch.tensor([float(gradient is not None) for gradient in gradients]))
        counts_and_metrics = torch.cat([counts, metrics])
        self._sums.append(self.world.start_sum(counts_and_metrics))
        self.drop()
        sums: list[torch.Tensor | None] = [None] * len(gradients)
        for bucket in self.buckets:
            for member, part in zip(bucket.members, bucket.parts, strict=True):
                sums[member] = part
        if any(gradient is None for gradient in gradients):
            for member, count in enumerate(counts_and_metrics[: len(sums)].tolist()):
                # PowerSGD may still send errors of earlier gradients.
                if not count and (self.compression is None or not sums[member].any()):  # type: ignore[union-attr]
                    sums[member] = None
        return sums, counts_and_metrics[len(sums) :]

    @torch.no_grad()
    def _start_next(self, gradients: Sequence[torch.Tensor | None] | None = None) -> None:
        """Start the sum of the next bucket. `gradients`: its members' gradients. None: take the parameters' gradients.
        Signals are held back, so that _started_buckets counts every sum that was started."""
        with SIGNALS.held():
            bucket = self.buckets[self._started_buckets]
            bucket.fill(gradients or [self.parameters[member].grad for member in bucket.members])
            self._sums.append(self.world.start_sum(bucket.buffer))
            self._started_buckets += 1

    def _mark_final(self, bucket: int, member: int, _: torch.Tensor) -> None:
        """Note that the gradient of `member` is final, and start complete buckets in their order, except the last."""
        if not self._missing:
            return
        if bucket < self._started_buckets:
            raise ConfigError(
                f"run.gpus: the backward pass adds to the gradient of {self.names[member]} more than once, so its sum "
                "over the ranks cannot start beside the pass. Set run.gpus=1."
            )
        self._missing[bucket].discard(member)
        while self._started_buckets < len(self.buckets) - 1 and not self._missing[self._started_buckets]:
            self._start_next()


def weak_hook(method: Callable[..., None], *first: Any) -> Callable[[torch.Tensor], None]:
    """A hook on a parameter that calls `method(*first, tensor)` while the object of `method` exists. A hook lives as
    long as the model, and a strong reference would keep the buffers of an older object."""
    reference = weakref.WeakMethod(method)

    def hook(tensor: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            alive(*first, tensor)

    return hook


def _buckets(parameters: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device, size: int) -> list[Bucket]:
    """The parameters in buckets of about `size` bytes (0: one bucket), the last parameter in the first bucket."""
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
