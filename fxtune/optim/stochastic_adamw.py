"""AdamW with stochastic rounding to bfloat16. Updates that are too small for a bfloat16 weight still add up.

A bfloat16 has 8 significant bits. Rounding to nearest loses updates below 1/512 of a weight, and may lose updates
below 1/256. A fine-tuning update has about the size of the learning rate, such as 1e-5. Here the update is computed in
float32, 16 random bits are added below the bits that stay, and the sum is truncated. So a weight changes rarely, but
by the right amount on average (arXiv 2010.06192). The moments are float32 or bfloat16. Moments in bfloat16 are rounded
stochastically, too. A second moment changes by 1/1000 in a step, and rounding to nearest would lose this change.

Memory per weight: 2 bytes + 8 for the moments (4 in bfloat16) + 2 for the gradient; float32 weights take 4 + 8 + 4.
The random bits come from torch's generator of the device. The caller seeds it for each weight and step, so a resumed
run draws the same bits. On a GPU the update is compiled: each tensor, of any size, takes one kernel. On a CPU the
update runs eagerly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from fxtune.upstream import torch as upstream

BFLOAT16_BITS = -(1 << 16)
"""Mask of the 16 bits of a float32 that bfloat16 keeps."""


def stochastic_round(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round `values` (float32, any shape) to a bfloat16 neighbour at random, so that the mean is exact. `noise`: int32
    of the same shape, evenly distributed in 0 to 65,535."""
    return ((values.view(torch.int32) + noise) & BFLOAT16_BITS).view(torch.float32).to(torch.bfloat16)


def update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    step: torch.Tensor,
    lr: torch.Tensor,
    decay: torch.Tensor,
    finite: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One AdamW step (arXiv 1711.05101) in place, or none if `finite` is false. `decay` is 1 - lr x weight decay.

    `weight` and its moments `first` and `second` have one shape; each is bfloat16 or float32. `step`, `lr`, `decay`
    and `finite` are scalars on the same device, so that a new value causes no host sync and no recompilation. `step`
    counts this step, too.
    """
    fine = gradient.float()
    mean = torch.lerp(first.float(), fine, 1 - beta1)
    square = second.float() * beta2 + fine * fine * (1 - beta2)
    denominator = (square / (1 - beta2**step)).sqrt() + eps
    moved = weight.float() * decay - lr / (1 - beta1**step) * mean / denominator
    if weight.dtype is torch.bfloat16:  # drawing is slow, so one draw of 48 bits serves three tensors
        bits = torch.randint(0, 1 << 48, weight.shape, dtype=torch.int64, device=weight.device)
    for place, (old, new) in enumerate(((weight, moved), (first, mean), (second, square))):
        if old.dtype is torch.bfloat16:
            new = stochastic_round(new, (bits >> 16 * place & 0xFFFF).to(torch.int32))
        old.copy_(torch.where(finite, new, old))


COMPILING = {"specialize_float": True, "recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
"""Compiler options for update(). Without `specialize_float`, each call would copy betas and eps from the host. Each
dtype and number of dimensions has a graph, and these graphs may be more than torch's recompile limits allow."""


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(update, dynamic=True, fullgraph=True)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights; float32 weights are not rounded. Before step() the caller sets `found_inf`, a float
    scalar on the device, as for torch's fused AdamW. If `found_inf` is not 0, no weight, moment or counter changes.
    `moments`: the dtype of the moments of bfloat16 weights; float32 weights have float32 moments."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: torch.dtype = torch.float32,
    ):
        self.moments = moments
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True))
        self.found_inf: torch.Tensor | None = None

    def moments_of(self, weight: torch.Tensor) -> torch.dtype:
        """The dtype of this weight's moments."""
        return self.moments if weight.dtype is torch.bfloat16 else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            device = parameters[0].device
            finite = torch.ones((), dtype=torch.bool, device=device) if self.found_inf is None else self.found_inf == 0
            # Filled on the device: a copy from the host would be a sync.
            lr, decay = (
                torch.full((), number, dtype=torch.float32, device=device)
                for number in (group["lr"], 1 - group["lr"] * group["weight_decay"])
            )
            for parameter in parameters:
                if not self.state[parameter]:
                    dtype = self.moments_of(parameter)
                    self.state[parameter].update(
                        step=torch.zeros((), device=device),
                        exp_avg=torch.zeros_like(parameter, dtype=dtype),
                        exp_avg_sq=torch.zeros_like(parameter, dtype=dtype),
                    )
            steps = [self.state[parameter]["step"] for parameter in parameters]
            upstream.foreach("add_", steps, [finite.float()] * len(parameters))
            run_update: Callable[..., None] = _compiled() if device.type == "cuda" else update
            with upstream.compiling_with(**COMPILING) if device.type == "cuda" else nullcontext():
                for parameter in parameters:
                    state = self.state[parameter]
                    run_update(
                        parameter.detach(),
                        parameter.grad,
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        state["step"],
                        lr,
                        decay,
                        finite,
                        *group["betas"],
                        group["eps"],
                    )
