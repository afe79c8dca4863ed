"""Modules of fxtune in place of modules of a model, by name.

A replacement has the parts of the module that it replaces: its children, parameters, buffers, options and hooks, in
the same dictionaries. So names in state dicts, adapters, moves to another device and divided weights stay, and neither
of the two can hold a stale tensor. The replaced module is no part of the model any more, but its code can still run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Places = dict[nn.Module, list[tuple[nn.Module, str]]]
"""Module -> each parent and the name that it has there."""


class InPlaceOf(nn.Module):
    """A module that takes the place of `replaced` and computes the same in another way."""

    replaced: Any

    def __init__(self, replaced: nn.Module) -> None:
        nn.Module.__init__(self)  # and no other parent's: the parts are there
        self.__dict__.update({name: value for name, value in vars(replaced).items() if name != "forward"})
        self.__dict__["replaced"] = replaced  # not by setattr, which would make it a part

    def train(self, mode: bool = True) -> InPlaceOf:
        """nn.Module.train(), also for the code of the replaced module, which reads the flag for its dropout."""
        self.replaced.training = mode
        return super().train(mode)


class Packed:
    """A module with frozen weights in fewer bits than the model's dtype."""

    stored_as: str
    """fp8, mxfp4, nf4 or int8."""


class PackedLinear(Packed):
    """A linear with a packed weight."""

    compute_dtype: torch.dtype
    """The dtype of the product, or of the weight that is dequantized for it."""


class PackedExperts(Packed):
    """The experts of a layer."""

    def run_grouped(self, outermost: Any) -> None:
        """Let peft's `outermost` wrapper around these experts run them and their adapters: peft itself cannot add an
        adapter to codes."""
        raise NotImplementedError


def places(model: nn.Module) -> Places:
    found: Places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


def put(where: Places, module: nn.Module, replacement: nn.Module) -> None:
    """Put `replacement` wherever `module` is; a layer may be in several places."""
    for parent, name in where[module]:
        setattr(parent, name, replacement)
