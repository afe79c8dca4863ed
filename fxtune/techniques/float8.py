"""Full fine-tuning with matrix products in fp8: the trained linears of the layers, forward and backward.

Each linear has three products: one in the forward and two in the backward pass. They run in e4m3 at nearly twice
bfloat16's speed. Each call quantizes weights and activations (kernels/fp8_training.py). Weights keep their dtype and
names, so the optimizer, checkpoints, exports and parallel.shard need no change. The head, embeddings, attention,
routers, experts, and linears with a size that is no multiple of 16 stay in 16 bits.

Only training runs in fp8. Evaluation and generation run in 16 bits, as the exported model will.

For LoRA use techniques.quantize.type=fp8: it quantizes the frozen weights once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.distributed.world import World
from fxtune.facts.execution import Execution
from fxtune.facts.options import Float8Options, WeightGradient
from fxtune.facts.run import Facts
from fxtune.kernels import fp8_training
from fxtune.kernels.fp8 import MULTIPLE
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers, is_named, observing, outputs, skeleton
from fxtune.system.process.profiler import observe_operators, short_name
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.lora.targets import is_router

OLDEST = (8, 9)
"""The oldest compute capability with tensor cores for fp8."""
WORST_ERROR = 0.06
"""Largest relative error |fp8 - float32| / |float32| of a product. For normally distributed numbers it is 0.037."""
ROWS = 256
"""The number of tokens in the products that verify() compares."""


@dataclass
class Float8(Float8Options, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        if facts.techniques.lora.enabled:
            yield (
                "enabled: this is for trained weights, and techniques.lora freezes them. Set it to false, and "
                "techniques.quantize.enabled=true with type=fp8; or set techniques.lora.enabled=false."
            )
        if facts.device != "cuda":
            yield (
                f"enabled: fp8's products run on a GPU's tensor cores, and the device is {facts.device}. Set it to "
                "false."
            )
        elif (facts.capability or OLDEST) < OLDEST:
            number = ".".join(map(str, facts.capability or ()))
            yield (
                f"enabled: fp8's products need compute capability {OLDEST[0]}.{OLDEST[1]} (Ada, Hopper or newer), and "
                f"{facts.device_name} has {number}. Set it to false."
            )
        if facts.compute_dtype != "bfloat16":
            yield (
                f"enabled: fp8's products are rounded to bfloat16, and the others run in {facts.compute_dtype}. Set "
                "techniques.precision.autocast=bfloat16 or model.dtype=bfloat16, or this to false."
            )
        if (model := skeleton(facts.model)) is not None:
            named = [name for name, _ in _linears(model)]
            for name in self.skip:
                if not any(is_named(path, name) for path in named):
                    linears = ", ".join(sorted({path.rpartition(".")[2] for path in named}))
                    yield f"skip: this model's layers have no linear {name}. Their linears are {linears}."
            if not list(self._targets(model)):
                yield (
                    "enabled: this model's layers have no linear with sizes of a multiple of "
                    f"{MULTIPLE} besides the linears in skip. Set it to false."
                )

    def describe(self, facts: Facts, execution: Execution) -> Execution:
        # One of three products stays in 16 bits with weight_gradient=bfloat16.
        return replace(execution, fp8_products=1.0 if self.weight_gradient is WeightGradient.float8 else 2 / 3)

    def _targets(self, model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
        """Yield (path, linear) for each linear whose products are to run in fp8."""
        for name, linear in _linears(model):
            fits = not (linear.in_features % MULTIPLE or linear.out_features % MULTIPLE)
            if fits and linear.weight.requires_grad and not any(is_named(name, skip) for skip in self.skip):
                yield name, linear

    def apply(self, model: PreparedModel, world: World) -> None:
        for name, linear in list(self._targets(model.module)):
            parent, _, own = name.rpartition(".")
            setattr(model.module.get_submodule(parent), own, Float8Linear.of(linear, self.weight_gradient))

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        evidence = partial(Evidence, "float8")
        linears = [module for module in model.module.modules() if isinstance(module, Float8Linear)]
        layers = {
            id(parameter): parameter.numel()
            for layer in decoder_layers(model.module)
            for parameter in layer.parameters()
        }
        inside = sum(linear.weight.numel() for linear in linears)
        others = [name for name, linear in _linears(model.module) if not isinstance(linear, Float8Linear)]
        rest = f"; not {', '.join(sorted({name.rpartition('.')[2] for name in others}))}" if others else ""
        yield evidence(
            "products of trained linears in fp8",
            f"{len(linears)} linears with {inside / max(sum(layers.values()), 1):.1%} of the layers' weights{rest}",
            bool(linears),
        )
        if not linears:
            return
        errors = _errors(linears[0], next(model.module.parameters()).device)
        yield evidence(
            f"products close to float32's (relative error below {WORST_ERROR})",
            ", ".join(f"{name} {error:.4f}" for name, error in errors.items()),
            all(0 < error < WORST_ERROR for error in errors.values()),
        )
        with observing(model.module):
            for linear in linears:
                linear.training = True  # observing() restores the flag
            seen = observe_operators(lambda: outputs(model.module, **probe), {"fp8": r"^aten::_scaled_mm$"})["fp8"]
        kernels = ", ".join(sorted({short_name(name) for name in seen.kernels}))
        yield evidence(
            f"{len(linears)} products in fp8 in a forward pass",
            f"{seen.calls} of torch's scaled products" + (f" ({kernels})" if kernels else ""),
            seen.calls >= len(linears),
        )


class Float8Linear(nn.Linear):
    """A linear whose products run in fp8 while it trains. It shares the weight and bias of the linear it replaces."""

    fp8_weight_gradient = True

    @classmethod
    def of(cls, linear: nn.Linear, weight_gradient: WeightGradient) -> Float8Linear:
        with torch.device("meta"):
            module = cls(linear.in_features, linear.out_features, bias=False)
        module.weight, module.bias = linear.weight, linear.bias
        module.fp8_weight_gradient = weight_gradient is WeightGradient.float8
        return module.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.linear(x, self.weight, self.bias)
        product = fp8_training.linear(x, self.weight, self.fp8_weight_gradient)
        return product if self.bias is None else product + self.bias.to(product.dtype)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (path, linear) for each plain linear of the decoder layers, except routers."""
    named = dict(model.named_modules())
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    for name, module in named.items():
        if type(module) in (nn.Linear, Float8Linear) and id(module) in inside and not is_router(name, named):
            yield name, module


def _errors(linear: Float8Linear, device: torch.device) -> dict[str, float]:
    """The relative errors of a linear's three products, for random inputs and a random weight of the same size."""
    draw, (outward, inward) = torch.Generator(device).manual_seed(0), linear.weight.shape
    sizes = (ROWS, inward), (ROWS, outward), (outward, inward)
    x, dy, weight = (torch.randn(size, generator=draw, device=device) for size in sizes)

    def results(product: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            y = product(*inputs)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(dtype))]

    exact = results(F.linear, torch.float32)
    rounded = results(partial(fp8_training.linear, fp8_weight_gradient=linear.fp8_weight_gradient), torch.bfloat16)
    names = ("forward", "gradient of x", "gradient of the weight")
    triples = zip(names, rounded, exact, strict=True)
    return {name: ((ours.float() - theirs).norm() / theirs.norm()).item() for name, ours, theirs in triples}
