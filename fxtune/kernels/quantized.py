"""Frozen linears whose weights lie in 4 or 8 bits. nf4 and int8 are multiplied in 16: y = x W^T with W made anew for each use.

A weight that is never trained needs its bits only while it is being multiplied. It is dequantised into a 16-bit buffer
before the matmul, forward and again backward, and nothing 16-bit outlives the operator. That costs one pass over the weight
each time, and the matmul itself runs at full speed: at 16k tokens an H200 spends 50 times longer in it.

nf4: blocks of 64 weights share a scale, and each is one of 16 values that are equally likely under a normal distribution
(QLoRA, arXiv 2305.14314); with double quantisation the scales are themselves 8-bit in blocks of 256. Through bitsandbytes,
whose kernels are fused, or torchao, which is plain torch and always quantises twice.

int8: one scale for each output row. Our own matmul over what the library has stored, since the libraries' do not suit
training: bitsandbytes' rounds the activations to 8 bits too and keeps them for a gradient that nobody asks for, out of
checkpointing's reach; torchao's keeps each 16-bit weight from forward to backward, and with that the memory that it saved.

fp8: is multiplied as it is, twice as fast, and saves no memory: see kernels/fp8.py.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.kernels import fp8

NF4_BLOCK, SCALE_BLOCK = 64, 256


def bytes_per_weight(kind: str, double: bool = True) -> float:
    """Bytes that a quantised linear takes for each of its weights, scales included.

    `kind`: nf4, int8 or fp8; `double`: whether nf4's scales are quantised, too. Row scales (int8's and fp8's, 4 bytes a row) are
    counted as if rows were 4,096 long. fp8 includes the transpose.
    """
    if kind in ("int8", "fp8"):
        return (1 + 4 / 4096) * (2 if kind == "fp8" else 1)
    scales = 1 / NF4_BLOCK + 4 / (NF4_BLOCK * SCALE_BLOCK) if double else 4 / NF4_BLOCK
    return 0.5 + scales


def quantized(
    linear: nn.Linear, kind: str, library: str, double: bool, compute: torch.dtype, device: torch.device
) -> nn.Linear:
    """A frozen linear on `device` that computes what `linear` does, with its weight stored as `kind` (nf4, int8, fp8).

    `library`: bitsandbytes or torchao; not read for fp8. `double`: also quantise nf4's scales. `compute`: the dtype that the
    weight is dequantised to and the matmul runs in; inputs are cast to it and the output back to theirs. fp8's products are
    added up in float32 and rounded to bfloat16. `linear` is left as it is.
    """
    make = (
        _fp8
        if kind == "fp8"
        else {
            ("nf4", "bitsandbytes"): _nf4_bitsandbytes,
            ("nf4", "torchao"): _nf4_torchao,
            ("int8", "bitsandbytes"): _int8_bitsandbytes,
            ("int8", "torchao"): _int8_torchao,
        }[kind, library]
    )
    made = make(linear, linear.weight.detach().to(device), compute, double)
    bias = linear.bias
    made.bias = None if bias is None else nn.Parameter(bias.detach().to(device, compute), requires_grad=False)
    return made.train(linear.training)


def is_quantized(module: nn.Module) -> bool:
    """Whether `module` is one that `quantized` made."""
    return hasattr(module, "fxtune_quantized")


@torch.no_grad()
def dequantized(module: Any) -> torch.Tensor:
    """The weight that a quantised linear multiplies by, [out, in] in the dtype that it computes in."""
    if isinstance(module, _Fp8):
        return fp8.dequantize_weight(module.weight, module.scales, module.compute_dtype)
    if hasattr(module, "codes"):
        return _int8_weight(module.codes, module.scale, module.compute_dtype)
    if module.fxtune_quantized == "nf4/torchao":
        return module.weight.to(module.compute_dtype)
    weight: torch.Tensor = bitsandbytes().functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return weight.to(module.compute_dtype)


def packed(module: Any) -> list[torch.Tensor]:
    """What a linear that `quantized` made stores, as plain tensors for an operator; `unpacked` reads them, but for fp8's."""
    if isinstance(module, _Fp8):
        return [tensor.detach() for tensor in module.held()]
    if hasattr(module, "codes"):
        return [module.codes, module.scale]
    weight = module.weight
    if module.fxtune_quantized == "nf4/torchao":
        return [
            weight.quantized_data,
            weight.quantized_scalers,
            weight.quantization_factor,
            weight.scaler_mean,
            weight.nf4,
        ]
    state = weight.quant_state
    return [weight.data, state.absmax, state.code] + (
        [state.offset.reshape(1), state.state2.absmax, state.state2.code] if state.nested else []
    )


@torch.no_grad()
def grouped(modules: Sequence[Any]) -> list[torch.Tensor]:
    """What an operator is given for several linears of one kind that read the same input (kernels/frozen_base.py).

    In fp8 that is one weight made of all of them, since one product takes one matrix. Otherwise it is what each stores.
    """
    if len(modules) == 1 or not isinstance(modules[0], _Fp8):
        return [tensor for module in modules for tensor in packed(module)]
    codes, scales = torch.cat([one.weight for one in modules]), torch.cat([one.scales for one in modules], 1)
    return list(fp8.with_transpose(codes, scales))


@torch.no_grad()
def unpacked(kind: str, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Dequantise to `out` [out, in], contiguous, what `packed` gave of a module whose fxtune_quantized is `kind`."""
    if kind.startswith("int8/"):
        torch.mul(tensors[0], tensors[1].unsqueeze(1), out=out)
    elif kind == "nf4/torchao":
        codes, scales, factor, mean, values = tensors
        kind_of_tensor = torchao().NF4Tensor
        of_shape = sys.modules[kind_of_tensor.__module__].SubclassTensorArgs
        stored = kind_of_tensor(
            of_shape(out.shape, out.stride(), 0, values.dtype, out.device, False),
            NF4_BLOCK,
            out.numel() // NF4_BLOCK,
            SCALE_BLOCK,
            scales,
            factor,
            mean,
            codes,
            values,
        )
        out.copy_(stored.get_original_weight())
    else:
        assert kind == "nf4/bitsandbytes", kind
        functional, outer = bitsandbytes().functional, None
        codes, absmax, values, *nested = tensors
        if nested:
            outer = functional.QuantState(absmax=nested[1], code=nested[2], blocksize=SCALE_BLOCK, dtype=torch.float32)
        state = functional.QuantState(
            absmax=absmax,
            shape=out.shape,
            code=values,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=out.dtype,
            offset=nested[0] if nested else None,
            state2=outer,
        )
        if out.is_cuda:
            functional.dequantize_4bit(codes, state, out=out)
        else:  # where the library has no kernel that writes to a given place
            out.copy_(functional.dequantize_4bit(codes, state))


def stored_bytes(module: Any) -> int:
    """Bytes of a quantised linear's weight, scales included."""
    if isinstance(module, _Fp8):
        tensors = list(module.held())
    elif hasattr(module, "codes"):
        tensors = [module.codes, module.scale]
    elif module.fxtune_quantized == "nf4/torchao":
        weight = module.weight
        tensors = [
            weight.quantized_data,
            weight.quantized_scalers,
            weight.quantization_factor,
            weight.scaler_mean,
            weight.nf4,
        ]
    else:
        state = module.weight.quant_state
        tensors = [module.weight.data, state.absmax, state.code]
        if state.nested:
            tensors += [state.state2.absmax, state.state2.code, state.offset]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def bitsandbytes() -> Any:
    """The package, which takes a second to import and tells of kernels that it does not need here."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes


def torchao() -> Any:
    """torchao.quantization; the package tells of every extension that was built for another torch."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    import torchao.quantization

    return torchao.quantization


def _nf4_bitsandbytes(linear: nn.Linear, weight: torch.Tensor, compute: torch.dtype, double: bool) -> Any:
    library = bitsandbytes().nn
    made = library.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=compute,
        compress_statistics=double,
        quant_type="nf4",
        device="meta",
    )
    made.weight = library.Params4bit(
        weight, requires_grad=False, compress_statistics=double, quant_type="nf4", module=made
    ).to(weight.device)
    # Else an evaluation on a CPU repacks the weight for a kernel that has no backward, for good.
    made.support_avx512bf16_for_cpu = False
    made.fxtune_quantized = "nf4/bitsandbytes"
    return made


def _nf4_torchao(linear: nn.Linear, weight: torch.Tensor, compute: torch.dtype, double: bool) -> Any:
    made: Any = _Cast(linear.in_features, linear.out_features, bias=False, device="meta")
    tensor = torchao().NF4Tensor.from_tensor(weight, NF4_BLOCK, SCALE_BLOCK)
    made.weight = nn.Parameter(tensor, requires_grad=False)
    made.compute_dtype, made.fxtune_quantized = compute, "nf4/torchao"
    return made


def _int8_bitsandbytes(linear: nn.Linear, weight: torch.Tensor, compute: torch.dtype, double: bool) -> Any:
    library = bitsandbytes()
    made = _int8_class()(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, device="meta")
    # Not Int8Params.to(), which quantises what comes from a CPU and leaves what is on a card as it is.
    codes, largest, _ = library.functional.int8_vectorwise_quant(weight.to(torch.float16))
    made.weight = library.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=largest)
    made.init_8bit_state()  # where peft looks for the scales
    return _with_codes(made, made.state.CB, made.state.SCB / 127, compute, "int8/bitsandbytes")


def _int8_torchao(linear: nn.Linear, weight: torch.Tensor, compute: torch.dtype, double: bool) -> Any:
    made: Any = _Int8(linear.in_features, linear.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight.float(), requires_grad=False)  # so that the scales are float32
    torchao().quantize_(made, torchao().Int8WeightOnlyConfig(version=2))
    made.weight.requires_grad_(False)
    return _with_codes(made, made.weight.qdata, made.weight.scale.flatten(), compute, "int8/torchao")


def _fp8(linear: nn.Linear, weight: torch.Tensor, compute: torch.dtype, double: bool) -> Any:
    made = _Fp8(linear.in_features, linear.out_features, bias=False, device="meta")
    made.compute_dtype, made.fxtune_quantized = compute, "fp8"
    made.hold(fp8.quantize_weight(weight))
    return made


def _with_codes(made: Any, codes: torch.Tensor, scale: torch.Tensor, compute: torch.dtype, name: str) -> Any:
    """Lay out as buffers what the matmul reads, codes int8 [out, in] (the library's own memory) and scale float32 [out]."""
    made.register_buffer("codes", codes, persistent=False)
    made.register_buffer("scale", scale, persistent=False)
    made.compute_dtype, made.fxtune_quantized = compute, name
    return made


class _Cast(nn.Linear):
    """Computes in its own dtype, whatever it is given. torchao's tensors come before autocast, which does not reach them."""

    compute_dtype: torch.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.to(self.compute_dtype), self.weight, self.bias).to(input.dtype)


class _Fp8(nn.Linear):
    """Two products in fp8. Its `weight` are the codes as uint8: adapters take over the dtype of a weight that is a float."""

    compute_dtype: torch.dtype
    fxtune_quantized: str
    scales: torch.Tensor
    back: torch.Tensor
    back_scales: torch.Tensor

    def hold(self, weight: fp8.Weight) -> None:
        self.weight = nn.Parameter(weight.codes, requires_grad=False)
        for name in ("scales", "back", "back_scales"):
            self.register_buffer(name, getattr(weight, name), persistent=False)

    def held(self) -> fp8.Weight:
        return fp8.Weight(self.weight, self.scales, self.back, self.back_scales)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = fp8.linear(input.to(self.compute_dtype), self.held())
        return (output if self.bias is None else output + self.bias).to(input.dtype)


class _Int8Forward:
    """The forward pass of a linear with `codes` and `scale`."""

    codes: torch.Tensor
    scale: torch.Tensor
    bias: Any
    compute_dtype: torch.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = _Int8Matmul.apply(input.to(self.compute_dtype), self.codes, self.scale)
        return (output if self.bias is None else output + self.bias).to(input.dtype)


class _Int8(_Int8Forward, nn.Linear):
    pass


@functools.cache
def _int8_class() -> Any:
    """Made when bitsandbytes is there: peft adapts, merges and decomposes (DoRA) what is a bitsandbytes linear."""
    return type("Int8Linear", (_Int8Forward, bitsandbytes().nn.Linear8bitLt), {})


class _Int8Matmul(torch.autograd.Function):
    """x [..., in] times the transpose of an int8 weight [out, in]; only x has a gradient, and only the codes are kept for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        return F.linear(x, _int8_weight(codes, scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        codes, scale = ctx.saved_tensors
        return gradient @ _int8_weight(codes, scale, gradient.dtype), None, None


def _int8_weight(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes * scale, rounded once. Written to `out`, it is one kernel with no float32 copy of the weight in between."""
    return torch.mul(codes, scale.unsqueeze(1), out=torch.empty(codes.shape, dtype=dtype, device=codes.device))
