"""Adds up the gradients of replicas: every rank holds the whole model and has seen other rows of the same step.

The sum is taken once an optimizer step, after the last micro-batch, in one flat float32 buffer: 168 MB for rank-16
adapters of 8B take 0.6 ms over NVLink, of a step of 930 ms. Nothing is sent at earlier micro-batches. Losses and
metrics travel in the same buffer. All ranks get the same bits, so clipping, the skipping of non-finite steps and the
update need no further agreement: they come out the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxtune.distributed.world import World


class GradientSum:
    """Sums the gradients of `parameters` over the ranks of `world`. Holds a float32 buffer as large as they are."""

    def __init__(self, world: World, parameters: Sequence[torch.Tensor], metrics: int) -> None:
        """`metrics`: how many numbers travel with the gradients."""
        self.world = world
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer = torch.empty(sum(sizes) + len(sizes) + metrics, dtype=torch.float32, device=world.device)
        *sums, self.reached, self.metrics = self.buffer.split([*sizes, len(sizes), metrics])
        """`reached`: how many ranks have a gradient of each parameter."""
        self.sums = [part.view(parameter.shape) for part, parameter in zip(sums, parameters, strict=True)]

    @torch.no_grad()
    def __call__(
        self, gradients: Sequence[torch.Tensor | None], metrics: torch.Tensor
    ) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """The sums over the ranks of each gradient and of `metrics`, float32 [metrics]. The next call overwrites them.

        None is a gradient that this rank does not have. Its sum is None if no rank has it, as in one process: an
        expert that got no token. Only then does the host wait for the device.
        """
        found = [(part, gradient) for part, gradient in zip(self.sums, gradients, strict=True) if gradient is not None]
        self.reached.fill_(1.0)
        if len(found) < len(self.sums):
            self.buffer.zero_()
            self.reached.copy_(torch.tensor([float(gradient is not None) for gradient in gradients]))
        if found:
            torch._foreach_copy_([part for part, _ in found], [gradient for _, gradient in found])
        self.metrics.copy_(metrics)
        self.world.sum(self.buffer, "adding up gradients")
        sums: list[torch.Tensor | None] = list(self.sums)
        if len(found) < len(sums):
            for index, count in enumerate(self.reached.tolist()):
                sums[index] = sums[index] if count else None
        return sums, self.metrics.clone()
