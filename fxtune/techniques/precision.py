"""Autocast, loss scaling, TF32 and the cuDNN autotuner: the dtype of matmuls, independent of the dtype of the weights.

autocast=bfloat16 runs matmuls in bfloat16, and norms, softmax and the loss in float32. Over float32 weights this is
mixed-precision training. Over a frozen bfloat16 base, autocast moves the float32 adapters' matmuls onto the tensor
cores.

float16 has 10 bits of mantissa, bfloat16 has 7. But gradients below 6e-8, float16's smallest number, vanish. So the
loss is multiplied by a scale before the backward pass, and the gradients are divided by this scale after the pass
(arXiv 1710.03740). A step whose gradient overflows is skipped and halves the scale. 2,000 good steps in a row double
the scale. The scale is a power of two, so scaling rounds nothing. It stays on the device, so no step waits for it.

With TF32, matmuls of float32 numbers round their inputs to 10 bits of mantissa. They are several times faster. torch
leaves TF32 off by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.facts.options import Autocast, PrecisionOptions
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import base_dtype, decoder_layers, observing, outputs
from fxtune.system.process.profiler import OperatorCounter
from fxtune.techniques.base import Evidence, Technique
from fxtune.upstream import torch as upstream

VOLTA, AMPERE = (7, 0), (8, 0)
FIRST_SCALE = 2.0**16
"""The loss scale at the start of a run. If it is too large, each halving costs one skipped step."""
GROWTH_INTERVAL = 2000
"""The loss scale doubles after this number of good steps in a row."""
LARGEST_SCALE = 2.0**100
"""The largest loss scale. Twice this number is still a finite float32."""
_LINEAR = re.compile(r"(?:^|_)(?:add)?mm$|linear$|matmul$|^gemm|lora_mlp$")
"""Names of operators that multiply activations by a weight: aten's mm and addmm, and fused operators of libraries."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass
class Precision(PrecisionOptions, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        capability, on_gpu = facts.capability or AMPERE, facts.device == "cuda"
        card = f"{facts.device_name} (compute capability {capability[0]}.{capability[1]})"
        if on_gpu and capability < AMPERE:
            if self.autocast is Autocast.bfloat16:
                yield f"autocast: {card} has no bfloat16 units. Use float16, with model.dtype=float32."
            if facts.dtype == "bfloat16":
                yield f"autocast: {card} has no bfloat16 units for the weights either. Set model.dtype=float32."
            if self.tf32:
                yield f"tf32: {card} has no TF32 units; Ampere (8.0) and newer have. Set it to false or null."
            if capability < VOLTA and self.autocast is Autocast.float16:
                yield f"autocast: {card} has no fast float16 units; Volta (7.0) and newer have. Use none."
        if self.tf32 and not on_gpu:
            yield "tf32: a feature of NVIDIA cards, and this run is on a CPU. Set it to false or null."
        if self.cudnn_benchmark and not on_gpu:
            yield "cudnn_benchmark: cuDNN needs a GPU, and this run is on a CPU. Set it to false."
        if self.cudnn_benchmark and facts.deterministic:
            yield (
                "cudnn_benchmark: it picks algorithms by time, so two runs may compute differently. Set it or "
                "run.deterministic to false."
            )
        if {self.autocast.value, facts.dtype} == {"bfloat16", "float16"}:
            yield (
                f"autocast: {self.autocast.value} over {facts.dtype} weights loses range and precision. Use none, or "
                "another model.dtype."
            )

    def resolve(self, facts: Facts) -> str | None:
        if self.tf32 is not None:
            return None
        self.tf32 = facts.device == "cuda" and (facts.capability or (0, 0)) >= AMPERE
        return "tf32 on, this card has it" if self.tf32 else None

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context manager for a forward pass. The backward pass runs outside of it."""
        if not self.casts:
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.autocast.value))

    def loss_scale(self, dtype: str, device: torch.device) -> LossScale:
        """The loss scale of a run whose weights have `dtype`. Without float16 it stays 1."""
        active = dtype == "float16" or (self.enabled and self.autocast is Autocast.float16)
        return LossScale(device, FIRST_SCALE if active else 1.0, GROWTH_INTERVAL, active)

    def apply(self, model: PreparedModel, world: World) -> None:
        # On a CPU the switch stays as it is: there it would let oneDNN round inputs, too.
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            torch.backends.cudnn.benchmark = self.cudnn_benchmark

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Count the matmuls of a forward pass by dtype, and test whether a product shows TF32's rounding."""
        device = next(model.module.parameters()).device
        weights = base_dtype(model.module)
        counter = OperatorCounter(_matmul_dtype)
        with observing(model.module), self.context(device), counter:
            outputs(model.module, **probe)
        expected = weights if self.autocast is Autocast.none else getattr(torch, self.autocast.value)
        counted = ", ".join(f"{count} in {_name(dtype)}" for dtype, count in counter.counts.most_common())
        # One matmul per layer in the expected dtype is enough: float32 adapters and routers may run in another one.
        yield Evidence(
            "precision",
            f"autocast {self.autocast.value} over {_name(weights)} weights",
            f"matmuls of a forward pass: {counted or 'none'}",
            counter.counts[expected] >= len(decoder_layers(model.module)),
        )
        if device.type != "cuda":
            return
        if torch.cuda.get_device_capability(device) >= AMPERE:
            # TF32 has 10 bits of mantissa and loses the 12th. float32 has 23 bits.
            fine = torch.full((256, 256), 1 + 2.0**-12, device=device)
            with torch.autocast(device.type, enabled=False):
                rounded = bool((fine @ torch.eye(256, device=device) == 1).all())
            seen = f"a float32 matmul {'rounds' if rounded else 'keeps'} the 12th bit of its inputs"
            yield Evidence("precision", f"TF32 {'on' if self.tf32 else 'off'}", seen, rounded == bool(self.tf32))
        if self.cudnn_benchmark:
            convolutions = sum(isinstance(module, CONVOLUTIONS) for module in model.module.modules())
            active = torch.backends.cudnn.benchmark
            seen = f"cudnn.benchmark is {active}, for {convolutions} convolutions"
            yield Evidence("precision", "the cuDNN autotuner on", seen, active and convolutions > 0)


class LossScale:
    """The scale of the loss in the backward pass. Its tensors stay on the device, so the host never waits for them.

    The scale follows the rule of torch.amp.GradScaler: it is halved after a bad step and doubled after `interval` good
    steps in a row.
    """

    def __init__(
        self, device: torch.device, initial: float = 1.0, interval: int = GROWTH_INTERVAL, active: bool = False
    ):
        self.active, self.interval = active, interval
        self.scale = torch.full((), initial, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        """The number of good steps since the scale last changed."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale if self.active else loss

    @torch.no_grad()
    def unscale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide the gradients of `parameters` by the scale."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.active and gradients:
            upstream.foreach("mul_", gradients, self.scale.reciprocal())

    def update(self, finite: torch.Tensor) -> None:
        """Count a step. `finite`: whether the step's loss and gradient were finite, a bool scalar on the device."""
        if not self.active:
            return
        good = torch.where(finite, self.good + 1, 0)
        grows = good >= self.interval
        grown = torch.where(grows, (self.scale * 2).clamp(max=LARGEST_SCALE), self.scale)
        self.scale = torch.where(finite, grown, self.scale / 2)
        self.good = torch.where(grows, 0, good).to(torch.int32)

    def state(self) -> dict[str, float]:
        """The state that a resumed run needs; empty without float16. This call waits for the device."""
        return {"scale": self.scale.item(), "good": self.good.item()} if self.active else {}

    def load(self, state: dict[str, float]) -> None:
        """Restore the scale and the counter that state() returned."""
        if self.active and state:
            self.scale.fill_(state["scale"])
            self.good.fill_(state["good"])


def _matmul_dtype(name: str, args: tuple[Any, ...]) -> torch.dtype | None:
    """The dtype of the activations, if the operator `name` multiplies them by a weight; else None."""
    name = name.rpartition(".")[2]
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    return tensors["addmm" in name].dtype if _LINEAR.search(name) else None  # addmm's first tensor is the bias


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
