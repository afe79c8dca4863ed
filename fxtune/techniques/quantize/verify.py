"""The evidence, on the built model, that its base is quantized as asked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from fxtune.facts.options import QuantizeOptions, WeightFormat
from fxtune.kernels.quantized import MXFP4
from fxtune.models.prepared import PreparedModel, Quantization
from fxtune.models.replacement import PackedLinear
from fxtune.models.shards import StoresRows
from fxtune.models.structure import observing, outputs
from fxtune.system.process.profiler import observe_operators, short_name
from fxtune.system.terminal.units import GIB
from fxtune.techniques.base import Evidence
from fxtune.techniques.experts.quantized import TENSORS, QuantizedExperts
from fxtune.techniques.experts.quantized import stored_bytes as bytes_of_experts
from fxtune.techniques.quantized_modules import Fp8Embedding, Fp8Head, dequantized, stored_bytes

_evidence = partial(Evidence, "quantize")
WORST_ERROR = {"nf4": 0.15, "int8": 0.03, "fp8": 0.04, MXFP4: 0.2}
"""Largest relative error |dequantized - weight| / |weight| of each type. Normally distributed weights have 0.09 in
nf4, 0.01 in int8, 0.027 in fp8 and 0.115 in MXFP4."""
SAME = 1e-3
"""Largest relative error of experts in MXFP4 that were unpacked and packed again. The error is 0, except for float16's
smallest numbers."""


def observe(options: QuantizeOptions, prepared: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
    """Yield evidence from the packed weights and from one forward pass of `probe`."""
    model, done = prepared.module, prepared.quantization
    assert done is not None, "apply() has filled it in"
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    kinds = {module.stored_as for module in linears}
    wanted = options.type.value
    experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    kinds_of_experts = {layer.stored_as for layer in experts}
    stored = sum(map(stored_bytes, linears)) + sum(map(bytes_of_experts, experts))
    seen_as = ", ".join(sorted(kinds)) or wanted, ", ".join(sorted(kinds_of_experts))
    yield _evidence(
        _inside(f"{done.linears} linears", done.experts, wanted, done.experts_as),
        f"{_inside(str(len(linears)), len(experts), *seen_as)}, {done.share:.1%} of the model: "
        f"{done.before / GIB:.3g} GiB became {stored / GIB:.3g} GiB",
        (len(linears), len(experts), stored) == (done.linears, done.experts, done.after)
        and kinds == ({wanted} if linears else set())
        and kinds_of_experts == ({done.experts_as} if experts else set())
        and (options.type is WeightFormat.fp8 or stored < done.before),
    )
    if linears or not done.shipped:
        worst, (error, which) = WORST_ERROR[options.type.value], _error(model, done, bool(linears))
        yield _evidence(
            f"weights close to the base's (relative error below {worst})",
            f"{error:.4f} {which}",
            error < worst and (error > 0 or done.experts_as == MXFP4),  # MXFP4 may have the numbers, as in gpt-oss
        )
    if done.shipped:
        codes = sum(bool(weights[0].any()) for layer in experts for weights in layer.stored_weights())
        yield _evidence(
            "the experts that the checkpoint has in MXFP4, unchanged",
            f"{codes} tensors {done.shipped}, relative error {done.experts_error:.1g}",
            codes == len(TENSORS) * len(experts) and done.experts_error < SAME,
        )
    frozen: list[Any] = [*linears, *experts]
    trained = sum(weight.requires_grad for module in frozen for weight in module.parameters())
    made = [dequantized(linears[0]).dtype] if linears else []
    made += [layer.compute_dtype for layer in experts if options.type is not WeightFormat.fp8]
    dtypes = {str(dtype).removeprefix("torch.") for dtype in made}
    yield _evidence(
        f"frozen, dequantized to {options.compute_dtype.value}",
        f"{trained} of them trained, dequantized to {', '.join(dtypes) or 'nothing'}",
        not trained and dtypes <= {options.compute_dtype.value},
    )
    if options.head or options.embeddings:
        ends = [model.get_output_embeddings()] * options.head + [model.get_input_embeddings()] * options.embeddings
        yield _evidence(
            " and ".join(["head"] * options.head + ["embeddings"] * options.embeddings) + " in fp8",
            ", ".join(done.ends),
            all(isinstance(end, Fp8Head | Fp8Embedding) for end in ends),
        )
    if options.type is WeightFormat.fp8 or experts:
        yield from _products(options, model, done, probe, bool(linears))


def _error(model: nn.Module, done: Quantization, has_linears: bool) -> tuple[float, str]:
    """The largest |dequantized - weight| / |weight| that was measured, and the weights on which it was measured."""
    stored = [module.rounding for module in model.modules() if isinstance(module, StoresRows)]
    if divided := [rounding for rounding in stored if rounding]:
        return max(divided), f"at most in the first rows of {len(divided)} matrices"
    if done.experts and not done.shipped:
        error = max(done.experts_error, done.error if has_linears else 0.0)
        return error, "at most in the first linear and an expert of each layer"
    return done.error, "in the first linear"


def _products(
    options: QuantizeOptions, model: nn.Module, done: Quantization, probe: dict[str, Any], has_linears: bool
) -> Iterator[Evidence]:
    """Yield evidence that a forward pass calls the operators over packed weights."""
    in_fp8 = options.type is WeightFormat.fp8
    with observing(model):
        operators = {"fp8": r"^aten::_scaled_mm$", "experts": r"^fxtune::(fp8|gated)_experts$"}
        seen = observe_operators(lambda: outputs(model, **probe), operators)
    if in_fp8 and (has_linears or options.head):
        kernels = ", ".join(sorted({short_name(name) for name in seen["fp8"].kernels}))
        calls = seen["fp8"].calls
        yield _evidence(
            "products in fp8",
            f"{calls} of torch's scaled products in a forward pass" + (f" ({kernels})" if kernels else ""),
            calls > 0,
        )
    if done.experts:
        calls = seen["experts"].calls
        yield _evidence(
            f"the experts of {done.experts} layers as one operator "
            + ("in fp8" if in_fp8 else f"over {done.experts_as}"),
            f"it ran {calls} times in a forward pass",
            calls == done.experts,
        )


def _inside(linears: str, layers: int, kind: str, kind_of_experts: str) -> str:
    if not layers:
        return f"{linears} in {kind}"
    experts = f"the experts of {layers} layers in {kind_of_experts}"
    return f"{linears} and {experts}" if kind == kind_of_experts else f"{linears} in {kind} and {experts}"
