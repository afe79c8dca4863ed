"""Linears with adapters of peft, and their halves as the fused operators take them."""

from __future__ import annotations

from functools import partial

import peft
import torch
from torch import nn
from torch.nn import functional as F

from fxtune.kernels.frozen_base import augment
from fxtune.kernels.fused_lora import lora_linear, lora_mlp

ACTS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


class Siblings(nn.Module):
    """Linears that read the same input."""

    def __init__(self, inner: int, outs: list[int], bias: bool = False) -> None:
        super().__init__()
        self.names = [f"linear{index}" for index in range(len(outs))]
        for name, out in zip(self.names, outs, strict=True):
            setattr(self, name, nn.Linear(inner, out, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in self.names], -1)


class Mlp(nn.Module):
    """As transformers has it (LlamaMLP, GemmaMLP)."""

    def __init__(self, hidden: int, width: int, act: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, width, False), nn.Linear(hidden, width, False)
        self.down = nn.Linear(width, hidden, False)
        self.names, self.act = ["gate", "up", "down"], ACTS[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def adapted(
    model: nn.Module, ranks: list[int], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, list[nn.Module]]:
    """`model` under peft, adapters in float32 or better with B drawn, and its adapted linears in their order."""
    names = model.names
    model = peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=list(names), rank_pattern=dict(zip(names, ranks, strict=True))
        ),
        model.to(dtype),
    )
    linears = [getattr(model, name) for name in names]
    for linear in linears:
        nn.init.normal_(linear.lora_B["default"].weight, std=0.3)
        for half in (linear.lora_A, linear.lora_B):
            half.to(torch.promote_types(dtype, torch.float32))
    return model, linears


def halves(linears: list[nn.Module]) -> dict[str, list]:
    return dict(
        a=[one.lora_A["default"].weight for one in linears],
        b=[one.lora_B["default"].weight for one in linears],
        scaling=[one.scaling["default"] for one in linears],
    )


def weights(linears: list[nn.Module]) -> list[torch.Tensor]:
    return [one.base_layer.weight.detach() for one in linears]


def group(inner: int, outs: list[int], ranks: list[int], bias: bool = False, dtype: torch.dtype = torch.float32):
    """(peft's model, the fused function of x, what is trained) of siblings with adapters."""
    torch.manual_seed(inner)
    model, linears = adapted(Siblings(inner, outs, bias), ranks, dtype)
    base = [augment(weights(linears), ranks, bias)]
    biases = [one.base_layer.bias.detach() for one in linears] if bias else []
    own = halves(linears)
    return (
        model,
        lambda x, **more: lora_linear(x, **{**own, "base": base, "bias": biases, **more}),
        [*own["a"], *own["b"]],
    )


def mlp(hidden: int, width: int, ranks: list[int], act: str = "silu", dtype: torch.dtype = torch.float32):
    torch.manual_seed(hidden)
    model, linears = adapted(Mlp(hidden, width, act), ranks, dtype)
    up, down = [augment(weights(linears[:2]), ranks[:2])], [augment(weights(linears[2:]), ranks[2:])]
    own = halves(linears)
    return model, partial(lora_mlp, **own, up=up, down=down, act=act), [*own["a"], *own["b"]]


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()
