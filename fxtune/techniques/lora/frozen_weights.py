"""The frozen weights of a fused group of linears. The module `FrozenWeights` owns them, in the operator's layout.

A group is one adapted linear, or several that read the same input (q, k, v; gate, up). Its weights are one contiguous
parameter, so that FSDP can shard it and nothing is stored twice. peft's linears stay in the model for names, saving
and merging. Their bases are replaced by linears whose `weight` is a view of the group's parameter, and state dicts
have peft's names (`q_proj.base_layer.weight`). A view can be changed in place, and `weight.data = other` copies the
values into it. The assignment of a parameter (`linear.weight = ...`) raises an error.

Layouts by kind (kernels/frozen_base.py): `dense` is one matrix with space for the adapters. `fp8` has the codes with
a scale for each row and, if the transpose is kept, the same two tensors of the transpose. Other quantized weights
(nf4, int8) stay parameters of their linears, and the group only refers to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxtune.distributed.chunks import LinearWeights, is_divided
from fxtune.errors import ConfigError
from fxtune.kernels.frozen_base import DENSE, augment, is_dense
from fxtune.models.peft_adapter import ADAPTER
from fxtune.models.replacement import InPlaceOf, PackedLinear
from fxtune.models.shards import mark_joined
from fxtune.techniques.quantized_modules import FP8_TENSORS, DividedCodes, Fp8Linear, grouped, register_frozen


def storage_kind(linear: Any) -> str:
    """How the frozen weight of an adapted linear is stored: a kind of kernels/frozen_base.py."""
    base = linear.get_base_layer()
    return base.stored_as if isinstance(base, PackedLinear) else DENSE


class FrozenWeights(DividedCodes, LinearWeights, nn.Module):
    """Owns the frozen weights of `linears`: adapted linears of peft that read the same input."""

    weight: nn.Parameter

    def __init__(self, linears: Sequence[Any]) -> None:
        super().__init__()
        bases = [linear.get_base_layer() for linear in linears]
        self.kind = storage_kind(linears[0])
        self.in_size, self.out_sizes = linears[0].in_features, tuple(linear.out_features for linear in linears)
        self.aliased: tuple[Any, ...] = ()
        """The linears that own the tensors, if this module only refers to them."""
        if self.kind == DENSE:
            ranks, bias = [linear.r[ADAPTER] for linear in linears], bases[0].bias is not None
            tensors = [augment([base.weight for base in bases], ranks, bias)]
        else:
            tensors = grouped(bases)
        packed = tuple(f"packed{index}" for index in range(len(tensors)))
        self.names: tuple[str, ...] = {DENSE: ("weight",), "fp8": FP8_TENSORS[: len(tensors)]}.get(self.kind, packed)
        for name, tensor in zip(self.names, tensors, strict=True):
            if name == "weight":
                self.weight = nn.Parameter(tensor, requires_grad=False)
                mark_joined(self.weight, [base.weight for base in bases])
            else:
                register_frozen(self, name, tensor)
        self.source_dtype = getattr(bases[0], "source_dtype", bases[0].weight.dtype)
        if "weight" not in self.names:
            self.aliased = tuple(bases)
            return
        start, kind = 0, ViewedLinear if self.kind == DENSE else ViewedFp8Linear
        for linear, base in zip(linears, bases, strict=True):
            for name in self.names:
                delattr(base, name)
            linear.base_layer = kind(base, self, slice(start, start + base.out_features))
            start += base.out_features

    @property
    def weight_count(self) -> int:
        """The number of the linears' weights, without the space for adapters that `dense` adds."""
        return self.in_size * sum(self.out_sizes)

    def tensors(self) -> list[torch.Tensor]:
        """The frozen weights as an argument of the group's operator."""
        return [getattr(self, name) for name in self.names]

    def view(self, name: str, rows: slice) -> torch.Tensor:
        """The part of tensor `name` that belongs to one linear. `rows`: its outputs among the outputs of the group."""
        tensor: torch.Tensor = getattr(self, name)
        if is_dense(self.kind):
            return tensor[rows, : self.in_size]
        return {"weight": tensor[rows], "back_scales": tensor}.get(name, tensor[:, rows])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Called by .to(), .half() and the like. Raises ConfigError if the call would cast a quantized weight."""
        casts = any(fn(tensor.new_empty(0)).dtype is not tensor.dtype for tensor in self.tensors())
        if casts and not is_dense(self.kind):
            raise ConfigError(
                f"techniques.quantize: a base in {self.kind} cannot be cast, since its scales have the dtype that "
                "its kernels read. Set model.dtype before it is built."
            )
        super()._apply(fn, recurse)
        if self.aliased:  # the linears' own tensors have moved
            self._buffers.update(zip(self.names, grouped(self.aliased), strict=True))
        return self

    def _save_to_state_dict(self, *_: Any) -> None:
        """The linears save their views."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """The linears load their views."""


class WeightView(torch.Tensor):
    """The weight of one linear: a view [out, in] of its group's parameter.

    Some code, such as peft's safe merge, replaces a weight by `weight.data = other`. Here this assignment copies the
    values of `other`. It raises ValueError if `other` has another shape, dtype or device.
    """

    # Results of operators are plain tensors, as with nn.Parameter.
    __torch_function__ = nn.Parameter.__torch_function__

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        own, given = ((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in (self, value))
        if own != given:
            raise ValueError(
                "weight.data of a linear with a fused adapter is part of a larger matrix, so it takes a tensor of "
                f"shape {own[0]}, {own[1]}, on {own[2]}; the new one has shape {given[0]}, {given[1]}, on {given[2]}. "
                "With techniques.lora.fused=off each linear has a separate matrix."
            )
        with torch.no_grad():
            self.copy_(value)


def _view_of(name: str) -> property:
    def view(self: Any) -> Any:
        parameter = self._parameters.get(name)  # own_weight() sets one in its context
        if parameter is not None:
            return parameter
        view = self.frozen_weights.view(name, self.rows)
        # Compiled code gets the view itself, and a DTensor of FSDP stays a DTensor.
        plain = torch.compiler.is_compiling() or type(view) is not torch.Tensor
        return view if plain else view.as_subclass(WeightView)

    return property(view)


class _Viewed(InPlaceOf):
    """A linear whose weight is a view of its group's weight. `rows`: this linear's outputs among the group's."""

    frozen_weights: FrozenWeights
    rows: slice
    weight: Any = _view_of("weight")

    def __init__(self, linear: nn.Module, owner: FrozenWeights, rows: slice) -> None:
        super().__init__(linear)
        # These are set in __dict__, so that the owner is no submodule of this linear.
        self.__dict__.update(frozen_weights=owner, rows=rows)

    def _save_to_state_dict(self, *given: Any) -> None:
        if is_divided(self.frozen_weights.weight):  # this rank's rows are not the rows of one linear
            return
        with own_weight(self):
            super()._save_to_state_dict(*given)

    def _load_from_state_dict(self, *given: Any) -> None:
        with own_weight(self):
            super()._load_from_state_dict(*given)


class ViewedLinear(_Viewed, nn.Linear):
    """nn.Linear over a view."""


class ViewedFp8Linear(_Viewed, Fp8Linear):
    """An fp8 linear over views of its group's tensors."""

    scales, back, back_scales = (_view_of(name) for name in FP8_TENSORS[1:])


@contextmanager
def own_weight(base: Any) -> Iterator[None]:
    """Give a linear its view as a parameter in this context, for code that looks for a parameter. If this code
    replaces the parameter, the new values are copied into the view."""
    view = base.frozen_weights.view("weight", base.rows)
    parameters = dict(base._parameters)
    base._parameters.clear()
    base._parameters.update({"weight": nn.Parameter(view, requires_grad=False), **parameters})  # then the bias
    try:
        yield
    finally:
        weight = base._parameters.pop("weight")
        if weight.data_ptr() != view.data_ptr():
            with torch.no_grad():
                view.copy_(weight)
