"""NVIDIA Apex's norms, FusedLayerNorm and FusedRMSNorm, for users who have Apex. Each is one CUDA C++ kernel.

In eager torch a norm is six kernels that each read and write all hidden states. Apex, Liger and torch.compile each
make it one kernel, so these three techniques exclude each other. Apex is not on PyPI (`apex` there is another
project): it is built from github.com/NVIDIA/apex, or comes with NVIDIA's PyTorch containers. Apex's optimizer is
`optimizer.name=apex_adamw`.

A norm is replaced if Apex computes the same function: torch's own norms, and norms like Llama's, which multiply by
their weight and have `variance_epsilon`. Each replacement is compared with the original norm on random rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.facts.options import ApexOptions
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import base_dtype
from fxtune.system.machine.facts import APEX
from fxtune.techniques.base import Evidence, Technique

CLOSE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative difference between the outputs of Apex's norm and of the original norm. Other dtypes have 1e-5."""


@dataclass
class Apex(ApexOptions, Technique):
    def __post_init__(self) -> None:
        self._errors: list[float] = []

    def check(self, facts: Facts) -> Iterator[str]:
        if why := facts.apex_refusal():
            yield f"enabled: {why}, or set it to false."
        for other, why in (
            ("liger", "Liger's kernels replace the same norms"),
            ("compile", "torch.compile fuses norms itself, and cannot trace Apex's"),
        ):
            if getattr(facts.techniques, other).enabled:
                yield f"enabled: {why}. Set it to false, or techniques.{other}.enabled."
        precision = facts.techniques.precision
        if precision.casts:
            yield (
                f"enabled: Apex's norms would compute in {precision.autocast.value} under autocast, where torch's "
                "stay in float32. Set techniques.precision.autocast=none, or this to false."
            )

    def packages(self, facts: Facts) -> Iterator[str]:
        yield APEX

    def apply(self, model: PreparedModel, world: World) -> None:
        from apex.normalization import FusedLayerNorm, FusedRMSNorm

        self._errors.clear()  # an earlier model may have left its errors
        for parent in list(model.module.modules()):
            for name, norm in list(parent.named_children()):
                is_layer_norm = type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None
                if is_layer_norm:
                    fused = FusedLayerNorm(norm.normalized_shape, eps=norm.eps)
                    fused.bias = norm.bias
                elif (eps := _rms_epsilon(norm)) is not None:
                    weight: Any = norm.weight
                    fused = FusedRMSNorm(tuple(weight.shape), eps=eps)
                else:
                    continue
                fused.weight = norm.weight
                self._errors.append(_difference(fused, norm))
                setattr(parent, name, fused.train(norm.training))

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        fused = [module for module in model.module.modules() if type(module).__module__.startswith("apex.")]
        largest = max(self._errors, default=0.0)
        yield Evidence(
            "apex",
            "norms by Apex's kernels, with the original outputs",
            f"{len(fused)} norms are Apex's, with outputs at most {largest:.1e} from the original",
            bool(fused) and len(fused) == len(self._errors) and largest <= CLOSE.get(base_dtype(model.module), 1e-5),
        )


def _rms_epsilon(norm: nn.Module) -> float | None:
    """The epsilon of `norm` if it is an RMSNorm that Apex computes in the same way; else None."""
    if isinstance(norm, nn.RMSNorm) and norm.weight is not None:
        return norm.eps if norm.eps is not None else torch.finfo(norm.weight.dtype).eps
    is_llamas = type(norm).__name__.endswith("RMSNorm") and [name for name, _ in norm.named_parameters()] == ["weight"]
    return getattr(norm, "variance_epsilon", None) if is_llamas else None


@torch.no_grad()
def _difference(fused: nn.Module, norm: nn.Module) -> float:
    """The relative difference between the outputs of `fused` and `norm` on random rows."""
    weight: Any = norm.weight
    with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
        torch.manual_seed(0)
        rows = 3 * torch.randn(16, weight.shape[-1], device=weight.device, dtype=weight.dtype)
    expected, actual = norm(rows).double(), fused(rows).double()
    return ((actual - expected).norm() / expected.norm()).item()
