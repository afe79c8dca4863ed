"""Fuses the adapters of a PeftModel: a few large operators replace peft's linear-by-linear computation.

peft wraps each frozen linear in a module of its own. That is right for names, saving and merging, and slow to run. So
the modules stay, and the modules that call them change (fused_modules.py). One operator of kernels/fused_lora.py runs
a whole gated MLP whose three linears are adapted, another one the projections of an attention that read the same
hidden states, and another one each remaining adapted linear. families.py decides which modules can run so. A group's
frozen weights become one parameter (frozen_weights.py), one group at a time, and nothing is stored twice.

If adapters are switched off or merged (peft's disable_adapter(), merge_adapter()), the modules' own forward runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxtune.system.profiler import OperatorCounter
from fxtune.techniques.lora.families import OTHER, family_of, mlp_activation, observe_attentions, runs_on_given
from fxtune.techniques.lora.frozen_weights import ADAPTER, storage_kind
from fxtune.techniques.lora.fused_modules import fuse_attention, fuse_linear, fuse_mlp
from fxtune.techniques.quantized_modules import is_quantized

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

MLP = OTHER.mlp
_TITLES = {"attention": "attentions' projections", "mlp": "whole MLPs", "linear": "single linears"}


@dataclass
class Fusion:
    """The result of fuse(): which modules run fused, and why others do not."""

    operators: Counter[str] = field(default_factory=Counter)
    """Operators in a forward pass: `mlp`, `attention`, `linear`."""
    left: Counter[str] = field(default_factory=Counter)
    """Adapted modules that run as peft runs them: their number by reason."""
    experts: bool = False
    """Whether some operators belong to experts of a mixture. An expert runs only if a token is routed to it."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user about modules that have the names of a fused group but compute something else."""

    def describe(self) -> str:
        parts = [f"{count} {_TITLES[name]}" for name, count in self.operators.items()]
        return (", ".join(parts) or "none") + "".join(
            f"; {count} left to peft: {why}" for why, count in self.left.items()
        )

    def note(self, text: str) -> None:
        if (line := f"{text}, so these linears run one by one") not in self.notes:
            self.notes.append(line)


def obstacle(facts: Facts) -> str | None:
    """Why no adapter can run fused under these options, or None if some can."""
    lora, quantize = facts.techniques.lora, facts.techniques.quantize
    if not lora.enabled:
        return "techniques.lora.enabled=false leaves no adapters to fuse"
    if lora.dropout:
        return f"techniques.lora.dropout={lora.dropout} gives each adapter an input of its own"
    if lora.dora:
        return "techniques.lora.dora=true scales each weight anew in every step"
    if quantize.enabled and quantize.compute_dtype.value not in ("auto", facts.compute_dtype):
        return (
            f"techniques.quantize.compute_dtype={quantize.compute_dtype.value} is not what the rest computes in, "
            f"{facts.compute_dtype}"
        )
    return None


def fuses_mlps(facts: Facts, model: nn.Module | None) -> bool:
    """Whether techniques.lora will run each MLP as one operator. `model`: its skeleton(), or None."""
    lora = facts.techniques.lora
    if lora.fused == "off" or (lora.fused == "auto" and facts.device == "cpu") or obstacle(facts) or model is None:
        return False
    names, targets = family_of(model).mlp, lora.target_modules
    if not ("all-linear" in targets or set(names) <= set(targets)):
        return False
    return any(
        all(isinstance(linear, nn.Linear) and linear.bias is None for linear in linears)
        and mlp_activation(module, names) is not None
        for module in model.modules()
        if len(linears := [child for name, child in module.named_children() if name in names]) == len(names)
    )


def fuse(model: Any) -> Fusion:
    """Run the adapters of a PeftModel fused, in place, where that is possible."""
    from peft.tuners.lora import LoraLayer

    config, family = model.config.get_text_config(), family_of(model)
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    done, grouped = Fusion(experts=experts), set()  # type: tuple[Fusion, set[int]]
    attentions = {}
    for module in list(model.modules()):
        linears = _fusible(module, family.mlp)
        if len(linears) == len(family.mlp) and _siblings([*linears.values()][:2]) and not _biased(linears.values()):
            if act := mlp_activation(module, family.mlp):
                fuse_mlp(module, family.mlp, act)
                done.operators["mlp"] += 1
                grouped |= {id(linear) for linear in linears.values()}
            else:
                done.note(f"{type(module).__name__} does not compute down(act(gate(x)) * up(x))")
        elif len(linears := _fusible(module, family.attention)) > 1:
            attentions[module] = linears
    for module, call in (observe_attentions(model, attentions) if attentions else {}).items():
        linears = {name: linear for name, linear in attentions[module].items() if name in call.projected()}
        names, title = list(linears), type(module).__name__
        if len(names) > 1 and _siblings([*linears.values()]) and runs_on_given(module, names, call, rotated=False):
            can_rotate = (
                family.rope_follows and getattr(module, "liger", None) == "rope" and names == [*family.attention]
            )
            rotate = can_rotate and runs_on_given(module, names, call, rotated=True)
            fuse_attention(module, names, family.attention[-1], rotate)
            done.operators["attention"] += 1
            grouped |= {id(linear) for linear in linears.values()}
        else:
            names = []
        if _siblings([*attentions[module].values()]) and names != [*attentions[module]]:
            alone = ", ".join(name for name in attentions[module] if name not in names)
            done.note(f"{title} does more with {alone} than project its own input")
    for module in list(model.modules()):
        if isinstance(module, LoraLayer) and id(module) not in grouped:
            if why := unfit(module):
                done.left[why] += 1
            else:
                done.operators["linear"] += 1
                fuse_linear(module)
    return done


def unfit(module: Any) -> str | None:
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


def _fusible(module: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """The children of this module with one of `names` that are adapted linears and can run fused."""
    from peft.tuners.lora import LoraLayer

    children = dict(module.named_children())
    return {
        name: children[name]
        for name in names
        if isinstance(children.get(name), LoraLayer) and not unfit(children[name])
    }


def _siblings(linears: Sequence[Any]) -> bool:
    """Whether the frozen weights of these linears can be stacked."""
    return (
        len(
            {
                (
                    storage_kind(one),
                    one.get_base_layer().weight.dtype,
                    one.get_base_layer().bias is None,
                    one.in_features,
                )
                for one in linears
            }
        )
        == 1
    )


def _biased(linears: Iterable[Any]) -> bool:
    return any(linear.get_base_layer().bias is not None for linear in linears)


def is_fused_mlp(module: Any) -> bool:
    """Whether `module` is an MLP that runs as one operator; see fuse_mlp() for the attributes that may be set."""
    return getattr(module, "fused", None) == "mlp"


def group_sizes(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and (in, out) of each linear that runs with others in one operator `fxtune::lora_linear`. `out` is the
    group's, since the operator is known by the sizes of all its linears together.
    """
    for module in model.modules():
        if getattr(module, "fused", None) == "attention":
            frozen: Any = module.frozen
            for name in module.fused_names:  # type: ignore[union-attr]
                yield str(name), (frozen.in_size, sum(frozen.out_sizes))


def count_operators(run: Callable[[], Any]) -> Counter[str]:
    """Call `run` without compiled code, and count the operators of fused adapters by name."""
    counter = OperatorCounter(lambda name, _: name if name.startswith("fxtune.lora_") else None)
    with torch.compiler.set_stance("force_eager"), counter:
        run()
    return counter.counts
