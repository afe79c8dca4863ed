"""Selects the linears and experts that techniques.quantize stores, and the format of the experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fxtune.facts.options import LoraOptions, QuantizeOptions, Switch, WeightFormat
from fxtune.facts.run import Facts
from fxtune.kernels.matmul import CAPABILITY
from fxtune.models.experts import experts_of, follows_interface
from fxtune.models.kinds.image_decoder.parts import image_modules
from fxtune.models.structure import head_parts, is_named, output_head, skeleton
from fxtune.techniques.experts.quantized import TENSORS, leaves_linears
from fxtune.techniques.experts.quantized import refusal as refusal_of_experts
from fxtune.upstream.transformers import other_conversions


def linears_of(options: QuantizeOptions, model: Any, experts: bool) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """Yield (full name, parent, name in the parent, linear) of each linear to quantize: all but the head, linears for
    images and linears in `skip`. `experts`: whether experts are quantized. Yields nothing if the linears stay in 16
    bits and only experts are quantized (leaves_linears()).

    A vision encoder is small beside its decoder, and each image passes through it once, so quantizing it would save
    little. Its sizes are often no multiples of what kernels need (3,420 in Qwen2.5-VL)."""
    head, found = output_head(model), []
    others = {*image_modules(model), *head_parts(model)}
    for path, parent in model.named_modules():
        if parent in others:
            continue
        for name, module in parent.named_children():
            full = f"{path}.{name}" if path else name
            skipped = module is head or module in others or any(is_named(full, skip) for skip in options.skip)
            if isinstance(module, nn.Linear) and not skipped:
                found.append((full, parent, name, module))
    if not leaves_linears(options, experts, max((linear.weight.numel() for *_, linear in found), default=0)):
        yield from found


def takes_experts(options: QuantizeOptions, facts: Facts) -> bool:
    """Whether the experts are quantized under `facts`. The answer is valid before `auto` is decided, too."""
    return options.experts is not Switch.off and experts_refusal(options, facts) is None


def experts_refusal(options: QuantizeOptions, facts: Facts) -> str | None:
    """Why the experts cannot be quantized under `facts`; None if they can."""
    model = skeleton(facts.model)
    if model is None or not any(experts_of(model)):
        return "this model has no experts that transformers keeps as one tensor for each product"
    if options.type is WeightFormat.fp8 and facts.capability and facts.capability != CAPABILITY:
        number = ".".join(map(str, facts.capability))
        return f"grouped products in fp8 are for compute capability 9.0 (H100, H200), and this card has {number}"
    if facts.degrees.shard > 1:
        ranks = facts.degrees.shard * facts.degrees.context
        if any(experts.num_experts % ranks for experts in experts_of(model)):
            return f"{ranks} ranks cannot have equally many of them"
        if options.type is WeightFormat.mxfp4 and not facts.ships_mxfp4:
            return "ranks divide experts in mxfp4 only if the checkpoint has them so"
    paths = [path for path, module in model.named_modules() if follows_interface(module)]
    for saved in facts.techniques.lora.modules_to_save:
        if any(f".{saved}." in f".{path}." for path in paths):
            return f"techniques.lora.modules_to_save={saved} trains whole experts, and quantized ones are frozen"
    if skipped := [
        skip for skip in options.skip for name in TENSORS for path in paths if is_named(f"{path}.{name}", skip)
    ]:
        return f"techniques.quantize.skip={skipped[0]} names a part of the experts, and experts are quantized whole"
    kind = experts_type(options, facts.ships_mxfp4).value
    return next(filter(None, (refusal_of_experts(experts, kind) for experts in experts_of(model))), None)


def experts_type(options: QuantizeOptions, shipped: bool) -> WeightFormat:
    """The format in which experts are stored. `shipped`: whether the checkpoint has the experts in MXFP4."""
    return WeightFormat.mxfp4 if shipped and options.type is not WeightFormat.fp8 else options.type


def expert_weights(options: QuantizeOptions, model: nn.Module | None, facts: Facts) -> int:
    """The number of experts' weights that are quantized."""
    if model is None or not takes_experts(options, facts):
        return 0
    return sum(getattr(experts, name).numel() for experts in experts_of(model) for name in TENSORS)


def takes_rows(lora: LoraOptions, model: nn.Module | None) -> bool:
    """Whether the weights of `model`, a skeleton, can be quantized as they are read, so that no memory has to hold
    them all in 16 bits. Experts that a checkpoint has in MXFP4 must stay in MXFP4 (keeps_shipped())."""
    if lora.dora or lora.factored or lora.modules_to_save or model is None:
        return False
    return not (any(experts_of(model)) and other_conversions(model))


def keeps_shipped(options: QuantizeOptions, lora: LoraOptions, model: nn.Module | None) -> bool:
    """Whether experts that a checkpoint stores in MXFP4 are read without a change. `options` must be resolved."""
    kept = options.enabled and options.experts is Switch.on and experts_type(options, True) is WeightFormat.mxfp4
    return kept and takes_rows(lora, model)
