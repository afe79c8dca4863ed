"""Fuses the adapters of a PeftModel: a few large operators replace peft's linear-by-linear computation.

peft wraps each frozen linear in a separate module. These modules serve names, saving and merging, but they run slowly.
So peft's modules stay, and the modules that call them change (fused_modules.py). kernels/fused_lora.py has two
operators. One runs a whole gated MLP whose three linears are adapted. The other runs the projections of an attention
that read the same hidden states, or a single adapted linear. families.py decides which modules can run fused. The
frozen weights of each group become one parameter (frozen_weights.py), one group at a time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from fxtune.facts.options import Switch
from fxtune.facts.run import Facts
from fxtune.kernels.rotary import apply_rotary
from fxtune.models.kinds.image_decoder.parts import image_modules
from fxtune.models.peft_adapter import ADAPTER
from fxtune.models.prepared import Fusion
from fxtune.models.replacement import places, put
from fxtune.models.structure import skeleton
from fxtune.system.process.profiler import OperatorCounter
from fxtune.techniques.experts.adapted import grouped, wrappers
from fxtune.techniques.lora import families
from fxtune.techniques.lora.frozen_weights import storage_kind
from fxtune.techniques.lora.fused_modules import FusedAttention, FusedMlp, forward_of, fuse_linear
from fxtune.techniques.lora.targets import select
from fxtune.techniques.quantized_modules import is_quantized
from fxtune.upstream.transformers import rotation_of


def refusal(facts: Facts) -> str | None:
    """Why no adapter can run fused under these options, or None if some can."""
    lora, quantize = facts.techniques.lora, facts.techniques.quantize
    if not lora.enabled:
        return "techniques.lora.enabled=false leaves no adapters to fuse"
    if lora.dropout:
        return f"techniques.lora.dropout={lora.dropout} gives each adapter a different input"
    if lora.dora:
        return "techniques.lora.dora=true scales each weight anew in every step"
    if quantize.enabled and quantize.compute_dtype.value not in ("auto", facts.compute_dtype):
        dtype = quantize.compute_dtype.value
        return (
            f"techniques.quantize.compute_dtype={dtype} differs from {facts.compute_dtype}, the other products' dtype"
        )
    return None


def fuses_mlps(facts: Facts, model: nn.Module | None) -> bool:
    """Whether techniques.lora will run gated MLPs as one operator each. `model`: the model's skeleton(), or None."""
    lora = facts.techniques.lora
    if lora.fused == "off" or (lora.fused == "auto" and facts.device == "cpu") or refusal(facts) or model is None:
        return False
    adapted = set(select(model, lora).modules)
    return any(
        all(f"{path}.{name}" in adapted and getattr(module, name).bias is None for name in families.MLP)
        and families.mlp_activation(module) is not None
        for path, module in model.named_modules()
    )


def mlp_kernel(facts: Facts) -> Literal["lora", "liger", ""]:
    """The technique that runs a model's gated MLPs. Empty if fused LoRA is off or cannot run them.

    Fused LoRA runs an MLP as one operator, and Liger replaces the product inside the MLP. `auto` prefers fused LoRA,
    unless techniques.liger.kernels names Liger's kernel for the product.
    """
    if not fuses_mlps(facts, skeleton(facts.model)):
        return ""
    lora, liger = facts.techniques.lora, facts.techniques.liger
    demanded = liger.runs("swiglu") or liger.runs("geglu")
    return "liger" if demanded and lora.fused is Switch.auto else "lora"


def fuse(model: Any) -> Fusion:
    """Change a PeftModel in place, so that its adapters run fused where this is possible."""
    from peft.tuners.lora import LoraLayer

    config, attentions = model.config.get_text_config(), {}
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    fusion, where = Fusion(experts=experts), places(model)
    in_group: set[Any] = {wrapper for outermost in grouped(model) for wrapper in wrappers(outermost)}
    beside = {*image_modules(model)}
    for module in (module for module in list(model.modules()) if module not in beside):
        mlp = _fusible(module, families.MLP)
        projections = max((_fusible(module, names) for names in families.PROJECTIONS), key=len)
        biased = any(linear.get_base_layer().bias is not None for linear in mlp)
        if len(mlp) == len(families.MLP) and _can_stack(mlp[:2]) and not biased:
            if act := families.mlp_activation(module):
                put(where, module, FusedMlp(module, families.MLP, act))
                fusion.operators["mlp"] += 1
                in_group.update(mlp)
            else:
                fusion.note(f"{type(module).__name__} does not compute down(act(gate(x)) * up(x))")
        elif len(projections) > 1 and forward_of(module):
            group = itertools.chain(*families.PROJECTIONS)
            attentions[module] = [name for name in group if getattr(module, name, None) in projections]
    for module, call in (families.observe_attentions(model, attentions) if attentions else {}).items():
        names, title = [name for name in attentions[module] if call.projects(name)], type(module).__name__
        linears = [getattr(module, name) for name in names]
        if len(names) > 1 and _can_stack(linears) and families.runs_on_given(module, names, call, rotated=False):
            rotary = config.model_type in families.ROPE_FOLLOWS and rotation_of(type(module)) is apply_rotary
            rotated = (
                rotary and names == [*families.ATTENTION] and families.runs_on_given(module, names, call, rotated=True)
            )
            put(where, module, FusedAttention(module, names, rotated))
            fusion.operators["attention"] += 1
            in_group.update(linears)
        else:
            names = []
        alone = [name for name in attentions[module] if name not in names]
        if alone and _can_stack([getattr(module, name) for name in attentions[module]]):
            fusion.note(f"{title} does more with {', '.join(alone)} than project its own input")
    for module in list(model.modules()):
        if isinstance(module, LoraLayer) and module not in in_group:
            if module in beside:
                fusion.left["the part for images"] += 1
            elif why := refusal_of_module(module):
                fusion.left[why] += 1
            else:
                fusion.operators["linear"] += 1
                fuse_linear(module)
    return fusion


def refusal_of_module(module: Any) -> str | None:
    """Why an adapted module of peft cannot run fused, or None if it can."""
    linear = module.get_base_layer()
    if not isinstance(linear, nn.Linear) or ADAPTER not in module.lora_A:
        return f"{type(linear).__name__} is no linear"
    if not isinstance(module.lora_dropout[ADAPTER], nn.Identity):
        return "dropout"
    if module.lora_variant:
        return "DoRA"
    if module.lora_bias[ADAPTER] or getattr(module, "fan_in_fan_out", False):
        return "an adapter with a bias"
    if is_quantized(linear):
        return None
    plain = type(linear) is nn.Linear and type(linear.weight) in (torch.Tensor, nn.Parameter)
    return None if plain and linear.weight.is_floating_point() else f"{type(linear).__name__} with packed weights"


def _fusible(module: nn.Module, names: Sequence[str]) -> list[Any]:
    """The children of `module` with a name in `names` that are adapted linears and can run fused."""
    from peft.tuners.lora import LoraLayer

    children = [getattr(module, name, None) for name in names]
    return [child for child in children if isinstance(child, LoraLayer) and not refusal_of_module(child)]


def _can_stack(linears: Sequence[Any]) -> bool:
    """Whether the frozen weights of these linears can be stacked."""
    bases = [(storage_kind(linear), linear.in_features, linear.get_base_layer()) for linear in linears]
    return len({(kind, size, base.weight.dtype, base.bias is None) for kind, size, base in bases}) == 1


def group_sizes(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (name, (in, out) of the operator) for each linear that runs with others in one fxtune::lora_linear."""
    for module in model.modules():
        if isinstance(module, FusedAttention):
            for name in module.fused_names:
                yield name, (module.frozen.in_size, sum(module.frozen.out_sizes))


def count_operators(run: Callable[[], Any]) -> Counter[str]:
    """Call `run` without compiled code, and count the operators of fused adapters by name."""
    counter = OperatorCounter(lambda name, _: name if name.startswith("fxtune.lora_") else None)
    with torch.compiler.set_stance("force_eager"), counter:
        run()
    return counter.counts
