"""Replaces modules of a model by modules of fxtune.

A replacement has the parts of the module that it replaces: its children, parameters, buffers, options and hooks, in
the same dictionaries. So state dicts, adapters, moves to another device and divided weights work as before, and
neither module can hold a stale tensor. The replaced module is no longer part of the model, but its code can still run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Places = dict[nn.Module, list[tuple[nn.Module, str]]]
"""For each module: its parents, each with the name of the module in it."""


class InPlaceOf(nn.Module):
    """A module that takes the place of `replaced` and computes the same in another way."""

    replaced: Any

    def __init__(self, replaced: nn.Module) -> None:
        nn.Module.__init__(self)  # not super(): other parents' __init__ would make the parts again
        self.__dict__.update({name: value for name, value in vars(replaced).items() if name != "forward"})
        self.__dict__["replaced"] = replaced  # setattr would make `replaced` a child

    def train(self, mode: bool = True) -> InPlaceOf:
        """Set the flag of nn.Module.train() also in the replaced module, because its code reads the flag for
        dropout."""
        self.replaced.training = mode
        return super().train(mode)


class Packed:
    """A module with frozen weights in fewer bits than the model's dtype."""

    stored_as: str
    """The format of the weights: fp8, mxfp4, nf4 or int8."""


class PackedLinear(Packed):
    """A linear with a packed weight."""

    compute_dtype: torch.dtype
    """The dtype of the product, or of the weight that is dequantized for it."""


class PackedExperts(Packed):
    """The experts of a layer, with packed weights."""

    def run_grouped(self, outermost: Any) -> None:
        """Make peft's `outermost` wrapper around these experts run them together with their adapters. peft itself
        cannot add an adapter to packed weights."""
        raise NotImplementedError


def places(model: nn.Module) -> Places:
    found: Places = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                found.setdefault(child, []).append((parent, name))
    return found


def put(where: Places, module: nn.Module, replacement: nn.Module) -> None:
    """Put `replacement` in all places where `module` is. A layer may be in several places."""
    for parent, name in where[module]:
        setattr(parent, name, replacement)
