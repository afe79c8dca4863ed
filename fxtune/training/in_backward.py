"""Takes the optimizer's step in the backward pass: a weight is updated when its gradient is complete, and the gradient
is freed. So only the gradients of one layer, or of the head, exist at a time. An 8B model in bfloat16 needs 15 GB
less.

Autograd calls a hook on each weight once per backward pass, after the pass has last added to its gradient and last
read the weight. The hook makes the weight's part of the optimizer take its step. The arithmetic and the random bits of
a weight do not depend on other weights, so the updated weights equal those of an ordinary step bit by bit.

Options that need all gradients before the first update are refused: clipping by the global norm, sums over
micro-batches and over ranks, a loss scale. The loss is known before the backward pass, so a step whose loss is not
finite, or a skipped spike, updates nothing. If the loss is finite and the gradient of a weight is not, this weight and
all later weights are not updated. Earlier weights were already updated with finite gradients. The step counts as not
finite.

An error during the pass leaves some weights updated and others not (`torn`). The run then saves nothing and later
resumes from its last checkpoint. Signals wait for the end of the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxtune.distributed.gradients import weak_hook
from fxtune.errors import ConfigError
from fxtune.models.structure import hooked, outputs, without_dropout
from fxtune.optim.optimizer import Optimizer
from fxtune.techniques.base import Evidence


class InBackward:
    """Updates the weights of `optimizer` in the backward pass that follows begin(). `optimizer`: has one part for each
    weight."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parts = {part.param_groups[0]["params"][0]: part for part in optimizer.parts}
        self.norms: dict[torch.Tensor, torch.Tensor] = {}
        """The norm of each weight's gradient in this step, scalars on the device."""
        self.torn = False
        """Whether some weights are updated and others may not be."""
        self.armed = False
        """Whether the backward pass of this step updates the weights or has updated them."""
        self._lr, self._seed = 0.0, 0
        self._updates = torch.ones((), dtype=torch.bool)
        for weight in self.parts:
            weight.register_post_accumulate_grad_hook(weak_hook(self._arrived))

    def begin(self, lr: float, updates: torch.Tensor, seed: int) -> None:
        """Make the next backward pass take a whole step at rate `lr`. `updates`: whether the step changes weights, a
        bool on the device; `seed`: for stochastic rounding."""
        assert not self.armed, "a step has one backward pass"
        self._lr, self._updates, self._seed, self.armed = lr, updates, seed, True
        self.norms.clear()

    def norm(self) -> torch.Tensor:
        """The norm of the whole gradient, a scalar on the device."""
        reached = [self.norms[weight] for weight in self.optimizer.names if weight in self.norms]
        return torch.linalg.vector_norm(torch.stack(reached)) if reached else torch.zeros_like(self._updates.float())

    def end(self) -> None:
        """End the step. Call this when all weights have taken the step, or when the step is dropped before any weight
        has."""
        self.armed = self.torn = False

    def _arrived(self, weight: torch.Tensor) -> None:
        """Update `weight` and free its gradient, which is complete."""
        if not self.armed:
            return
        if weight in self.norms:
            raise ConfigError(
                f"optimizer.in_backward: the backward pass adds to the gradient of {self.optimizer.names[weight]} "
                "more than once, so it is not whole when the weight is updated. Set it to off."
            )
        assert weight.grad is not None
        self.norms[weight] = norm = torch.nn.utils.get_total_norm([weight.grad], foreach=True)
        self._updates = self._updates & torch.isfinite(norm)
        self.torn = True
        self.optimizer.update(self.parts[weight], self._lr, self._updates, self._seed)
        weight.grad = None


def observe(model: nn.Module, probe: dict[str, Any]) -> Evidence:
    """Run a small backward pass, free each gradient when it is complete, and count how many gradients exist at
    once."""
    weights: list[torch.Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
    most, arrived = 0, dict.fromkeys(weights, 0)

    def count(weight: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(other.grad is not None for other in weights))
        arrived[weight] += 1
        weight.grad = None

    hooks = hooked(weight.register_post_accumulate_grad_hook(count) for weight in weights)
    with hooks, without_dropout(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        outputs(model, **probe).float().square().mean().backward()
    again = sum(times > 1 for times in arrived.values())
    seen = f"at most {most} of {sum(map(bool, arrived.values()))} gradients exist at once" + (
        f"; {again} are added up in several parts" if again else ""
    )
    return Evidence("optimizer.in_backward", "gradients freed one by one", seen, not again and most < len(weights))
