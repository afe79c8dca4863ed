"""How transformers stores the experts of a mixture, and how many of them a token uses.

transformers keeps the experts of a layer in one module with a tensor for each product. All classes decorated with its
`use_experts_implementation` say how they store their weights and how they apply the gate. fxtune follows that
interface, so it has no list of architectures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

FIRST, LAST = ("gate_up_proj", "up_proj"), "down_proj"
"""Names of the tensors that are multiplied before the activation, and of the tensor after it."""
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names of config options with the number of experts that a token uses. They serve if the router has no `top_k`."""


def follows_interface(experts: nn.Module) -> bool:
    """Whether transformers describes how these experts are stored and computed."""
    return all(hasattr(experts, name) for name in ("is_transposed", "has_gate", "has_bias", "num_experts", LAST))


def experts_of(model: nn.Module) -> Iterator[Any]:
    """The modules that each hold all experts of a layer and follow transformers' interface."""
    return (module for module in model.modules() if follows_interface(module))


def divisible_experts(model: nn.Module, ranks: int) -> list[Any]:
    """The modules with the experts of a layer that `ranks` ranks divide by expert."""
    return [module for module in experts_of(model) if module.num_experts % ranks == 0]


def is_described(modules: dict[str, nn.Module], path: str) -> bool:
    """Whether `path` is a tensor with matrices of experts, in a module that follows transformers' interface."""
    parent, _, name = path.rpartition(".")
    return follows_interface(modules[parent]) and name in (*FIRST, LAST)


def experts_per_token(modules: Iterable[Any], config: Any) -> int | None:
    """How many experts a token uses, from the router among `modules` or from the text model's config; None if neither
    says it."""
    own = (module.top_k for module in modules if isinstance(getattr(module, "top_k", None), int))
    named = (used for name in USED if isinstance(used := getattr(config, name, None), int))
    return next(own, None) or next(named, None)


def described_per_token(model: nn.Module, config: Any) -> int | None:
    """How many experts a token uses; 0 without experts, None if the number or the storage of experts is not known."""
    if not any(isinstance(getattr(module, "num_experts", None), int) for module in model.modules()):
        return 0
    used = experts_per_token(model.modules(), config)
    return used if used and any(experts_of(model)) else None
