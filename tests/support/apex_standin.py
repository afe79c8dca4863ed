"""A small package with the names and signatures of NVIDIA's Apex that fxtune uses, for machines that cannot build
Apex.

It follows Apex's public interface and computes with plain torch. It shows that fxtune calls Apex correctly and keeps
its state. It does not test Apex's kernels.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import nn


class FusedAdam(torch.optim.Optimizer):
    """As in Apex, moments are float32 for every weight dtype, and the parameter group counts the steps."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        assert adam_w_mode
        assert not amsgrad
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), step = group["betas"], group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p).float()
                    state["exp_avg_sq"] = torch.zeros_like(p).float()
                state["exp_avg"].lerp_(p.grad.float(), 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad.float(), p.grad.float(), value=1 - beta2)
                denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
                change = state["exp_avg"] / (1 - beta1**step) / denominator + group["weight_decay"] * p.float()
                p.copy_(p.float() - group["lr"] * change)


class FusedRMSNorm(nn.Module):
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = x.float()
        scaled = fine * torch.rsqrt(fine.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.float()).to(x.dtype)


class FusedLayerNorm(nn.Module):
    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def install(monkeypatch: Any) -> None:
    """Make `import apex` and `import amp_C` find these classes until the test ends."""
    parts = {
        "apex": {},
        "amp_C": {},
        "fused_layer_norm_cuda": {},
        "apex.optimizers": {"FusedAdam": FusedAdam},
        "apex.normalization": {"FusedRMSNorm": FusedRMSNorm, "FusedLayerNorm": FusedLayerNorm},
    }
    for name, members in parts.items():
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for one in (FusedAdam, FusedRMSNorm, FusedLayerNorm):
        home = "apex.optimizers" if one is FusedAdam else "apex.normalization"
        monkeypatch.setattr(one, "__module__", home)
