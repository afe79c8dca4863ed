"""Autocast, loss scaling, TF32 and the cuDNN autotuner: what matmuls compute in, whatever dtype the weights have.

autocast=bfloat16 runs matmuls in bfloat16 and leaves norms, softmax and the loss in float32. Over float32 weights it is
mixed-precision training; over a frozen bfloat16 base it moves the float32 adapters' matmuls onto the fast units. No loss
scaling is needed: bfloat16 has float32's range.

float16 has 10 bits of mantissa to bfloat16's 7, and a smallest number of 6e-8: gradients below it vanish. So the loss is
multiplied by a scale before the backward pass and the gradients are divided by it after (Micikevicius et al. 2018, arXiv
1710.03740). The scale is found while training: a step whose gradient overflows is skipped and halves it, 2,000 good steps
in a row double it. It is a power of two, so that scaling rounds nothing, and lives on the device, so that no step waits.

TF32 keeps float32 storage and rounds matmul inputs to 10 bits of mantissa on the card: several times faster, and off in
torch unless asked for. The cuDNN autotuner times the algorithms of each convolution's first call.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxtune.distributed.world import World
from fxtune.models.structure import decoder_layers, observed
from fxtune.techniques.base import Evidence, Technique

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

VOLTA, AMPERE = (7, 0), (8, 0)
LARGEST_SCALE = 2.0**100
"""Twice this is still a float32."""
_LINEAR = re.compile(r"(?:^|_)(?:add)?mm$|linear$|matmul$|^gemm|lora_mlp$")
"""Operators that multiply activations by a weight: aten's mm and addmm, the fused ones of libraries."""


class Autocast(str, Enum):
    none = "none"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class Precision(Technique):
    enabled: bool = True
    autocast: Autocast = Autocast.none
    """Run matmuls in this dtype while the weights keep theirs. float16 comes with loss scaling."""
    initial_scale: float = field(default=65536.0, metadata={"above": 0})
    """Loss scale that float16 starts from; a power of two. Too large costs one skipped step for each halving."""
    scale_growth_interval: int = field(default=2000, metadata={"min": 1})
    """Double the loss scale after this many good steps in a row."""
    tf32: Optional[bool] = None
    """Let float32 matmuls round their inputs to TF32. Null: where the card has it (Ampere and newer)."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its algorithms for each new shape of a convolution. Other layers do not notice."""

    def check(self, facts: Facts) -> Iterator[str]:
        number = ".".join(map(str, facts.capability or ()))
        card = f"{facts.device_name} (compute capability {number})"
        older = facts.capability or AMPERE
        if facts.device == "cuda" and older < AMPERE:
            if self.autocast is Autocast.bfloat16:
                yield f"autocast: {card} has no bfloat16 units. Use float16, with model.dtype=float32."
            if facts.dtype == "bfloat16":
                yield f"autocast: {card} has no bfloat16 units for the weights either. Set model.dtype=float32."
            if self.tf32:
                yield f"tf32: {card} has no TF32 units, they came with Ampere (8.0). Set it to false or null."
        if facts.device == "cuda" and older < VOLTA and self.autocast is Autocast.float16:
            yield f"autocast: {card} has no fast float16 units, they came with Volta (7.0). Use none."
        if facts.device != "cuda" and self.tf32:
            yield "tf32: a feature of NVIDIA cards, and this run is on a CPU. Set it to false or null."
        if facts.device != "cuda" and self.cudnn_benchmark:
            yield "cudnn_benchmark: cuDNN needs a GPU, and this run is on a CPU. Set it to false."
        if self.cudnn_benchmark and facts.deterministic:
            yield (
                "cudnn_benchmark: it picks by the clock, so two runs may compute differently, and run.deterministic=true "
                "rules that out. Set one of them to false."
            )
        if {self.autocast.value, facts.dtype} == {"bfloat16", "float16"}:
            yield (
                f"autocast: {self.autocast.value} over {facts.dtype} weights loses the range of one and the precision of "
                "the other. Use none, or another model.dtype."
            )
        if not (self.initial_scale > 0 and math.frexp(self.initial_scale)[0] == 0.5):
            yield f"initial_scale: {self.initial_scale} must be a power of two, so that scaling rounds nothing."
        if "float16" not in (self.autocast.value, facts.dtype):
            for name in ("initial_scale", "scale_growth_interval"):
                if (value := getattr(self, name)) != getattr(Precision, name):
                    yield (
                        f"{name}: {value} is read where float16 is in play, and autocast is {self.autocast.value} over "
                        f"{facts.dtype} weights. Leave it out, or set autocast=float16."
                    )

    def resolve(self, facts: Facts) -> str | None:
        if self.tf32 is not None:
            return None
        self.tf32 = facts.device == "cuda" and (facts.capability or (0, 0)) >= AMPERE
        return "tf32 on, this card has it" if self.tf32 else None

    @property
    def casts(self) -> bool:
        """Whether matmuls run in another dtype than the weights'."""
        return self.enabled and self.autocast is not Autocast.none

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context that a forward pass (not its backward) runs in."""
        if not self.casts:
            return nullcontext()
        return torch.autocast(device.type, dtype=getattr(torch, self.autocast.value))

    def loss_scale(self, dtype: str, device: torch.device) -> LossScale:
        """The loss scale of a run whose weights have `dtype`: 1 for ever unless float16 is in play."""
        active = dtype == "float16" or (self.enabled and self.autocast is Autocast.float16)
        return LossScale(device, self.initial_scale if active else 1.0, self.scale_growth_interval, active)

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        # Not on a CPU, where the same switch lets oneDNN round inputs in ways that nobody asked for.
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            torch.backends.cudnn.benchmark = self.cudnn_benchmark
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Count the matmuls of one forward pass by the dtype of their inputs; see TF32's rounding in a product."""
        device = next(model.parameters()).device
        # Not packed ones, nor adapters, which have a dtype of their own.
        weights = next(
            parameter.dtype
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point() and "lora_" not in name
        )
        eager = torch.compiler.set_stance("force_eager")
        with observed(model), torch.no_grad(), eager, self.context(device), _Matmuls() as seen:
            model(**probe)
        wanted = weights if self.autocast is Autocast.none else getattr(torch, self.autocast.value)
        counted = ", ".join(f"{count} in {_name(dtype)}" for dtype, count in seen.counts.most_common())
        # At least one for each layer: float32 adapters, routers and the like may have a dtype of their own.
        yield Evidence(
            "precision",
            f"autocast {self.autocast.value} over {_name(weights)} weights",
            f"matmuls of a forward pass: {counted or 'none'}",
            seen.counts[wanted] >= len(decoder_layers(model)),
        )
        if device.type != "cuda":
            return
        if torch.cuda.get_device_capability(device) >= AMPERE:
            rounded = _rounds_to_tf32(device)
            yield Evidence(
                "precision",
                f"TF32 {'on' if self.tf32 else 'off'}",
                f"a float32 matmul {'rounds' if rounded else 'keeps'} the 12th bit of its inputs",
                rounded == bool(self.tf32),
            )
        if self.cudnn_benchmark:
            convolutions = sum(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
            yield Evidence(
                "precision",
                "the cuDNN autotuner on",
                f"cudnn.benchmark is {torch.backends.cudnn.benchmark}, for {convolutions} convolutions",
                torch.backends.cudnn.benchmark and convolutions > 0,
            )


class LossScale:
    """The scale of the loss in the backward pass, and its growth. Tensors on the device: nothing here waits for it.

    The same rule as torch.amp.GradScaler's: half after a bad step, double after `interval` good ones in a row.
    """

    def __init__(self, device: torch.device, initial: float = 1.0, interval: int = 2000, active: bool = False):
        self.active, self.interval = active, interval
        self.scale = torch.full((), initial, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        """Good steps since the scale last changed."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale if self.active else loss

    @torch.no_grad()
    def unscale(self, parameters: Sequence[torch.Tensor]) -> None:
        """Divide the gradients of `parameters` by the scale: exactly, as it is a power of two."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.active and gradients:
            torch._foreach_mul_(gradients, self.scale.reciprocal())

    def update(self, finite: torch.Tensor) -> None:
        """Count a step. `finite`: a bool scalar on the device, whether its gradient and loss were."""
        if not self.active:
            return
        good = torch.where(finite, self.good + 1, 0)
        grows = good >= self.interval
        grown = torch.where(grows, (self.scale * 2).clamp(max=LARGEST_SCALE), self.scale)
        self.scale = torch.where(finite, grown, self.scale / 2)
        self.good = torch.where(grows, 0, good).to(torch.int32)

    def state(self) -> dict[str, float]:
        """What a resumed run needs; nothing where no scale is in play. Waits for the device."""
        return {"scale": self.scale.item(), "good": self.good.item()} if self.active else {}

    def load(self, state: dict[str, float]) -> None:
        """Take back what `state` gave."""
        if self.active and state:
            self.scale.fill_(state["scale"])
            self.good.fill_(state["good"])


class _Matmuls(TorchDispatchMode):
    """Counts the operators that multiply by a weight, by the dtype of the activations they get."""

    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if _LINEAR.search(name):
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self.counts[tensors["addmm" in name].dtype] += 1  # addmm's first is the bias
        return func(*args, **(kwargs or {}))


def _rounds_to_tf32(device: torch.device) -> bool:
    """Whether a float32 matmul loses the 12th bit of mantissa: TF32 has 10, float32 23."""
    fine = torch.full((256, 256), 1 + 2.0**-12, device=device)
    with torch.autocast(device.type, enabled=False):
        return bool((fine @ torch.eye(256, device=device) == 1).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
