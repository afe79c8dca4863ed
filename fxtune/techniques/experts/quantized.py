"""The experts of a mixture whose frozen weights are in 4 or 8 bits.

transformers keeps the experts of a layer as two tensors, `gate_up_proj` [experts, 2 width, d] and `down_proj`
[experts, d, width], or their transposes (gpt-oss). Here the parameters of these names hold the codes. Codes are
integers, because peft would give adapters the dtype of a floating-point weight. Scales and other parts of a format are
stored beside the codes. A module with the same names replaces the experts (models/replacement.py), so names in peft,
saving and routing do not change. The module runs as one operator, with or without adapters:

- fp8: kernels/fp8_experts.py multiplies the codes.
- nf4, int8 and MXFP4: kernels/gated_experts.py dequantizes one tensor of a layer at a time, forward and backward. nf4
  and int8 are stored as for linears (quantized_modules.py), over the rows of all experts.

If a model in 16 bits fits nowhere, its experts are quantized while models/shards.py reads them: in fp8 a few experts
at a time, in other formats a tensor of a layer at a time. If a checkpoint ships its experts in MXFP4 (gpt-oss), codes
and exponents go from the files to the device unchanged where this is possible (hold_mxfp4()).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxtune.distributed.chunks import chunk_of, local
from fxtune.distributed.sharding import OWN
from fxtune.distributed.world import World
from fxtune.facts.options import QuantizeOptions, WeightFormat
from fxtune.kernels import fp8_experts
from fxtune.kernels.fp8 import MULTIPLE
from fxtune.kernels.gated_experts import gated_experts
from fxtune.kernels.grouped_matmul import Routing
from fxtune.kernels.quantized import MX_BLOCK, MXFP4, pack_mxfp4, unpack
from fxtune.models.experts import FIRST, LAST
from fxtune.models.replacement import PackedExperts
from fxtune.models.shards import StoresRows, mark_joined, mark_mxfp4
from fxtune.techniques.experts.adapted import run_grouped
from fxtune.techniques.experts.run import OwnExperts, biases_of, halves_of, no_adapter, one_operator, run_experts
from fxtune.techniques.quantized_modules import packed, quantized, register_frozen

Storage = tuple[torch.dtype, torch.device, bool]
"""(compute, device, transpose): the arguments of quantized_modules.quantized() after `kind`."""
TENSORS = (FIRST[0], LAST)
FP8 = "fp8"
SMALL = 2**24
"""Beside experts in fp8, linears stay in 16 bits if each has fewer weights than this number. Such linears take hardly
any memory, and an fp8 product saves about the time that the quantized input and a separate adapter cost (by
calculation)."""


def leaves_linears(quantize: QuantizeOptions, experts: bool, largest: int) -> bool:
    """Whether linears stay in 16 bits. `largest`: weights of the largest one. `experts`: whether experts are
    quantized."""
    if quantize.type is WeightFormat.mxfp4:
        return True
    return quantize.type is WeightFormat.fp8 and experts and largest < SMALL


def refusal(experts: Any, kind: str) -> str | None:
    """Why these experts cannot be stored in `kind`, a WeightFormat; None if they can."""
    name = type(experts).__name__
    if one_operator(experts) is None:
        return f"{name} does more than down(act(gate) * up)"
    if kind == FP8 and (experts.has_bias or experts.is_transposed):
        return f"{name} has biases or another layout"
    shapes = [_matrix_shape(experts, getattr(experts, name)) for name in TENSORS]
    if kind == FP8 and (odd := sorted({size for shape in shapes for size in shape[1:] if size % MULTIPLE})):
        return f"products in fp8 take sizes of a multiple of {MULTIPLE}, and experts have one of {odd[0]}"
    if kind == MXFP4 and (odd := sorted({shape[2] for shape in shapes if shape[2] % MX_BLOCK})):
        return f"mxfp4 has blocks of {MX_BLOCK} numbers, and rows of experts have {odd[0]}"
    counts = [experts * out * inner for experts, out, inner in shapes]
    if kind == "nf4" and max(counts) >= 2**31:
        return f"bitsandbytes takes tensors below 2^31 weights, and a layer has {max(counts):,}"
    return None


def _matrix_shape(experts: Any, weight: Tensor) -> tuple[int, int, int]:
    """[experts, out, in] of one tensor of `experts`."""
    count, *sizes = weight.shape
    out, inner = reversed(sizes) if experts.is_transposed else sizes
    return count, out, inner


@torch.no_grad()
def quantize_experts(experts: Any, kind: str, storage: Storage) -> tuple[QuantizedExperts, float]:
    """Quantize `experts`, which loses its weights. Returns the module that replaces it, and |dequantized - weight| /
    |weight| of the first expert's down_proj.

    For weights without memory `kind` must be fp8, and the error is 0. models/shards.py later reads these experts into
    the module.

    `storage`: fp8 on a GPU takes bfloat16 for `compute`; for `transpose` see fp8.Weight.
    """
    compute, device, transpose = storage
    made, error = in_place_of(experts, kind, compute), 0.0
    for name in TENSORS:
        if getattr(experts, name).is_meta:
            _hold_nothing(made, name, device, transpose)
        else:
            error = quantize_tensor(made, name, kind, storage, getattr(experts, name))
    return made, error


def in_place_of(experts: Any, kind: str, compute: torch.dtype) -> QuantizedExperts:
    """A module that replaces `experts` and still has their weights. quantize_tensor() quantizes them."""
    made = (Fp8Experts if kind == FP8 else ExpertsInFewBits)(experts, compute)
    made.stored_as = kind
    return made


@torch.no_grad()
def quantize_tensor(made: QuantizedExperts, name: str, kind: str, storage: Storage, weight: Tensor) -> float:
    """Quantize `weight`, which has transformers' layout, and put it into `made` in place of the weight `name`. Returns
    the first expert's error. quantize_experts() describes the other arguments and the error."""
    compute, device, transpose = storage
    weight = weight.detach()
    weight = (weight.mT if made.is_transposed else weight).to(device).contiguous()
    if kind == FP8:
        tensors = [tensor for tensor in fp8_experts.quantize_experts(weight, transpose) if tensor is not None]
        first = fp8_experts.dequantize_experts(tensors[0][:1], tensors[1][:1], torch.float32)[0]
    else:
        tensors = packed_matrices(weight, kind, compute, device)
        first = dequantize(kind, tensors, weight.shape, compute)[0].float()
    error = ((first - weight[0].float()).norm() / weight[0].float().norm()).item()
    _hold(made, name, tensors)
    return error


def _hold_nothing(made: QuantizedExperts, name: str, device: torch.device, transpose: bool) -> None:
    """Prepare `made` to store its weight `name` in fp8 when models/shards.py reads it. Neither the weight nor the
    parameter for the codes has memory. The other tensors are on `device`."""
    weight = made._parameters[name]
    assert weight is not None
    assert isinstance(made, Fp8Experts)
    experts, out, inner = weight.shape
    tensors = [torch.empty_like(weight, dtype=torch.uint8), torch.zeros(experts, out, device=device)]
    if transpose:
        # Four dimensions, so that lora/targets.py does not mistake these codes for weights.
        back = torch.empty(experts, inner, out, 1, dtype=torch.uint8, device=device)
        tensors += [back, torch.zeros(experts, inner, device=device)]
    made.source_dtype = weight.dtype
    _hold(made, name, tensors)
    mark_joined(made._parameters[name], [weight])  # type: ignore[arg-type]  # _hold() has put a parameter there


def packed_matrices(weight: Tensor, kind: str, compute: torch.dtype, device: torch.device) -> list[Tensor]:
    """`weight` [experts, out, in] as the tensors that quantized.unpack() reads."""
    if kind == MXFP4:
        by_expert = [pack_mxfp4(matrix) for matrix in weight]
        return [torch.stack(tensors) for tensors in zip(*by_expert, strict=True)]
    rows = weight.flatten(0, 1)
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    made: Any = quantized(linear, kind, compute, device)
    codes, *others = packed(made)
    # Codes have three dimensions, because lora/targets.py finds weights of experts by this number.
    return [codes.view(*weight.shape[:2], -1), *others]


def hold_mxfp4(experts: Any, compute: torch.dtype) -> QuantizedExperts:
    """A module to replace `experts`, with room for a checkpoint's weights in MXFP4. The weights of `experts` have no
    memory yet. They are marked here, and models/shards.py reads the marked weights into the module."""
    made = ExpertsInFewBits(experts, compute)
    made.stored_as = MXFP4
    for name in TENSORS:
        weight = getattr(experts, name)
        count, out, inner = _matrix_shape(experts, weight)
        codes = torch.empty(count, out, inner // 2, dtype=torch.uint8, device="meta")
        # Four dimensions, so that lora/targets.py does not mistake the exponents for weights.
        _hold(made, name, [codes, codes.new_empty(count, out, inner // MX_BLOCK, 1)])
        mark_mxfp4(weight, *(made._parameters[part] for part in made.stored_names[name]))
    return made


def dequantize(stored: str, tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weights of experts that are not in fp8, in `dtype`. `shape`: [experts, out, in] of the weights."""
    made = torch.empty(tuple(shape), dtype=dtype, device=tensors[0].device)
    unpack(stored, tensors, made.flatten(0, 1))
    return made


def _hold(experts: QuantizedExperts, name: str, tensors: Sequence[Tensor]) -> None:
    """Put `tensors`, the codes first, in place of the weight `name`."""
    names = [name, f"{name}_scales", *(f"{name}_part{index}" for index in range(2, len(tensors)))]
    setattr(experts, name, nn.Parameter(tensors[0], requires_grad=False))
    for part, tensor in zip(names[1:], tensors[1:], strict=True):
        register_frozen(experts, part, tensor)
    experts.stored_names[name] = names


def stored_bytes(experts: Any) -> int:
    """Bytes of the weights of quantized experts with their scales, on all ranks that divide the experts."""
    held = {**experts._buffers, **experts._parameters}
    return sum(held[part].nbytes for parts in experts.stored_names.values() for part in parts)


class QuantizedExperts(PackedExperts, OwnExperts):
    """The experts of a layer as codes. They keep the names, biases and options of the module that they replace."""

    def __init__(self, experts: Any, compute: torch.dtype) -> None:
        """`compute`: see quantize_experts(). _hold() adds the codes later."""
        super().__init__(experts)
        act = one_operator(experts)
        assert act is not None, "refusal() has looked"
        self.compute_dtype, self.expert_act = compute, act
        self.stored_names: dict[str, list[str]] = {}
        """Name of a weight -> the names of its tensors, the codes first."""
        self.stored_shapes = {name: tuple(getattr(experts, name).shape) for name in TENSORS}
        """The shapes of the weights in transformers' layout."""

    def stored_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of gate and up, and the tensors of down, of this rank's experts."""
        held: dict[str, Any] = {**self._buffers, **self._parameters, **getattr(self, OWN, {})}
        first, last = ([held[part] for part in self.stored_names[name]] for name in TENSORS)
        return first, last

    def matrix_shapes(self) -> list[tuple[int, int, int]]:
        """[experts, out, in] of gate and up, and of down, for this rank's experts."""
        counts = (len(tensors[0]) for tensors in self.stored_weights())
        shapes = (self.stored_shapes[name][1:] for name in TENSORS)
        return [
            (count, *((b, a) if self.is_transposed else (a, b))) for count, (a, b) in zip(counts, shapes, strict=True)
        ]

    def forward(self, hidden: Tensor, index: Tensor, router_weights: Tensor) -> Tensor:
        return run_experts(self, {}, hidden, index, router_weights)

    def run(
        self, adapters: dict[str, Any], hidden: Tensor, routing: Routing, weights: Tensor, gemm: str, keep: bool
    ) -> Tensor:
        in_fp8, rows = self.stored_as == FP8, (routing.order, routing.back, routing.ends)
        dtype = torch.bfloat16 if in_fp8 and hidden.is_cuda else self.compute_dtype
        nothing = hidden.new_empty(0, dtype=dtype)
        halves = [
            halves_of(adapters[name], dtype) if name in adapters else no_adapter(nothing, shape)
            for name, shape in zip(TENSORS, self.matrix_shapes(), strict=True)
        ]
        codes, pair, act = self.stored_weights(), (halves[0], halves[1]), self.expert_act
        if in_fp8:
            result = fp8_experts.fp8_experts(hidden.to(dtype), weights, *rows, codes, pair, act, keep=keep)
        else:
            biases = biases_of(self, dtype)
            result = gated_experts(
                hidden.to(dtype), weights, *rows, codes, pair, act, gemm, biases, self.stored_as, keep
            )
        return result.to(hidden.dtype)

    def run_grouped(self, outermost: Any) -> None:
        run_grouped(outermost)


class Fp8Experts(StoresRows, QuantizedExperts):
    source_dtype: torch.dtype
    """The dtype that the weights had before they were quantized."""

    def stored_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        first, last = super().stored_weights()
        return [_matrices(tensor) for tensor in first], [_matrices(tensor) for tensor in last]

    def store_rows(self, name: str, into: Tensor, first: int, rows: Tensor) -> None:
        rows = rows.to(into.device, self.source_dtype)
        parts = self.stored_names[name]
        weights = fp8_experts.quantize_experts(rows, len(parts) > 2)
        into.copy_(weights.codes)
        at = first - chunk_of(self._parameters[name]).offset[0]  # type: ignore[arg-type]  # _hold() has put it there
        for part, tensor in zip(parts[1:], weights[1:], strict=False):
            assert tensor is not None
            _matrices(local(getattr(self, part)))[at : at + len(rows)] = tensor
        if not self.rounding:
            lost = fp8_experts.dequantize_experts(weights.codes[:1], weights.scales[:1], torch.float32)[0]
            self.rounding = ((lost - rows[0].float()).norm() / rows[0].float().norm()).item()

    def complete_rows(self, world: World) -> None:
        """Each expert is complete when it is stored."""


def _matrices(tensor: Tensor) -> Tensor:
    """A tensor of _hold_nothing() in the shape of fp8.Weight."""
    return tensor.squeeze(-1) if tensor.dim() == 4 else tensor


class ExpertsInFewBits(QuantizedExperts):
    """Experts whose codes have another shape than the weights. peft reads the weights' shapes from the properties."""

    @property
    def gate_up_proj(self) -> Tensor:
        return self._in_shape(TENSORS[0])

    @property
    def down_proj(self) -> Tensor:
        return self._in_shape(TENSORS[1])

    def _in_shape(self, name: str) -> Tensor:
        """An integer tensor with the shape of the weight, on its device. It takes the memory of one number."""
        codes = self._parameters[name]
        assert codes is not None
        return torch.empty((), dtype=torch.uint8, device=codes.device).expand(self.stored_shapes[name])
