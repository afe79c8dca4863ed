"""The forwards of modules with fused adapters (fused_lora.py), and the classes that carry them.

A module gets a class of its own, a subclass of what it was, with one of these as its forward. All layers share the class and the
function, so they share a compiled graph too. Which modules get one is decided in fxtune/techniques/lora/fuse.py.

An attention's own code runs as it is, over a stand-in for the module (`_Seen`) whose projections hand out what the operator has
computed. State that one projection leaves for the next would do as well, but torch.compile traces none inside a checkpoint.

Where techniques.liger.rope has given the attention our own RoPE, and its code does nothing between the projections and that, what
is handed out is turned already (rotary.py, `qkv`), and its code turns nothing.

An operator calls none of the linears that it stands for. So where somebody listens to one of them (a hook; peft's own for the
argument `adapter_names` is one), or its adapter is off or merged, the module's own forward runs, and calls them one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxtune.errors import ConfigError
from fxtune.kernels.frozen_base import DENSE, DENSE_CUTE, augment, weight_views
from fxtune.kernels.fused_lora import lora_linear, lora_mlp, room_of
from fxtune.kernels.quantized import grouped
from fxtune.kernels.rotary import as_they_are, qkv, seeing
from fxtune.techniques.checkpointing.tiled_mlp import kept_early

ADAPTER = "default"
"""peft's name of the only adapter."""
MLP = ("gate_proj", "up_proj", "down_proj")


def kind_of(linear: Any) -> str:
    """How a linear's frozen weight is stored, in kernels/lora_base.py's words."""
    return getattr(linear.get_base_layer(), "fxtune_quantized", None) or DENSE


def _hold(module: Any, name: str, linears: Sequence[Any]) -> None:
    """Lay the frozen weights of a group out for its operator, in buffers `fused_{name}0` and on of `module`."""
    kind, bases = kind_of(linears[0]), [linear.get_base_layer() for linear in linears]
    biases = [base.bias for base in bases if base.bias is not None]
    if kind == DENSE:
        made = augment([base.weight.data for base in bases], [linear.r[ADAPTER] for linear in linears], bool(biases))
        for base, view in zip(bases, _views(made, linears), strict=True):
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
    return (
        [module._buffers[each] for each in getattr(module, f"fused_{name}_names")],
        getattr(module, f"fused_{name}_kind"),
    )


def _whole(module: Any, name: str, linears: Sequence[Any]) -> tuple[list[torch.Tensor], str]:
    """_held(), with the weights that `linears` have now.

    A weight may have been given other memory since (a safe merge of peft's, load_state_dict(assign=True)): its numbers are taken
    into the group's buffer. Raises ConfigError where its dtype or device is another one now. Compiled code does not look.
    """
    tensors, kind = _held(module, name)
    if kind not in (DENSE, DENSE_CUTE) or torch.compiler.is_compiling():
        return tensors, kind
    weights = [linear.base_layer.weight for linear in linears]
    memory = tensors[0].untyped_storage()._cdata
    if all(weight.untyped_storage()._cdata == memory for weight in weights):
        return tensors, kind
    if unlike := [
        weight for weight in weights if (weight.dtype, weight.device) != (tensors[0].dtype, tensors[0].device)
    ]:
        raise ConfigError(
            f"techniques.lora.fused: one linear of a group was cast or moved alone, to {unlike[0].dtype} on "
            f"{unlike[0].device}, and the group is {tensors[0].dtype} on {tensors[0].device}. Cast or move the "
            "whole model, or set techniques.lora.fused=off."
        )
    for view, weight in zip(_views(tensors[0], linears), weights, strict=True):
        view.copy_(weight.data)
        weight.data = view
    return tensors, kind


def _views(made: torch.Tensor, linears: Sequence[Any]) -> list[torch.Tensor]:
    return weight_views(made.data, [linear.out_features for linear in linears], linears[0].in_features)


def uncalled(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules inside of a fused one that its operator does the work of, without calling them."""
    for _, linears in _inside(module):
        for linear in linears:
            yield from (part for part in linear.modules() if part is not module)


def _inside(module: Any) -> list[tuple[str, list[Any]]]:
    """Name and linears of each group that a module runs as one; nothing where it is not fused."""
    fused = getattr(module, "fused", None)
    if fused == "mlp":
        return [("up", [module.gate_proj, module.up_proj]), ("down", [module.down_proj])]
    names = {"attention": getattr(module, "fused_names", ()), "linear": None}.get(str(fused), ())
    linears = [module] if names is None else [getattr(module, name) for name in names]
    return [("base", linears)] if linears else []


def _lay_again(module: Any) -> None:
    """After its tensors were moved or cast, each by itself: the frozen weights are views of their group's buffer again."""
    for name, linears in _inside(module):
        (tensors, kind), bases = _held(module, name), [linear.get_base_layer() for linear in linears]
        if kind in (DENSE, DENSE_CUTE):
            for base, view in zip(bases, _views(tensors[0], linears), strict=True):
                base.weight.data = view
            continue
        for buffer, tensor in zip(getattr(module, f"fused_{name}_names"), grouped(bases), strict=True):
            module._buffers[buffer] = tensor


def products_by_cute(model: torch.nn.Module) -> None:
    """Let quack multiply by the 16-bit weights of all groups of a model that is fused already (kernels/matmul.py)."""
    for module, name, kind in _groups(model):
        if kind == DENSE:
            setattr(module, f"fused_{name}_kind", DENSE_CUTE)


def held_for_cute(model: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers, augment()'s results, of the groups by whose weights quack shall multiply."""
    return [_held(module, name)[0][0] for module, name, kind in _groups(model) if kind == DENSE_CUTE]


def _groups(model: torch.nn.Module) -> list[tuple[Any, str, str]]:
    """Module, name and kind of all that _hold() laid out."""
    return [
        (module, name, vars(module)[f"fused_{name}_kind"])
        for module in model.modules()
        for name in ("base", "up", "down")
        if f"fused_{name}_kind" in vars(module)
    ]


def _halves(linears: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """lora_A, lora_B and scaling of each linear."""
    return (
        [linear.lora_A[ADAPTER].weight for linear in linears],
        [linear.lora_B[ADAPTER].weight for linear in linears],
        [linear.scaling[ADAPTER] for linear in linears],
    )


def _as_peft(linears: Sequence[Any], called: bool = False) -> bool:
    """Whether adapters are switched off or merged into the weights, or others than ADAPTER act, or a part of them is listened to.

    `called`: the linears themselves are called, so that their own hooks run.
    """
    if any(
        linear.disable_adapters or linear.merged_adapters or linear.active_adapters != [ADAPTER] for linear in linears
    ):
        return True
    parts = [
        part for linear in linears for part in (linear.base_layer, linear.lora_A[ADAPTER], linear.lora_B[ADAPTER])
    ]
    return any(
        part._forward_pre_hooks or part._forward_hooks or part._backward_pre_hooks or part._backward_hooks
        for part in (parts if called else [*linears, *parts])
    )


def _product(module: Any, linears: Sequence[Any], x: torch.Tensor, room: bool = False) -> torch.Tensor:
    a, b, scaling = _halves(linears)
    base, kind = _whole(module, "base", linears)
    bias = [linear.base_layer.bias for linear in linears if linear.base_layer.bias is not None]
    return lora_linear(x, a, b, base, scaling, kind, bias, room)


def fuse_linear(linear: Any) -> None:
    """Let an adapted linear of peft run as one operator."""
    _hold(linear, "base", [linear])
    kind: Any = type(linear)
    linear.__class__ = _linear_kind(kind)


@functools.cache
def _linear_kind(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or _as_peft([self], called=True):
            whole: torch.Tensor = own(self, x, *args, **kwargs)
            return whole
        return _product(self, [self], x)

    return _subclass(kind, "linear", forward)


def fuse_attention(attention: Any, names: Sequence[str], turned: bool = False) -> None:
    """Let the projections `names` of an attention, which its forward calls with its hidden_states, run as one operator.

    `turned`: they are q, k and v, and its forward gives q and k to apply_rotary_pos_emb as they are.
    """
    attention.fused_names = tuple(names)
    linears = [getattr(attention, name) for name in names]
    bias = linears[0].get_base_layer().bias is not None
    attention.fused_room = room_of([linear.r[ADAPTER] for linear in linears], kind_of(linears[0]), bias)
    _hold(attention, "base", linears)
    kind: Any = type(attention)
    attention.__class__ = _attention_kind(kind, turned)


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
def _attention_kind(kind: Any, turned: bool) -> Any:
    own = kind.forward
    without_rope = seeing(own, as_they_are, kind.__name__) if turned else None

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        linears = [getattr(self, name) for name in self.fused_names]
        if _as_peft(linears):
            return own(self, hidden_states, *args, **kwargs)
        angles = kwargs.get("position_embeddings")
        at_once = without_rope is not None and angles is not None
        product = _product(self, linears, hidden_states, room=at_once and self.fused_room > 0)
        if without_rope is not None and angles is not None:
            heads, kv_heads = (linear.out_features // self.head_dim for linear in linears[:2])
            cos, sin = angles
            parts = qkv(product, cos, sin, heads, kv_heads, self.fused_room)
            given = {
                name: _Given(hidden_states, part.flatten(2))
                for name, part in zip(self.fused_names, parts, strict=True)
            }
            return without_rope(_Seen(self, given), hidden_states, *args, **kwargs)
        results = product.split([linear.out_features for linear in linears], -1)
        # q and k are rotated into tensors of their own. v is kept as it is, and a view of it would keep all three.
        given = {
            name: _Given(hidden_states, result.contiguous() if name == "v_proj" else result)
            for name, result in zip(self.fused_names, results, strict=True)
        }
        return own(_Seen(self, given), hidden_states, *args, **kwargs)

    return _subclass(kind, "attention", forward)


def fuse_mlp(mlp: Any, act: str) -> None:
    """Let down(act(gate(x)) * up(x)) run as one operator. The module may be told, before it is compiled:

    `keep`: keep gate and up for the backward pass; `recomputed`: a checkpoint around it computes it again; `tiles`.
    """
    mlp.fused_act = act
    linears = [getattr(mlp, name) for name in MLP]
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
        (up, up_kind), (down, down_kind) = _whole(self, "up", linears[:2]), _whole(self, "down", linears[2:])
        a, b, scaling = _halves(linears)
        # A checkpoint that runs operator by operator computes this operator again as a whole, so that is where gate and up come
        # from; the compiler's leaves it out, and the backward pass makes them.
        eager = self.recomputed and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        if eager and self.tiles > 1:
            return _tiled(x, a, b, [up, down, scaling, up_kind, down_kind, self.fused_act, False, self.tiles])
        return lora_mlp(x, a, b, up, down, scaling, up_kind, down_kind, self.fused_act, self.keep or eager, self.tiles)

    return _subclass(kind, "mlp", forward, keep=True, recomputed=False, tiles=1)


def _tiled(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], rest: list[Any]) -> torch.Tensor:
    """lora_mlp() in tiles, which a checkpoint around it does not run again. `rest`: the arguments of both operators after b."""
    device, operators = x.device.type, torch.ops.fxtune

    def backward(flat: torch.Tensor, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[Any]:
        asked = [wanted[0], any(wanted[1 : len(a) + 1]), any(wanted[len(a) + 1 :])]
        dx, da, db = operators.lora_mlp_backward(gradient, flat, *[flat.new_empty(0)] * 3, a, b, *rest, asked)
        return [
            dx if asked[0] else None,
            *(da if asked[1] else [None] * len(a)),
            *(db if asked[2] else [None] * len(b)),
        ]

    flat = x.flatten(0, -2).to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype)
    return kept_early(lambda flat: operators.lora_mlp(flat, a, b, *rest, None)[0], backward, flat, [*a, *b]).view(
        x.shape
    )


def _subclass(kind: Any, fused: str, forward: Callable[..., Any], **options: Any) -> Any:
    def apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What .to(), .half() and the like call with each tensor."""
        for name, _ in _inside(self):
            tensors, stored = _held(self, name)
            if stored not in (DENSE, DENSE_CUTE) and any(
                fn(one.new_empty(0)).dtype is not one.dtype for one in tensors
            ):
                raise ConfigError(
                    f"techniques.quantize: a base in {stored} cannot be cast, since its scales have the dtype that "
                    "its kernels read. Set model.dtype before it is built."
                )
        kind._apply(self, fn, recurse)
        _lay_again(self)
        return self

    return type(
        f"Fused{kind.__name__}",
        (kind,),
        {"forward": forward, "fused": fused, "_apply": apply, "__module__": kind.__module__, **options},
    )
