"""Modules of a model whose adapters run in the operators of kernels/fused_lora.py, in place of peft's linear by linear.

peft wraps each frozen linear in a module of its own, which is right for names, saving and merging and slow to run. So the
modules stay what they are, and what calls them changes: a gated MLP whose three linears are adapted runs as one operator, the
projections of an attention that read the same hidden states as one, any other adapted linear as one by itself. As
techniques/liger.py does, each such module gets a subclass of what it was as its class, with another forward: parameters, names,
isinstance and peft's own functions are as before, and all layers share the class, so they share a compiled graph too.

An attention calls `self.q_proj(hidden_states)` somewhere inside. Its own code runs as it is, over a stand-in for the module
(`_Seen`) whose projections hand out what the operator has computed for those hidden states. Whether an attention's and an
MLP's code is of that form is read in its source, since nothing else says so; where it is not, each linear is fused alone.

A group's frozen weights are laid into one buffer with room for the adapters (kernels/lora_base.py), one group at a time, and
the parameters become views of it: nothing is stored twice. With adapters switched off or merged (peft's disable_adapter(),
merge_adapter()) the modules' own forward runs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fxtune.kernels.fused_lora import lora_linear, lora_mlp
from fxtune.kernels.lora_base import DENSE, augment, weight_views
from fxtune.kernels.quantized import grouped, is_quantized
from fxtune.kernels.selective import name_of
from fxtune.kernels.tiled import kept_early
from fxtune.world import Facts

ADAPTER = "default"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh")}
"""What kernels/gated.py knows, by its names there."""
_WHAT = {"attention": "attentions' projections", "mlp": "whole MLPs", "linear": "single linears"}
_GATED = re.compile(r"defforward\(self,(?P<x>\w+)(:[\w.]+)?\)(->[\w.]+)?:(?P<y>\w+)=self\.down_proj\(self\.(?P<act>\w+)\("
                    r"self\.gate_proj\((?P=x)\)\)\*self\.up_proj\((?P=x)\)\)return(?P=y)$")
"""A gated MLP's forward without its spaces."""


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
        return (", ".join(parts) or "none") + "".join(f"; {count} left to peft: {why}" for why, count in self.left.items())


def hindrance(facts: Facts) -> str | None:
    """Why no adapter can run fused under these options, or None: some can, if the model has linears that they adapt."""
    lora = facts.techniques.get("lora", {})
    if not lora:
        return "techniques.lora.enabled=false leaves no adapters to fuse"
    if lora["dropout"]:
        return f"techniques.lora.dropout={lora['dropout']} gives each adapter an input of its own"
    if lora["dora"]:
        return "techniques.lora.dora=true scales each weight anew in every step"
    compute = facts.techniques.get("quantize", {}).get("compute_dtype", "auto")
    if getattr(compute, "value", compute) not in ("auto", facts.compute_dtype):
        return (f"techniques.quantize.compute_dtype={getattr(compute, 'value', compute)} is not what the rest computes in, "
                f"{facts.compute_dtype}")
    return None


def fuses_mlps(facts: Facts, model: nn.Module | None) -> bool:
    """Whether techniques.lora will run the MLPs of `model` (technique.skeleton(), None: not known) as one operator each."""
    lora = facts.techniques.get("lora", {})
    switch = str(getattr(lora.get("fused"), "value", lora.get("fused", "off")))
    if switch == "off" or (switch == "auto" and facts.device == "cpu") or hindrance(facts) or model is None:
        return False
    wanted = lora["target_modules"]
    if not ("all-linear" in wanted or set(MLP) <= set(wanted)):
        return False
    return any(_activation(module) and all(getattr(module, name).bias is None for name in MLP) for module in model.modules())


def calls(run: Callable[[], Any]) -> Counter[str]:
    """Call `run` and count the operators of fused adapters, by name."""
    with _Count() as mode:
        run()
    return mode.found


class _Count(TorchDispatchMode):
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
        for name, linears in _siblings(module):
            seen |= {id(linear) for linear in linears}
            done.groups[name] += 1
            _VARIANTS[name](module, linears)
    for module in list(model.modules()):
        if isinstance(module, LoraLayer) and id(module) not in seen:
            if why := unfit(module):
                done.left[why] += 1
            else:
                done.groups["linear"] += 1
                _fuse_linear(module)
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


def _siblings(module: Any) -> Iterator[tuple[str, list[Any]]]:
    """(kind of group, its linears) of what `module` runs of its own children in one operator."""
    if _adapted(module, MLP) == list(MLP) and _activation(module):
        linears = [getattr(module, name) for name in MLP]
        if all(linear.get_base_layer().bias is None for linear in linears) and _kind(linears[0]) == _kind(linears[1]):
            yield "mlp", linears
        return
    attention: Any = type(module)
    names = [name for name in _adapted(module, PROJECTIONS) if _reads_hidden_states(attention, name)]
    linears = [getattr(module, name) for name in names]
    if len({(_kind(one), one.get_base_layer().bias is None, one.in_features) for one in linears}) == 1 and len(linears) > 1:
        yield "attention", linears


def _adapted(module: Any, names: Sequence[str]) -> list[str]:
    """Those of `names` that are adapted linears of this module and can run fused."""
    from peft.tuners.lora import LoraLayer

    children = dict(module.named_children())
    return [name for name in names if isinstance(children.get(name), LoraLayer) and not unfit(children[name])]


@functools.cache
def _reads_hidden_states(kind: Any, name: str) -> bool:
    """Whether the forward of this class calls `name` with hidden_states, and only so."""
    source = _source(kind)
    return source.count(f"self.{name}(") == source.count(f"self.{name}(hidden_states)") == 1


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


def _kind(linear: Any) -> str:
    """How a linear's frozen weight is stored, in kernels/lora_base.py's words."""
    return getattr(linear.get_base_layer(), "fxtune_quantized", None) or DENSE


def _hold(module: Any, name: str, linears: Sequence[Any]) -> None:
    """Lay the frozen weights of a group out for its operator, in buffers `fused_{name}0` and on of `module`."""
    kind, bases = _kind(linears[0]), [linear.get_base_layer() for linear in linears]
    biases = [base.bias for base in bases if base.bias is not None]
    if kind == DENSE:
        made = augment([base.weight.data for base in bases], [linear.r[ADAPTER] for linear in linears], bool(biases))
        views = weight_views(made, [linear.out_features for linear in linears], linears[0].in_features)
        for base, view in zip(bases, views, strict=True):
            base.weight.data = view
        tensors = [made]
    else:
        tensors = grouped(bases)
    for index, tensor in enumerate(tensors):
        module.register_buffer(f"fused_{name}{index}", tensor, persistent=False)
    setattr(module, f"fused_{name}_kind", kind)
    setattr(module, f"fused_{name}_names", tuple(f"fused_{name}{index}" for index in range(len(tensors))))


def _held(module: Any, name: str) -> tuple[list[torch.Tensor], str]:
    """What _hold() laid out, and its kind."""
    return ([module._buffers[each] for each in getattr(module, f"fused_{name}_names")], getattr(module, f"fused_{name}_kind"))


def _halves(linears: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """lora_A, lora_B and scaling of each linear."""
    return ([linear.lora_A[ADAPTER].weight for linear in linears], [linear.lora_B[ADAPTER].weight for linear in linears],
            [linear.scaling[ADAPTER] for linear in linears])


def _as_peft(linears: Sequence[Any]) -> bool:
    """Whether adapters are switched off or merged into the weights."""
    return any(linear.disable_adapters or linear.merged_adapters for linear in linears)


def _product(module: Any, linears: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    a, b, scaling = _halves(linears)
    base, kind = _held(module, "base")
    bias = [linear.base_layer.bias for linear in linears if linear.base_layer.bias is not None]
    return lora_linear(x, a, b, base, scaling, kind, bias)


def _fuse_linear(linear: Any) -> None:
    _hold(linear, "base", [linear])
    kind: Any = type(linear)
    linear.__class__ = _linear_kind(kind)


@functools.cache
def _linear_kind(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or _as_peft([self]):
            whole: torch.Tensor = own(self, x, *args, **kwargs)
            return whole
        return _product(self, [self], x)

    return _subclass(kind, "linear", forward)


def _fuse_attention(attention: Any, linears: Sequence[Any]) -> None:
    attention.fused_names = tuple(name for name in PROJECTIONS if getattr(attention, name, None) in linears)
    _hold(attention, "base", linears)
    kind: Any = type(attention)
    attention.__class__ = _attention_kind(kind)


class _Given:
    """A projection whose result is there."""

    def __init__(self, hidden_states: torch.Tensor, result: torch.Tensor) -> None:
        self.hidden_states, self.result = hidden_states, result

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states is self.hidden_states, "an attention projects other states than those that it was given"
        return self.result


class _Seen:
    """Stands for an attention in its own code: some of its projections are given, everything else is the attention's."""

    def __init__(self, attention: Any, given: dict[str, _Given]) -> None:
        self._attention, self._given = attention, given

    def __getattr__(self, name: str) -> Any:
        given = self._given
        return given[name] if name in given else getattr(self._attention, name)


@functools.cache
def _attention_kind(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        linears = [getattr(self, name) for name in self.fused_names]
        if _as_peft(linears):
            return own(self, hidden_states, *args, **kwargs)
        results = _product(self, linears, hidden_states).split([linear.out_features for linear in linears], -1)
        # q and k are rotated into tensors of their own. v is kept as it is, and a view of it would keep all three.
        given = {name: _Given(hidden_states, result.contiguous() if name == "v_proj" else result)
                 for name, result in zip(self.fused_names, results, strict=True)}
        return own(_Seen(self, given), hidden_states, *args, **kwargs)

    return _subclass(kind, "attention", forward)


def _fuse_mlp(mlp: Any, linears: Sequence[Any]) -> None:
    mlp.fused_act = _activation(mlp)
    _hold(mlp, "up", linears[:2])
    _hold(mlp, "down", linears[2:])
    kind: Any = type(mlp)
    mlp.__class__ = _mlp_kind(kind)


@functools.cache
def _mlp_kind(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        linears = [self.gate_proj, self.up_proj, self.down_proj]
        if _as_peft(linears):
            plain: torch.Tensor = own(self, x)
            return plain
        (up, up_kind), (down, down_kind) = _held(self, "up"), _held(self, "down")
        a, b, scaling = _halves(linears)
        # A checkpoint that runs operator by operator computes this operator again as a whole, so that is where gate and up come
        # from; the compiler's leaves it out, and the backward pass makes them.
        eager = self.recomputed and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        if eager and self.tiles > 1:
            return _tiled(x, a, b, [up, down, scaling, up_kind, down_kind, self.fused_act, False, self.tiles])
        return lora_mlp(x, a, b, up, down, scaling, up_kind, down_kind, self.fused_act, self.keep or eager, self.tiles)

    return _subclass(kind, "mlp", forward, keep=True, recomputed=False, tiles=1)


def _tiled(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], rest: list[Any]) -> torch.Tensor:
    """lora_mlp() in tiles, which a checkpoint around it does not run again. `rest`: the operator's arguments after b."""
    device, operators = x.device.type, torch.ops.fxtune

    def backward(flat: torch.Tensor, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[Any]:
        asked = [wanted[0], any(wanted[1:len(a) + 1]), any(wanted[len(a) + 1:])]
        dx, da, db = operators.lora_mlp_backward(gradient, flat, *[flat.new_empty(0)] * 3, a, b, *rest, asked)
        return [dx if asked[0] else None, *(da if asked[1] else [None] * len(a)), *(db if asked[2] else [None] * len(b))]

    flat = x.flatten(0, -2).to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype)
    return kept_early(lambda flat: operators.lora_mlp(flat, a, b, *rest)[0], backward, flat, [*a, *b]).view(x.shape)


def _subclass(kind: Any, fused: str, forward: Callable[..., Any], **options: Any) -> Any:
    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward, "fused": fused, "__module__": kind.__module__, **options})


_VARIANTS: dict[str, Callable[[Any, Sequence[Any]], None]] = {"attention": _fuse_attention, "mlp": _fuse_mlp}
