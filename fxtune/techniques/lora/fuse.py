"""Modules of a model whose adapters run in the operators of kernels/fused_lora.py, in place of peft's linear by linear.

peft wraps each frozen linear in a module of its own, which is right for names, saving and merging and slow to run. So the
modules stay what they are, and what calls them changes: a gated MLP whose three linears are adapted runs as one operator, the
projections of an attention that read the same hidden states as one, any other adapted linear as one by itself. As
techniques/liger.py does, each such module gets a subclass of what it was as its class, with another forward: parameters, names,
isinstance and peft's own functions are as before, and all layers share the class, so they share a compiled graph too.

An attention calls `self.q_proj(hidden_states)` somewhere inside; its own code runs as it is, and finds the results there. Whether
an attention's and an MLP's code is of that form is read in its source, since nothing else says so; where it is not, each linear
is fused alone.

A group's frozen weights are laid into one buffer with room for the adapters (kernels/lora_base.py), one group at a time, and
the parameters become views of it: nothing is stored twice. With adapters switched off or merged (peft's disable_adapter(),
merge_adapter()) the modules' own forward runs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxtune.kernels.quantized import is_quantized
from fxtune.techniques.checkpointing.policy import name_of
from fxtune.techniques.lora.frozen_weights import ADAPTER, storage_kind
from fxtune.techniques.lora.modules import MLP, fuse_attention, fuse_linear, fuse_mlp

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""What kernels/gated.py knows, by its names there."""
_WHAT = {"attention": "attentions' projections", "mlp": "whole MLPs", "linear": "single linears"}
_GATED = re.compile(
    r"defforward\(self,(?P<x>\w+)(:[\w.]+)?\)(->[\w.]+)?:(?P<y>\w+)=self\.down_proj\(self\.(?P<act>\w+)\("
    r"self\.gate_proj\((?P=x)\)\)\*self\.up_proj\((?P=x)\)\)return(?P=y)$"
)
"""A gated MLP's forward without its spaces."""
_TURNED = re.compile(
    "".join(rf"(?P<{x}>\w+)=self\.{x}_proj\(hidden_states\)\.view\(hidden_shape\)\.transpose\(1,2\)" for x in "qkv")
    + r"cos,sin=position_embeddings(?P=q),(?P=k)=apply_rotary_pos_emb\((?P=q),(?P=k),cos,sin\)"
)
"""The beginning of an attention that does nothing between its projections and RoPE, without its spaces."""


@dataclass
class Fusion:
    """What fuse() did to a model."""

    groups: Counter[str] = field(default_factory=Counter)
    """Operators in a forward pass: `mlp`, `attention`, `linear`."""
    left: Counter[str] = field(default_factory=Counter)
    """Adapted modules that run as peft runs them, by the reason."""
    experts: bool = False
    """Whether some are a mixture's experts, which may not run at all."""

    def told(self) -> str:
        parts = [f"{count} {_WHAT[name]}" for name, count in self.groups.items()]
        return (", ".join(parts) or "none") + "".join(
            f"; {count} left to peft: {why}" for why, count in self.left.items()
        )


def hindrance(facts: Facts) -> str | None:
    """Why no adapter can run fused under these options, or None: some can, if the model has linears that they adapt."""
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
    """Whether techniques.lora will run the MLPs of `model` (technique.skeleton(), None: not known) as one operator each."""
    lora = facts.techniques.lora
    if lora.fused == "off" or (lora.fused == "auto" and facts.device == "cpu") or hindrance(facts) or model is None:
        return False
    wanted = lora.target_modules
    if not ("all-linear" in wanted or set(MLP) <= set(wanted)):
        return False
    return any(
        _activation(module) and all(getattr(module, name).bias is None for name in MLP) for module in model.modules()
    )


def calls(run: Callable[[], Any]) -> Counter[str]:
    """Call `run`, operator by operator, and count those of fused adapters, by name."""
    with torch.compiler.set_stance("force_eager"), _Count() as mode:
        run()
    return mode.found


class _Count(TorchDispatchMode):
    supports_higher_order_operators = True  # flex_attention is one

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := name_of(func)).startswith("fxtune.lora_"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def fuse(model: nn.Module) -> Fusion:
    """Let the adapters of a PeftModel run fused, in place, where they can."""
    from peft.tuners.lora import LoraLayer

    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    experts = any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    done, seen = Fusion(experts=experts), set()  # type: tuple[Fusion, set[int]]
    for module in list(model.modules()):
        if names := _projections(module):
            fuse_attention(module, names, _turns(module, names))
            done.groups["attention"] += 1
        elif act := _one_mlp(module):
            names = list(MLP)
            fuse_mlp(module, act)
            done.groups["mlp"] += 1
        seen |= {id(getattr(module, name)) for name in names}
    for module in list(model.modules()):
        if isinstance(module, LoraLayer) and id(module) not in seen:
            if why := unfit(module):
                done.left[why] += 1
            else:
                done.groups["linear"] += 1
                fuse_linear(module)
    return done


def unfit(module: Any) -> str | None:
    """Why this module of peft's cannot run fused, or None: it can."""
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


def fused_mlp(module: Any) -> bool:
    """Whether `module` is an MLP that runs as one operator. Its `keep`, `recomputed` and `tiles` may be set, see there."""
    return getattr(module, "fused", None) == "mlp"


def groups_of(module: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and (in, out) of each linear that runs inside an operator `fxtune::lora_linear` with others, with the group's
    out: an operator is known by the sizes of all its linears together.
    """
    for part in module.modules():
        if getattr(part, "fused", None) == "attention":
            linears = [getattr(part, name) for name in part.fused_names]  # type: ignore[union-attr]
            for name in part.fused_names:  # type: ignore[union-attr]
                yield str(name), (linears[0].in_features, sum(linear.out_features for linear in linears))


def _one_mlp(module: Any) -> str | None:
    """The activation of an MLP that can run as one operator."""
    if _adapted(module, MLP) != list(MLP):
        return None
    linears = [getattr(module, name) for name in MLP]
    plain = all(linear.get_base_layer().bias is None for linear in linears) and (
        storage_kind(linears[0]),
        _dtype(linears[0]),
    ) == (storage_kind(linears[1]), _dtype(linears[1]))
    return _activation(module) if plain else None


def _projections(module: Any) -> list[str]:
    """The projections of an attention that can run as one operator; nothing where there are not two of them."""
    attention: Any = type(module)
    names = [name for name in _adapted(module, PROJECTIONS) if _reads_hidden_states(attention, name)]
    linears = [getattr(module, name) for name in names]
    alike = (
        len({(storage_kind(one), _dtype(one), one.get_base_layer().bias is None, one.in_features) for one in linears})
        == 1
    )
    return names if alike and len(names) > 1 else []


def _dtype(module: Any) -> torch.dtype:
    """Of the weight that an adapted linear is over; one buffer has one."""
    dtype: torch.dtype = module.get_base_layer().weight.dtype
    return dtype


def _adapted(module: Any, names: Sequence[str]) -> list[str]:
    """Those of `names` that are adapted linears of this module and can run fused."""
    from peft.tuners.lora import LoraLayer

    children = dict(module.named_children())
    return [name for name in names if isinstance(children.get(name), LoraLayer) and not unfit(children[name])]


def _turns(module: Any, names: Sequence[str]) -> bool:
    """Whether an attention has our own RoPE (techniques.liger.rope), which then can be part of what its projections are."""
    attention: Any = type(module)
    return (
        tuple(names) == PROJECTIONS
        and getattr(module, "liger", None) == "rope"
        and bool(_TURNED.search(_source(attention)))
    )


@functools.cache
def _reads_hidden_states(kind: Any, name: str) -> bool:
    """Whether the forward of this class calls `name` once, with the hidden_states that it was given, and does nothing else with
    it: what stands for a projection there has no weight to look at.
    """
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))))
    except (OSError, TypeError, SyntaxError):
        return False
    uses = sum(isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{name}" for node in nodes)
    lines = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node) == f"self.{name}(hidden_states)"
    ]
    others = [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Name) and node.id == "hidden_states" and isinstance(node.ctx, ast.Store)
    ]
    return uses == len(lines) == 1 and not any(line <= lines[0] for line in others)


def _activation(mlp: Any) -> str | None:
    """The activation of an MLP that is down(act(gate(x)) * up(x)), None for any other."""
    kind: Any = type(mlp)
    found = _GATED.search(_source(kind))
    if found is None:
        return None
    act, values = getattr(mlp, found["act"]), torch.linspace(-6, 6, 49)
    for name, function in ACTIVATIONS.items():
        with torch.no_grad():
            if torch.allclose(act(values), function(values), rtol=1e-6, atol=1e-6):
                return name
    return None


@functools.cache
def _source(kind: Any) -> str:
    """The code of a class's forward without spaces, comments and documentation; nothing where there is none to read."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""
    source = re.sub(r'"""[\s\S]*?"""|#.*', "", source)
    return re.sub(r"\s", "", source)
