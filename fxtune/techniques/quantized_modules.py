"""Frozen linears, heads and embeddings whose weights are stored in 4 or 8 bits.

nf4: blocks of 64 weights share a scale. Each weight is one of 16 values that are equally likely under a normal
distribution (QLoRA, arXiv 2305.14314). With double quantization the scales are 8-bit numbers, too, in blocks of 256.

int8: each output row has one scale. fxtune has its own matmul, because bitsandbytes' matmul also rounds the
activations to 8 bits.

bitsandbytes stores nf4 and int8 weights, and peft knows bitsandbytes' linears.

nf4 and int8 weights are dequantized for each use (kernels/quantized.py). fp8 weights are multiplied without
dequantizing, twice as fast as in 16 bits. They take 1 byte each, or 2 bytes with their transpose (kernels/fp8.py). The
head and the token embeddings can be in fp8, too. Both are matrices [vocabulary, width] with a scale for each row, so
tied ones share their codes. Embeddings are dequantized when they are read. The head's logits are rounded by about 0.04
of their size, which shows in the reported loss.

With parallel.shard each rank has a part of the rows of the codes and of their transpose, and all scales, 4 bytes a
row. It quantizes the rows that it reads. Then each transpose is made from the codes of all ranks (complete_rows()).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.distributed.chunks import chunk_of, is_divided, local, whole
from fxtune.distributed.world import World
from fxtune.kernels import fp8
from fxtune.kernels.fp8 import E4M3, quantize_rows
from fxtune.kernels.quantized import MX_BLOCK, MXFP4, NF4_BLOCK, SCALE_BLOCK, bitsandbytes, int8_weight
from fxtune.models.replacement import PackedLinear
from fxtune.models.shards import StoresRows, mark_joined

FP8_TENSORS = ("weight", "scales", "back", "back_scales")
"""Names of an fp8 linear's tensors, in the order of fp8.Weight's fields."""
SAMPLE = 64
"""How many rows of a divided weight are used to measure its rounding."""


def bytes_per_weight(kind: str, transpose: bool = True) -> float:
    """Bytes that a quantized linear, or quantized experts, take for each weight with its share of the scales.

    `kind`: nf4, int8, fp8 or mxfp4. `transpose`: whether fp8 keeps the transpose, too. In int8 and fp8 a row has a
    scale of 4 bytes; rows are assumed to have 4,096 weights.
    """
    if kind in ("int8", "fp8"):
        return (1 + 4 / 4096) * (2 if kind == "fp8" and transpose else 1)
    if kind == MXFP4:
        return 0.5 + 1 / MX_BLOCK
    return 0.5 + 1 / NF4_BLOCK + 4 / (NF4_BLOCK * SCALE_BLOCK)


def quantized(
    linear: nn.Linear, kind: str, compute: torch.dtype, device: torch.device, transpose: bool = True
) -> nn.Linear:
    """Make a frozen linear on `device` that replaces `linear` and stores its weight as `kind` (nf4, int8, fp8).

    `compute`: the dtype of the dequantized weight and of the matmul. Inputs are cast to it, and outputs back to the
    dtype of the input. fp8 products are accumulated in float32 and rounded to bfloat16. `transpose`: whether to keep
    the transpose of an fp8 weight. `linear` does not change. If it is on the meta device, `kind` must be fp8, and the
    new linear stores rows as models/shards.py reads them.
    """
    makers: dict[str, Any] = {"fp8": functools.partial(_fp8, transpose=transpose), "nf4": _nf4, "int8": _int8}
    if linear.weight.is_meta:
        made: Any = Fp8Linear(linear.in_features, linear.out_features, bias=False, device="meta")
        made.hold(_empty_weight(linear.out_features, linear.in_features, device, transpose))
        mark_joined(made.weight, [linear.weight])
        made.source_dtype = linear.weight.dtype
    else:
        made = makers[kind](linear, linear.weight.detach().to(device))
    made.compute_dtype, made.stored_as = compute, kind
    made.bias = _bias_of(linear, compute, device)
    return made.train(linear.training)


def _bias_of(linear: nn.Linear, compute: torch.dtype, device: torch.device) -> Any:
    bias = linear.bias
    if bias is None or not bias.is_meta:
        return None if bias is None else nn.Parameter(bias.detach().to(device, compute), requires_grad=False)
    made = nn.Parameter(torch.empty_like(bias, dtype=compute), requires_grad=False)
    mark_joined(made, [bias])
    return made


def _biased(linear: nn.Linear, output: Tensor, dtype: torch.dtype) -> Tensor:
    return (output if linear.bias is None else output + linear.bias).to(dtype)


def is_quantized(module: nn.Module) -> bool:
    """Whether quantized() has made `module`."""
    return isinstance(module, PackedLinear)


@torch.no_grad()
def dequantized(module: Any) -> Tensor:
    """The dequantized weight of a quantized linear, [out, in] in the linear's compute dtype."""
    if isinstance(module, Fp8Linear):
        return fp8.dequantize_weight(whole(module.weight), module.scales, module.compute_dtype)
    if hasattr(module, "codes"):
        return int8_weight(module.codes, module.scale, module.compute_dtype)
    weight: Tensor = bitsandbytes().functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return weight.to(module.compute_dtype)


def packed(module: Any) -> list[Tensor]:
    """The tensors that a quantized module stores. kernels.quantized.unpack() reads tensors of nf4 and int8."""
    weight = module.weight
    if isinstance(module, Fp8Linear):
        return [getattr(module, name).detach() for name in module.names]
    if isinstance(module, Fp8Embedding | Fp8Head):
        return [weight, module.scales]
    if hasattr(module, "codes"):
        return [module.codes, module.scale]
    state = weight.quant_state
    return [weight.data, state.absmax, state.code, state.offset.reshape(1), state.state2.absmax, state.state2.code]


@torch.no_grad()
def grouped(modules: Sequence[Any]) -> list[Tensor]:
    """The tensors that an operator takes for several linears of one kind that read the same input
    (kernels/frozen_base.py).

    In fp8 the weights are stacked into one, because a product takes one matrix. In other kinds the result is the
    stored tensors of all linears.
    """
    if len(modules) == 1 or not isinstance(modules[0], Fp8Linear):
        return [tensor for module in modules for tensor in packed(module)]
    codes = torch.cat([module.weight for module in modules])
    scales = torch.cat([module.scales for module in modules], 1)
    transpose = "back" in modules[0].names
    if codes.is_meta:
        made = _empty_weight(len(codes), codes.shape[1], scales.device, transpose)
    else:
        made = fp8.weight_of(codes, scales, transpose)
    return [tensor for tensor in made if tensor is not None]


def stored_bytes(module: Any) -> int:
    """Bytes of a quantized module's weight and its scales, summed over the ranks that hold parts of it."""
    owner = getattr(module, "frozen_weights", module)
    if isinstance(module, Fp8Linear) and (owner.weight.is_meta or is_divided(owner.weight)):
        # Sizes are calculated: each view of a divided tensor would be an exchange between ranks.
        copies, sizes = len(module.names) // 2, (module.out_features, module.in_features)
        return copies * sizes[0] * sizes[1] + 4 * sum(sizes[:copies])
    return sum(tensor.nbytes for tensor in packed(module))


def _nf4(linear: nn.Linear, weight: Tensor) -> Any:
    library = bitsandbytes().nn
    options = {"compress_statistics": True, "quant_type": "nf4"}
    made = _nf4_class()(linear.in_features, linear.out_features, bias=False, device="meta", **options)
    made.weight = library.Params4bit(weight, requires_grad=False, module=made, **options).to(weight.device)
    made.compute_type_is_set = True  # otherwise bitsandbytes takes the dtype of the first input
    # Otherwise an evaluation on a CPU would repack the weight for a kernel without a backward pass, for good.
    made.support_avx512bf16_for_cpu = False
    return made


def _int8(linear: nn.Linear, weight: Tensor) -> Any:
    library = bitsandbytes()
    made = _int8_class()(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, device="meta")
    # Int8Params.to() cannot be used: it quantizes a weight that comes from a CPU, but not a weight on a GPU.
    codes, largest, _ = library.functional.int8_vectorwise_quant(weight.to(torch.float16))
    made.weight = library.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=largest)
    made.init_8bit_state()  # peft looks for the scales in this state
    # The matmul reads codes, int8 [out, in] in the library's own memory, and scale, float32 [out].
    made.register_buffer("codes", made.state.CB, persistent=False)
    made.register_buffer("scale", made.state.SCB / 127, persistent=False)
    return made


def _fp8(linear: nn.Linear, weight: Tensor, transpose: bool) -> Any:
    made = Fp8Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    made.hold(fp8.quantize_weight(weight, transpose))
    return made


def _empty_weight(out: int, inner: int, device: torch.device, transpose: bool) -> fp8.Weight:
    """An fp8 weight whose scales are on `device` and whose matrices have no memory yet."""
    codes = torch.empty(out, inner, dtype=torch.uint8, device="meta")
    scales, back_scales = (torch.zeros(1, size, device=device) for size in (out, inner))
    return fp8.Weight(codes, scales, *((codes.new_empty(inner, out), back_scales) if transpose else ()))


class DividedCodes(StoresRows):
    """A module whose weight is stored as fp8 codes. The codes may be divided over ranks."""

    source_dtype: torch.dtype
    """The dtype of the weights before they are quantized."""
    compute_dtype: torch.dtype
    scales: Tensor

    def store_rows(self: Any, name: str, into: Tensor, first: int, rows: Tensor) -> None:
        rows = rows.to(into.device, self.source_dtype)
        codes, scales = quantize_rows(rows, powers=True)
        into.copy_(codes.view(torch.uint8))
        self.scales[0, first : first + len(rows)] = scales.view(-1)
        if not self.rounding:
            sample = rows[:SAMPLE].float()
            lost = fp8.dequantize_rows(codes[:SAMPLE], scales[:SAMPLE]) - sample
            self.rounding = (lost.norm() / sample.norm()).item()

    def complete_rows(self: Any, world: World) -> None:
        """Collect the scales of all ranks. If the transpose is kept, make this rank's rows of it."""
        if "scales" not in self._buffers:
            return
        if not is_divided(self.weight):
            if "back" in self._parameters:
                back, self.back_scales[:] = fp8.transposed(self.weight.detach(), self.scales)
                self.back.copy_(back)
            return
        world.sum(self.scales, "collecting scales", world.weights_group)
        if "back" not in self._parameters:
            return
        chunk, own, codes = chunk_of(self.back), local(self.back), whole(self.weight)
        if len(own):
            columns = slice(chunk.offset[0], chunk.offset[0] + len(own))
            back, self.back_scales[:, columns] = fp8.transposed(codes[:, columns].contiguous(), self.scales)
            own.copy_(back)
        world.sum(self.back_scales, "collecting scales", world.weights_group)


class Fp8Linear(PackedLinear, DividedCodes, nn.Linear):
    """A linear whose products are in fp8. `weight` holds the codes as uint8: if it were a floating-point tensor, peft
    would give adapters its dtype."""

    names: tuple[str, ...]
    """The names of the stored tensors: FP8_TENSORS, or without the transpose the first two of them."""

    def hold(self, weight: fp8.Weight) -> None:
        self.weight = nn.Parameter(weight.codes, requires_grad=False)
        self.names = FP8_TENSORS if weight.back is not None else FP8_TENSORS[:2]
        for name, tensor in zip(FP8_TENSORS[1:], weight[1:], strict=True):
            if tensor is not None:
                register_frozen(self, name, tensor)

    def forward(self, input: Tensor) -> Tensor:
        weight = fp8.Weight(*(getattr(self, name) for name in self.names))
        return _biased(self, fp8.linear(input.to(self.compute_dtype), weight), input.dtype)


def register_frozen(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make `tensor` a buffer of `module`. A tensor without memory becomes a parameter, because only parameters can be
    divided over ranks."""
    if tensor.is_meta:
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(name, tensor, persistent=False)


class _Int8Forward(PackedLinear):
    """The forward pass of an int8 linear. It reads `codes` and `scale`, not `weight`."""

    codes: Tensor
    scale: Tensor
    bias: Any

    def forward(self, input: Tensor) -> Tensor:
        output = _Int8Matmul.apply(input.to(self.compute_dtype), self.codes, self.scale)
        return _biased(self, output, input.dtype)  # type: ignore[arg-type]


# Both classes derive from linears of bitsandbytes, so that peft can adapt, merge and decompose (DoRA) them.
@functools.cache
def _nf4_class() -> Any:
    return type("Nf4Linear", (PackedLinear, bitsandbytes().nn.Linear4bit), {})


@functools.cache
def _int8_class() -> Any:
    return type("Int8Linear", (_Int8Forward, bitsandbytes().nn.Linear8bitLt), {})


class _Int8Matmul(torch.autograd.Function):
    """The product of x [..., in] and the transpose of an int8 weight [out, in]. Only x has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return F.linear(x, int8_weight(codes, scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        return gradient @ int8_weight(codes, scale, gradient.dtype), None, None


class Fp8Embedding(DividedCodes, nn.Embedding):
    """An nn.Embedding whose weight holds fp8 codes. Its output is in `compute_dtype`."""

    def forward(self, input: Tensor) -> Tensor:
        scales = self.scales.to(self.weight.device)  # the device is `meta` until divided codes have memory
        codes, scales = F.embedding(input, self.weight), F.embedding(input, scales.view(-1, 1))
        return (codes.view(E4M3).to(torch.float32) * scales).to(self.compute_dtype)


class Fp8Head(DividedCodes, nn.Linear):
    """An nn.Linear whose forward product is in fp8, unlike its gradient. Its output has the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return _biased(self, fp8.head(input.to(self.compute_dtype), self.weight, self.scales), input.dtype)


@torch.no_grad()
def head_of(
    linear: nn.Linear, compute: torch.dtype, device: torch.device, shared: Fp8Embedding | None = None
) -> Fp8Head:
    """Make a frozen fp8 head on `device` from `linear`, which does not change. `shared`: the embedding that has the
    same weight."""
    made = Fp8Head(linear.in_features, linear.out_features, bias=False, device="meta")
    made.bias = _bias_of(linear, compute, device)
    return _with_row_codes(made, linear.weight, compute, device, shared)


@torch.no_grad()
def embedding_of(embedding: nn.Embedding, compute: torch.dtype, device: torch.device) -> Fp8Embedding:
    """Make a frozen fp8 embedding on `device` from `embedding`, which does not change."""
    made = Fp8Embedding(embedding.num_embeddings, embedding.embedding_dim, device="meta")
    made.padding_idx = embedding.padding_idx
    return _with_row_codes(made, embedding.weight, compute, device, None)


def _with_row_codes(
    made: Any, weight: Tensor, compute: torch.dtype, device: torch.device, shared: Fp8Embedding | None
) -> Any:
    made.source_dtype = weight.dtype
    if shared is None and weight.is_meta:
        made.weight = nn.Parameter(torch.empty_like(weight, dtype=torch.uint8), requires_grad=False)
        mark_joined(made.weight, [weight])
        scales = torch.zeros(1, len(weight), device=device)
    elif shared is None:
        codes, scales = quantize_rows(weight.detach().to(device), powers=True)
        made.weight = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        scales = scales.view(1, -1)
    else:
        made.weight, scales = shared.weight, shared.scales
    made.register_buffer("scales", scales, persistent=False)
    made.compute_dtype = compute
    return made
