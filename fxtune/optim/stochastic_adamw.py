"""AdamW with stochastic rounding to bfloat16. Updates that are too small for a bfloat16 weight still add up.

A bfloat16 has 8 significant bits. Rounding to nearest loses updates below 1/512 of a weight, and may lose updates
below 1/256. A fine-tuning update has about the size of the learning rate, such as 1e-5. Here the update is computed in
float32, 16 random bits are added below the bits that stay, and the sum is truncated. So a weight changes rarely, but
by the right amount on average (arXiv 2010.06192). The moments are float32 or bfloat16. Moments in bfloat16 are rounded
stochastically, too. A second moment changes by 1/1000 in a step, and rounding to nearest would lose this change.

Memory per weight: 2 bytes + 8 for the moments (4 in bfloat16) + 2 for the gradient; float32 weights take 4 + 8 + 4.
The random bits are a hash of a number's place in its tensor, the tensor's name and the step's seed. So a resumed run
has the same bits, and an update takes as long as its memory traffic. (Bits of torch's generator took twice as long.)
On a GPU the update is compiled: each tensor, of any size, takes one kernel. On a CPU the update runs eagerly."""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from fxtune.upstream import torch as upstream

BFLOAT16_BITS = -(1 << 16)
"""Mask of the 16 bits of a float32 that bfloat16 keeps."""


GOLDEN = 0x9E3779B1 - (1 << 32)
"""An odd number near 2^32 / 1.618, which takes neighbouring places far apart (Knuth, TAOCP 3, 6.4)."""


def random_bits(like: torch.Tensor, key: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield three int32 tensors of the shape of `like`, evenly distributed in 0 to 65,535. Each two of them are
    independent. `key`: an int32 scalar on the device of `like`; another key gives other bits."""
    place = torch.arange(like.numel(), device=like.device).to(torch.int32).view(like.shape)
    bits = _hash(place * GOLDEN + key)
    yield bits & 0xFFFF
    yield (bits >> 16) & 0xFFFF
    yield (bits * GOLDEN >> 16) & 0xFFFF


def _hash(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 (Wellons 2018, hash-prospector): each bit of an int32 flips half of the bits of the result."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x ^ ((x >> shift) & (1 << 32 - shift) - 1)) * factor
    return x ^ ((x >> 16) & 0xFFFF)


def stochastic_round(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round `values` (float32, any shape) to a bfloat16 neighbour at random, so that the mean is exact. `noise`: int32
    of the same shape, evenly distributed in 0 to 65,535."""
    return ((values.view(torch.int32) + noise) & BFLOAT16_BITS).view(torch.float32).to(torch.bfloat16)


def update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    rate: torch.Tensor,
    second_factor: torch.Tensor,
    decay: torch.Tensor,
    scale: torch.Tensor,
    finite: torch.Tensor,
    key: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One AdamW step (arXiv 1711.05101) in place, or none if `finite` is false.

    `weight` and its moments `first` and `second` have one shape; each is bfloat16 or float32. The other tensors are
    scalars on the same device, so that a new value causes no host sync and no recompilation. In step t, `rate` is
    lr / (1 - beta1^t), `second_factor` 1 / (1 - beta2^t) and `decay` 1 - lr x weight decay. The gradient is multiplied
    by `scale`. `key`: see random_bits().
    """
    fine = gradient.float() * scale
    mean = torch.lerp(first.float(), fine, 1 - beta1)
    square = second.float() * beta2 + fine * fine * (1 - beta2)
    moved = weight.float() * decay - rate * mean / ((square * second_factor).sqrt() + eps)
    noises = random_bits(weight, key) if weight.dtype is torch.bfloat16 else (None, None, None)
    for old, new, noise in zip((weight, first, second), (moved, mean, square), noises, strict=True):
        if noise is not None and old.dtype is torch.bfloat16:
            new = stochastic_round(new, noise)
        old.copy_(torch.where(finite, new, old))


COMPILING = {"specialize_float": True, "recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
"""Compiler options for update(). Without `specialize_float`, each call would copy betas and eps from the host. Each
dtype and number of dimensions has a graph, and these graphs may be more than torch's recompile limits allow."""


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(update, dynamic=True, fullgraph=True)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW for bfloat16 weights; float32 weights are not rounded. `names`: a name for each weight, so that its random
    bits do not depend on other weights. `moments`: the dtype of the moments of bfloat16 weights; float32 weights have
    float32 moments.

    Before step() the caller may set scalars on the device: `found_inf`, as for torch's fused AdamW (if it is not 0, no
    weight, moment or counter changes), and `gradient_scale`, a factor for the gradients of one step. `seed`: the seed
    of the step's random bits.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        names: Mapping[torch.Tensor, str],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: torch.dtype = torch.float32,
    ):
        self.moments, self.names, self.seed = moments, names, 0
        self.name_hashes: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True))
        self.found_inf: torch.Tensor | None = None
        self.gradient_scale: torch.Tensor | None = None

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
            scale = torch.ones((), device=device) if self.gradient_scale is None else self.gradient_scale
            # Filled on the device: a copy from the host would be a sync.
            decay = torch.full((), 1 - group["lr"] * group["weight_decay"], dtype=torch.float32, device=device)
            for parameter in parameters:
                if not self.state[parameter]:
                    dtype = self.moments_of(parameter)
                    self.state[parameter].update(
                        step=torch.zeros((), device=device),
                        exp_avg=torch.zeros_like(parameter, dtype=dtype),
                        exp_avg_sq=torch.zeros_like(parameter, dtype=dtype),
                    )
                if parameter not in self.name_hashes:
                    name_hash = zlib.crc32(self.names[parameter].encode()) >> 1
                    self.name_hashes[parameter] = torch.full((), name_hash, dtype=torch.int32, device=device)
            steps = [self.state[parameter]["step"] for parameter in parameters]
            upstream.foreach("add_", steps, [finite.float()] * len(parameters))
            counts = torch.stack(steps)
            (beta1, beta2), eps = group["betas"], group["eps"]
            rates, second_factors = group["lr"] / (1 - beta1**counts), 1 / (1 - beta2**counts)
            keys = _hash(
                torch.stack([self.name_hashes[parameter] for parameter in parameters]) ^ self.seed % (1 << 31)
            )
            run_update: Callable[..., None] = _compiled() if device.type == "cuda" else update
            with upstream.compiling_with(**COMPILING) if device.type == "cuda" else nullcontext():
                for parameter, rate, second_factor, key in zip(parameters, rates, second_factors, keys, strict=True):
                    state = self.state[parameter]
                    run_update(
                        parameter.detach(),
                        parameter.grad,
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        rate,
                        second_factor,
                        decay,
                        scale,
                        finite,
                        key,
                        beta1,
                        beta2,
                        eps,
                    )
        self.gradient_scale = None
