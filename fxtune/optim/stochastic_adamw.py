"""AdamW that rounds to bfloat16 by chance, so that updates too small for a bfloat16 weight still add up.

A bfloat16 has 8 bits of mantissa: added to a weight of 1, anything below 1/512 is gone, and a fine-tuning update is about the
learning rate, 1e-5. Here the update is done in float32 and the result is rounded up or down with probabilities that make its
mean exact, by adding 16 random bits below the ones that stay and cutting. A weight moves seldom, but by the right amount on
average (arXiv 2010.06192 trains whole models so). The moments are float32: in bfloat16 the second one, which changes by 1/1000
a step, would stand still as well.

Memory a weight: 2 bytes + 8 for the moments + 2 for the gradient, where float32 weights take 4 + 8 + 4. Nothing more has to be
saved: the random bits come from torch's generator of the device, which the trainer seeds anew in each step, so a resumed run
draws the same ones. On a GPU the update is compiled to one kernel a tensor, for any size; on a CPU the same lines run as they
are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

CUT = -(1 << 16)
"""The 16 bits of a float32 that bfloat16 keeps, as a mask."""


def round_by_chance(values: torch.Tensor) -> torch.Tensor:
    """bfloat16 neighbours of `values` (float32, any shape): the mean over the draws is `values`; what fits stays as it is."""
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device)
    return ((values.view(torch.int32) + noise) & CUT).view(torch.float32).to(torch.bfloat16)


def update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    lr: torch.Tensor,
    kept: torch.Tensor,
    finite: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One AdamW step (arXiv 1711.05101) in place, or none where `finite` is false. `kept` is 1 - lr x weight decay.

    weight: bfloat16 or float32; first, second: float32 of its shape; step, lr, kept, finite: scalars on the same device, so
    that nothing waits and nothing compiles anew when they change. `step` counts this step already.
    """
    fine = gradient.float()
    mean = torch.lerp(first, fine, 1 - beta1)
    square = second * beta2 + fine * fine * (1 - beta2)
    denominator = (square / (1 - beta2**step)).sqrt() + eps
    moved = weight.float() * kept - lr / (1 - beta1**step) * mean / denominator
    rounded = round_by_chance(moved) if weight.dtype is torch.bfloat16 else moved
    weight.copy_(torch.where(finite, rounded, weight))
    first.copy_(torch.where(finite, mean, first))
    second.copy_(torch.where(finite, square, second))


COMPILING = {"specialize_float": True, "recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
"""Options of the compiler while update() is called. With dynamic=True it would take betas and eps as tensors, made anew on the
host in each call and copied to the device, for which the host waits: they are constants. A graph a dtype and a number of
dimensions, whatever the sizes, is few, but more than torch's limits may let pass."""


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(update, dynamic=True, fullgraph=True)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW over bfloat16 weights (and float32 ones, which need no rounding). Used as torch's fused one is: `found_inf`, a
    float scalar on the device, is set before step(); where it is not 0, neither weights nor moments nor counters change.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True))
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not given:
                continue
            device = given[0].device
            finite = torch.ones((), dtype=torch.bool, device=device) if self.found_inf is None else self.found_inf == 0
            # Filled on the device: a copy from the host would be one more thing to wait for.
            lr, kept = (
                torch.full((), number, dtype=torch.float32, device=device)
                for number in (group["lr"], 1 - group["lr"] * group["weight_decay"])
            )
            for parameter in given:
                if not self.state[parameter]:
                    self.state[parameter].update(
                        step=torch.zeros((), device=device),
                        exp_avg=torch.zeros_like(parameter, dtype=torch.float32),
                        exp_avg_sq=torch.zeros_like(parameter, dtype=torch.float32),
                    )
            torch._foreach_add_([self.state[parameter]["step"] for parameter in given], [finite.float()] * len(given))
            act: Callable[..., None] = _compiled() if device.type == "cuda" else update
            with torch._dynamo.config.patch(COMPILING) if device.type == "cuda" else nullcontext():
                for parameter in given:
                    mine = self.state[parameter]
                    act(
                        parameter.detach(),
                        parameter.grad,
                        mine["exp_avg"],
                        mine["exp_avg_sq"],
                        mine["step"],
                        lr,
                        kept,
                        finite,
                        *group["betas"],
                        group["eps"],
                    )
