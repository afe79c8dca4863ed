"""The reasons why techniques.quantize cannot act as asked. They follow from the machine and the model's config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fxtune.facts.options import DType, QuantizeOptions, Switch, WeightFormat
from fxtune.facts.run import Facts
from fxtune.kernels.fp8 import MULTIPLE
from fxtune.kernels.quantized import MXFP4
from fxtune.models.structure import is_named, output_head, skeleton
from fxtune.system.terminal.units import GIB
from fxtune.techniques.lora.targets import matches
from fxtune.techniques.quantize.selection import expert_weights, experts_refusal, linears_of, takes_experts, takes_rows
from fxtune.techniques.quantized_modules import bytes_per_weight

PACKAGE = "bitsandbytes"
OLDEST = {"nf4": (6, 0), "int8": (7, 5), "fp8": (8, 9), MXFP4: (8, 0)}
"""The oldest compute capability that the kernels of each type support."""
INSTEAD = {"nf4": "Set enabled=false", "int8": "Use nf4", "fp8": "Use nf4 or int8", MXFP4: "Use nf4"}
WITHOUT_FP8 = "techniques.quantize.enabled=false, or parallel.shard=1 with techniques.quantize.type=nf4 or int8"
"""What to set if weights should be divided over ranks but fp8 cannot run. Of these types only fp8 can be divided."""


def refusals(options: QuantizeOptions, facts: Facts) -> Iterator[str]:
    """Yield each reason, with its option, why the base cannot be quantized under `facts` as the recipe asks."""
    lora, kind, fp8 = facts.techniques.lora, options.type.value, options.type is WeightFormat.fp8
    if not (lora.enabled or facts.is_frozen):
        yield (
            f"enabled: weights in {kind} cannot be trained, only adapters over them. Set "
            "techniques.lora.enabled=true, or this to false."
        )
    if facts.adds_tokens and (options.head or options.embeddings):
        yield "head, embeddings: stored in fp8, and model.add_tokens trains rows of both. Set both to false."
    if fp8:
        yield from _fp8(options, facts)
    elif options.type is not WeightFormat.mxfp4 and PACKAGE not in facts.packages:
        yield f"type: {PACKAGE} stores {kind}, and it {facts.lacks(PACKAGE)}. Install it: pip install 'fxtune[quant]'."
    if options.type is WeightFormat.mxfp4 and options.skip:
        yield "skip: mxfp4 leaves all linears as they are. Set it to []."
    if facts.device == "cuda":
        yield from _card(options, facts)
    if options.compute_dtype is DType.float16 and not fp8 and facts.compute_dtype != "float16":
        yield (
            "compute_dtype: float16 needs loss scaling, which comes with techniques.precision.autocast=float16 or "
            "model.dtype=float16. Set one of them, or compute_dtype to auto."
        )
    if lora.enabled and lora.init in ("pissa", "olora"):
        yield (
            f"enabled: techniques.lora.init={lora.init.value} moves a part of the weights into the adapter, and "
            "the rest would have to be quantized again. Use init=default."
        )
    model = skeleton(facts.model)
    if (options.head or options.embeddings) and not fp8:
        which = "head" if options.head else "embeddings"
        yield f"{which}: {kind} quantizes only the other linears. Set it to false, or type to fp8."
    elif model is not None:
        yield from _ends(options, model, facts)
    if model is not None:
        yield from _linears(options, model, facts)
    if options.experts is Switch.on and (why := experts_refusal(options, facts)):
        yield f"experts: {why}. Set it to auto."


def _fp8(options: QuantizeOptions, facts: Facts) -> Iterator[str]:
    if facts.device != "cuda":
        yield (
            f"type: fp8's products run on a GPU's tensor cores, and the device is {facts.device}. "
            f"{_instead(options.type, facts)}."
        )
    is_auto = options.compute_dtype is DType.auto
    compute = facts.compute_dtype if is_auto else options.compute_dtype.value
    if compute != "bfloat16":
        others = "techniques.precision.autocast=bfloat16 or model.dtype=bfloat16"
        change = others if is_auto else "it to auto or bfloat16"
        yield f"compute_dtype: fp8's products are bfloat16, and this asks for {compute}. Set {change}."
    if facts.techniques.lora.enabled and facts.techniques.lora.dora:
        yield (
            "type: techniques.lora.dora=true measures the norms of the weights, and peft cannot read fp8's. Use "
            "nf4 or int8."
        )


def _ends(options: QuantizeOptions, model: Any, facts: Facts) -> Iterator[str]:
    """Yield each reason why this model's head or embeddings cannot be in fp8."""
    head: Any = output_head(model)
    embedding = model.get_input_embeddings()
    if options.head and (type(head) is not nn.Linear or head.out_features % MULTIPLE or head.in_features % MULTIPLE):
        yield (
            f"head: a product in fp8 takes a plain linear with sizes of a multiple of {MULTIPLE}, and this model "
            f"has a {type(head).__name__} of {tuple(head.weight.shape)}. Set it to false."
        )
    if options.embeddings and type(embedding) is not nn.Embedding:
        yield f"embeddings: this model has a {type(embedding).__name__}, not a plain embedding. Set it to false."
    if options.embeddings and facts.tied_embeddings and not options.head:
        yield "embeddings: this model's head and embeddings are one tensor. Set head=true, too, or this to false."
    lora = facts.techniques.lora
    trained = {*lora.modules_to_save, *lora.target_modules} if lora.enabled else set()
    for option, module in (("head", head), ("embeddings", embedding)):
        path = next((path for path, part in model.named_modules() if part is module), "")
        if not getattr(options, option):
            continue
        if any(matches(path, str(target)) for target in trained):
            yield (
                f"{option}: techniques.lora trains {path}, and fp8 weights are frozen. Set it to false, or "
                "remove it from target_modules and modules_to_save."
            )
        elif lora.enabled and lora.train_tokens:
            yield (
                f"{option}: techniques.lora.train_tokens trains rows of {path}, and fp8 weights are frozen. "
                "Set it to false, or train_tokens to null."
            )


def _card(options: QuantizeOptions, facts: Facts) -> Iterator[str]:
    oldest = OLDEST[options.type.value]
    if (facts.capability or oldest) < oldest:
        number = ".".join(map(str, facts.capability or ()))
        yield (
            f"type: {options.type.value} needs compute capability {oldest[0]}.{oldest[1]}, and {facts.device_name} "
            f"has {number}. {_instead(options.type, facts)}."
        )
    if (facts.capability or (8, 0)) < (8, 0) and options.compute_dtype is DType.bfloat16:
        yield f"compute_dtype: {facts.device_name} has no bfloat16 units. Use float32, or auto."


def _linears(options: QuantizeOptions, model: nn.Module, facts: Facts) -> Iterator[str]:
    """Yield each reason why this model's linears cannot be quantized, or why the model does not fit."""
    found = [(name, linear) for name, _, _, linear in linears_of(options, model, takes_experts(options, facts))]
    total = sum(parameter.numel() for parameter in model.parameters())
    if options.type is WeightFormat.mxfp4 and not takes_experts(options, facts):
        why = experts_refusal(options, facts) or "experts=off keeps them in 16 bits"
        yield f"type: mxfp4 is for the experts of a mixture, and {why}. Use nf4."
        return
    if not found and not expert_weights(options, model, facts):
        yield (
            f"enabled: 0 % of this model's {total:,} parameters are in linears besides its head and what skip "
            "names. Set it to false."
        )
        return
    every = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name in options.skip:
        if not any(is_named(there, name) for there in every):
            there = ", ".join(sorted({path.rpartition(".")[2] for path in every}))
            yield f"skip: this model has no linear {name}. Its linears are {there}."
    lora = facts.techniques.lora
    saved = lora.modules_to_save if lora.enabled else []
    if trained := [name for name in saved if any(is_named(there, name) for there, _ in found)]:
        yield (
            f"skip: techniques.lora.modules_to_save trains {', '.join(trained)}, and quantized weights cannot be "
            "trained. Add it to skip."
        )
    odd = [name for name, linear in found if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE]
    if odd and options.type is WeightFormat.fp8:
        yield (
            f"type: fp8's products take sizes of a multiple of {MULTIPLE}, and {len(odd)} linears have others, "
            f"such as {odd[0]}. Use nf4 or int8, or name them in skip."
        )
    if facts.device == "cuda" and facts.free_memory:
        inside = sum(linear.weight.numel() for _, linear in found) + expert_weights(options, model, facts)
        yield from _memory(options, facts, total, inside)


def _memory(options: QuantizeOptions, facts: Facts, total: int, inside: int) -> Iterator[str]:
    """Yield why a model of `total` weights does not fit before or after quantization. `inside`: how many of these
    weights are quantized."""
    size = 4 if facts.dtype == "float32" else 2
    least = bytes_per_weight(options.type.value, transpose=False)
    before = total * size / GIB
    after = before - inside * (size - least) / GIB
    free, host = facts.free_memory / GIB, facts.host_memory / GIB
    if (parts := facts.degrees.shard) > 1:  # each rank reads and quantizes one matrix after the other
        after, before = after / parts, 0.0
    if after > free:
        which = "the quantized model" if parts == 1 else "a rank's part of the quantized model"
        yield (
            f"enabled: {which} takes {after:.1f} GiB, and the card has {free:.1f} GiB free. Use a "
            "smaller model" + ("." if options.type in (WeightFormat.nf4, WeightFormat.mxfp4) else ", or type=nf4.")
        )
    elif before > max(free, host) and (
        (facts.ships_mxfp4 and not takes_experts(options, facts))
        or not takes_rows(facts.techniques.lora, skeleton(facts.model))
    ):
        yield (
            f"enabled: before quantization the model takes {before:.1f} GiB in {facts.dtype}, and neither the "
            f"card ({free:.1f} GiB free) nor the host ({host:.1f} GiB) holds that. Use a smaller model"
            + (", or model.dtype=bfloat16." if size == 4 else ".")
        )


def _instead(kind: WeightFormat, facts: Facts) -> str:
    """What to set if `kind` cannot run on this device."""
    if kind is not WeightFormat.nf4 and facts.degrees.shard > 1:
        return f"Set {WITHOUT_FP8}"
    return INSTEAD[kind.value]
