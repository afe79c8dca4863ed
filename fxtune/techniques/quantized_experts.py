"""The experts of a mixture whose frozen weights are in 4 or 8 bits.

transformers keeps the experts of a layer as two tensors, `gate_up_proj` [experts, 2 width, d] and `down_proj`
[experts, d, width], or their transposes (gpt-oss). Here the parameters of these names hold the codes, as integers,
because peft would give adapters the dtype of a floating-point weight; scales and what else belongs to them are beside
them. The module stays the same object, with a subclass of its class, so peft's names, saving and routing do not
change. It runs as one operator, with or without adapters:

- fp8: kernels/fp8_experts.py multiplies the codes.
- nf4, int8 and MXFP4: kernels/gated_experts.py dequantizes one tensor of a layer at a time, forward and backward.
  nf4 and int8 are those of the linears (quantized_modules.py), over the rows of all experts.

A checkpoint that ships its experts in MXFP4 (gpt-oss) is read as it is where that is possible (hold_mxfp4()): codes
and exponents go from the files to the device, and the experts are never in 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxtune.facts.options import QuantizeOptions, Switch, Type
from fxtune.kernels import fp8_experts
from fxtune.kernels.quantized import MX_BLOCK, MXFP4, NF4_BLOCK, SCALE_BLOCK, pack_mxfp4, unpack
from fxtune.models.shards import mark_mxfp4
from fxtune.techniques.lora.experts import FIRST, LAST, follows_interface, one_operator, run_experts, run_grouped
from fxtune.techniques.quantized_modules import packed, quantized, register_frozen

TENSORS = (FIRST[0], LAST)
FP8 = "fp8"
MULTIPLE = 16
"""Both sizes of an expert's matrices are multiples of this in fp8."""
SMALL = 2**24
"""Where experts are in fp8 and all other linears have fewer weights, these stay in 16 bits: beside experts they take
hardly any memory, and to quantize their input and to add their adapter takes about as long as the faster product saves
(by calculation)."""


def experts_of(model: nn.Module) -> Iterator[Any]:
    """The modules that hold all experts of a layer."""
    return (module for module in model.modules() if follows_interface(module))


def leaves_linears(quantize: QuantizeOptions, experts: bool, largest: int) -> bool:
    """Whether linears, of at most `largest` weights, stay in 16 bits. `experts`: whether experts are quantized."""
    if quantize.type is Type.mxfp4:
        return True
    small = quantize.type is Type.fp8 and experts and largest < SMALL
    return quantize.linears is Switch.off or (quantize.linears is Switch.auto and small)


def obstacle(experts: Any, kind: str, library: str) -> str | None:
    """Why the weights of these experts cannot be in `kind` (a quantize.Type), None if they can. `library`: what stores
    nf4 and int8."""
    name = type(experts).__name__
    if one_operator(experts) is None:
        return f"{name} does more than down(act(gate) * up)"
    if kind == FP8 and (experts.has_bias or experts.is_transposed):
        return f"{name} has biases or another layout"
    shapes = [_matrix_shape(experts, getattr(experts, name)) for name in TENSORS]
    if kind == FP8 and (odd := sorted({size for one in shapes for size in one[1:] if size % MULTIPLE})):
        return f"products in fp8 take sizes of a multiple of {MULTIPLE}, and experts have one of {odd[0]}"
    if kind == MXFP4 and (odd := sorted({one[2] for one in shapes if one[2] % MX_BLOCK})):
        return f"mxfp4 has blocks of {MX_BLOCK} numbers, and rows of experts have {odd[0]}"
    counts = [experts * out * inner for experts, out, inner in shapes]
    if kind == "nf4" and library == "torchao" and any(one % (NF4_BLOCK * SCALE_BLOCK) for one in counts):
        return f"torchao's nf4 takes a multiple of {NF4_BLOCK * SCALE_BLOCK:,} weights, and a layer has {counts[0]:,}"
    if library == "bitsandbytes" and kind == "nf4" and max(counts) >= 2**31:
        return f"bitsandbytes takes tensors below 2^31 weights, and a layer has {max(counts):,}"
    return None


def _matrix_shape(experts: Any, weight: Tensor) -> tuple[int, int, int]:
    """[experts, out, in] of one of its tensors."""
    count, *sizes = weight.shape
    out, inner = reversed(sizes) if experts.is_transposed else sizes
    return count, out, inner


@torch.no_grad()
def quantize_experts(
    experts: Any,
    kind: str,
    library: str,
    double: bool,
    compute: torch.dtype,
    device: torch.device,
    transpose: bool,
) -> float:
    """Store the weights of `experts` as `kind` on `device`, in place. Returns |dequantized - weight| / |weight| of the
    first expert's down_proj.

    `library`, `double`: see quantized_modules.quantized(). `compute`: the dtype of everything else that they compute;
    fp8 on a GPU takes bfloat16. `transpose`: see fp8_experts.Weights.
    """
    error, shapes = 0.0, {}
    act, stored = one_operator(experts), kind
    for name in TENSORS:
        weight = getattr(experts, name).detach()
        shapes[name] = tuple(weight.shape)
        weight = (weight.mT if experts.is_transposed else weight).to(device).contiguous()
        if kind == FP8:
            tensors = [one for one in fp8_experts.quantize_experts(weight, transpose) if one is not None]
            first = fp8_experts.dequantize_experts(tensors[0][:1], tensors[1][:1], torch.float32)[0]
        else:
            stored, tensors = packed_matrices(weight, kind, library, double, compute, device)
            first = dequantize(stored, tensors, weight.shape, compute)[0].float()
        error = ((first - weight[0].float()).norm() / weight[0].float().norm()).item()
        del weight, first
        _hold(experts, name, tensors)
    _become(experts, stored, compute, act, shapes)
    return error


def packed_matrices(
    weight: Tensor, kind: str, library: str, double: bool, compute: torch.dtype, device: torch.device
) -> tuple[str, list[Tensor]]:
    """`weight` [experts, out, in] as the tensors that quantized.unpack() reads, and what it calls them."""
    if kind == MXFP4:
        every = [pack_mxfp4(one) for one in weight]
        return kind, [torch.stack(one) for one in zip(*every, strict=True)]
    rows = weight.flatten(0, 1)
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    made: Any = quantized(linear, kind, library, double, compute, device)
    codes, *others = packed(made)
    # lora/targets.py takes parameters of three dimensions for weights of experts.
    return made.fxtune_quantized, [codes.view(*weight.shape[:2], -1), *others]


def hold_mxfp4(experts: Any, compute: torch.dtype) -> None:
    """Let `experts`, whose weights have no memory yet, hold those of a checkpoint in MXFP4, in place: models/shards.py
    reads what is marked here."""
    act, shapes = one_operator(experts), {}
    for name in TENSORS:
        weight = getattr(experts, name)
        shapes[name] = tuple(weight.shape)
        count, out, inner = _matrix_shape(experts, weight)
        codes = torch.empty(count, out, inner // 2, dtype=torch.uint8, device="meta")
        # Of four dimensions, so that lora/targets.py does not take the exponents for weights.
        _hold(experts, name, [codes, codes.new_empty(count, out, inner // MX_BLOCK, 1)])
        mark_mxfp4(weight, *(experts._parameters[one] for one in experts.stored_names[name]))
    _become(experts, MXFP4, compute, act, shapes)


def dequantize(stored: str, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weights of experts that are not in fp8, `shape` [experts, out, in], in `dtype`."""
    made = torch.empty(tuple(shape), dtype=dtype, device=tensors[0].device)
    unpack(stored, tensors, made.flatten(0, 1))
    return made


def _hold(experts: Any, name: str, tensors: Sequence[Tensor]) -> None:
    """Put `tensors`, the codes first, in place of the weight `name`."""
    names = [name, f"{name}_scales", *(f"{name}_part{index}" for index in range(2, len(tensors)))]
    setattr(experts, name, nn.Parameter(tensors[0], requires_grad=False))
    for one, tensor in zip(names[1:], tensors[1:], strict=True):
        register_frozen(experts, one, tensor)
    experts.stored_names = {**getattr(experts, "stored_names", {}), name: names}


def _become(experts: Any, stored: str, compute: torch.dtype, act: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    experts.compute_dtype, experts.expert_act = compute, act
    experts.stored_shapes, experts.stored_as = shapes, stored
    kind: Any = type(experts)
    experts.__class__ = _stored_class(kind, stored != FP8)


def stored_as(module: nn.Module) -> str:
    """How a module that quantize_experts() or hold_mxfp4() changed stores its weights: fp8, mxfp4, nf4/LIBRARY or
    int8/LIBRARY; empty for any other."""
    return str(getattr(module, "stored_as", ""))


def stored_bytes(experts: Any) -> int:
    """Bytes of the weights of quantized experts, scales included."""
    return sum(tensor.nbytes for weights in experts.stored_weights() for tensor in weights)


@functools.cache
def _stored_class(kind: Any, packs: bool) -> Any:
    def weights(self: Any) -> tuple[list[Tensor], list[Tensor]]:
        first, last = (
            [self._parameters[name], *(getattr(self, one) for one in self.stored_names[name][1:])] for name in TENSORS
        )
        return first, last

    def matrix_shapes(self: Any) -> list[tuple[int, int, int]]:
        shapes = (self.stored_shapes[name] for name in TENSORS)
        return [(count, *((b, a) if self.is_transposed else (a, b))) for count, a, b in shapes]

    def forward(self: Any, hidden: Tensor, index: Tensor, router_weights: Tensor) -> Tensor:
        return run_experts(self, {}, hidden, index, router_weights)

    own_names = {
        "forward": forward,
        "stored_weights": weights,
        "matrix_shapes": matrix_shapes,
        "run_grouped": staticmethod(run_grouped),
        "__module__": kind.__module__,
    }
    if packs:  # the codes have another shape than the weight, which peft reads
        own_names.update({name: property(functools.partial(_in_shape, name)) for name in TENSORS})
    return type(f"Quantized{kind.__name__}", (kind,), own_names)


def _in_shape(name: str, experts: Any) -> Tensor:
    """An integer tensor of the weight's shape and device that has no memory of its own."""
    device = experts._parameters[name].device
    return torch.empty((), dtype=torch.uint8, device=device).expand(experts.stored_shapes[name])
