"""PowerSGD (arXiv 1905.13727): sends two thin matrices in place of each gradient matrix, for slow links.

A gradient of [n, m] is approximated by P Q^T of rank r, so (n + m) r numbers are sent in place of n m: 1/512 for a
matrix of 4,096 x 4,096 at rank 4. The error of the approximation on a rank is added to the rank's next gradient (error
feedback). The gradient is therefore late and biased, and the loss falls more slowly. The gradients of the first
`start` steps are summed whole, because errors at the beginning of a run cost the most.

The arithmetic is torch's hook (torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook), which calls four methods of
a DistributedDataParallel bucket; _TorchBucket has these methods for a Bucket of gradients.py. The hook calls
collectives from callbacks. With several buckets at once the order of callbacks would differ from rank to rank, so
buckets are sent one by one, after the backward pass. The hook's result is the mean over N ranks, so its input is N
times the gradient.

Vectors, and matrices that would not shrink to half, are summed whole in float32. Memory: three times the gradients in
float32 (the bucket, the error, a copy for computing the error), and until the update the old error (keep()).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from fxtune.distributed.world import World
from fxtune.errors import ConfigError

RANK, START = 4, 10
EPSILON = 1e-8
"""Added to the norms of columns. The hook divides by the norms, and some are zero."""


class PowerSGD:
    """Sums buckets by PowerSGD of rank `rank` from step `start` on, and keeps their errors. After each step the caller
    says by keep() whether the step counts."""

    def __init__(self, world: World, rank: int = RANK, start: int = START) -> None:
        """Raises ConfigError for a run on a CPU where torch sees a GPU: torch's hook would wait for the GPU."""
        if world.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError(
                "parallel.compression=powersgd cannot run with run.device=cpu where torch sees a GPU. Hide the GPUs "
                "(CUDA_VISIBLE_DEVICES=), use them, or set parallel.compression=none."
            )
        self.world = world
        self.hook_state = PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=start, orthogonalization_epsilon=EPSILON
        )
        self._before: dict[str, dict[int, torch.Tensor]] = {}
        """The state before this step's compression."""

    def __call__(self, number: int, buffer: torch.Tensor, parts: list[torch.Tensor], last: bool) -> None:
        """Replace `buffer`, float32 [numbers], by its sum over the ranks. `parts`: the gradients, views of the buffer.
        `last`: this is the last buffer of the step."""
        if number == 0:
            self._before = {"error": dict(self.hook_state.error_dict), "q": _copies(self.hook_state.q_memory_dict)}
        buffer.mul_(self.world.size)
        bucket: Any = _TorchBucket(number, buffer, parts, last)
        result = powerSGD_hook(self.hook_state, bucket).wait()
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result)

    def keep(self, counts: torch.Tensor) -> None:
        """Undo this step's change of the state unless `counts`, a bool scalar on the device. A non-finite gradient
        that stays in the state would make every later step non-finite."""
        for name, before in self._before.items():
            now = self.hook_state.error_dict if name == "error" else self.hook_state.q_memory_dict
            for number, tensor in now.items():
                was = before.get(number)
                if was is None:  # made in the first compressed step; before that the error was zero, and Q random
                    draw = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                    was = torch.zeros_like(tensor) if name == "error" else draw.to(tensor)
                tensor.copy_(torch.where(counts, tensor, was))
        self._before = {}

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, by name: this rank's error, P and Q of each bucket, and the count of steps."""
        tensors_by_name = {"steps": torch.tensor(self.hook_state.iter)}
        for name, tensors in self._memories().items():
            tensors_by_name |= {f"{name}/{number}": tensor for number, tensor in tensors.items()}
        return tensors_by_name

    def load(self, ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Restore what state() returned on each rank, by rank. If the number of ranks has changed, each rank takes the
        mean of the errors, so that the same error is added to the next sum."""
        if len(ranks) == self.world.size:
            mine = ranks[self.world.rank]
        else:
            errors = {name for name in ranks[0] if name.startswith("error/")}
            means = {name: torch.stack([state[name] for state in ranks]).mean(0) for name in errors}
            mine = {**ranks[0], **means}
        self.hook_state.iter = int(mine["steps"])
        for name, tensors in self._memories().items():
            tensors.clear()
            for key, tensor in mine.items():
                if key.startswith(f"{name}/"):
                    tensors[int(key.partition("/")[2])] = tensor.to(self.world.device)

    def _memories(self) -> dict[str, dict[int, torch.Tensor]]:
        state = self.hook_state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}


@dataclass
class _TorchBucket:
    """A bucket as torch's hook reads it: the interface of torch.distributed.GradBucket, which only C++ can make."""

    number: int
    flat: torch.Tensor
    parts: list[torch.Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [part if part.dim() else part.view(1) for part in self.parts]

    def is_last(self) -> bool:
        return self.last


def _copies(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
