"""Selective checkpointing: which operators' results a layer saves, and which operators the backward pass runs again.

A layer that is checkpointed as a whole computes its matrix products and its attention twice. These take nearly all of
the layer's time, but their results are only a part of what the layer would save. The rest are results of norms, rotary
embeddings, activations and residuals. They cost next to nothing to repeat. So the results of expensive operators are
saved, and everything else is recomputed (the policy of torch.utils.checkpoint; "selective" recomputation in torchtitan
and Megatron, arXiv 2205.05198).

A rule is plain data without state. It recognizes a product by its operator and by the shape of the second operand, the
linear's weight. So the same rule serves eager layers and layers that torch.compile traces. In a traced layer the rule
marks nodes of the graph. A rule can be part of the compiler's cache key. It cannot distinguish two linears of one
shape.

Linear attention (kernels/linear_attention.py) belongs to the group `attention`. Its results include the matrices that
its backward pass reads. A saved byte of them saves about as much time as a saved byte of a linear's product. The short
convolution before it is recomputed, which costs 4 multiplications an element.

Products of adapters: x A is saved, because it has only the width of the rank. (x A) B is recomputed, because it costs
only rank multiplications an element. With fused adapters (kernels/fused_lora.py) one operator computes the products of
a group of linears, and a rule recognizes this operator by the linears' joint size. Another operator computes a whole
MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fxtune.techniques.attention.backends.registry import BACKENDS
from fxtune.upstream.torch import operator_names

PRODUCTS = "mm addmm bmm baddbmm _scaled_mm _int_mm _grouped_mm _scaled_grouped_mm convolution"
EXPERT_OPERATORS = {"fxtune.gated_experts", "fxtune.fp8_experts"}
OWN = {"fxtune.lora_linear", "fxtune.lora_mlp"} | EXPERT_OPERATORS
MATMULS = {f"aten.{name}" for name in PRODUCTS.split()} | OWN
SECOND_OPERAND = {"aten.addmm": 2, "aten.baddbmm": 2}
"""The position of the second operand, if it is not 1."""
STANDS_FOR = {
    "fxtune.lora_linear": "aten.mm",
    "fxtune.lora_mlp": "aten.mm",
    "fxtune.gated_experts": "aten._grouped_mm",
    "fxtune.fp8_experts": "aten._scaled_grouped_mm",
}
"""fxtune's operator -> torch's operator. If no list names fxtune's operator, an entry for torch's operator counts."""
ROUTING = {"fxtune.own_rows", "aten._assert_scalar"}
"""Operators whose results each selective rule saves: the routing of tokens to divided experts. The routing is small,
and saved rows of experts fit no other routing. The compiler asserts the number of rows, and torch 2.11 cannot repeat
this assertion in the backward pass."""
GROUPS = ("attention", "matmuls")
RECURRENT = {"fxtune.linear_attention", "fxtune.short_convolution"}
KNOWN = MATMULS.union(RECURRENT, *(backend.operators for backend in BACKENDS.values()))
"""Names that are valid even before the package that registers the operator is imported."""


class Rule(NamedTuple):
    """Which results are saved. A name is an operator (`aten.mm`) or a group. An operator's name takes precedence over
    the name of its group."""

    saved: tuple[str, ...] = GROUPS
    recomputed: tuple[str, ...] = ()
    linears: tuple[tuple[int, int, bool], ...] = ()
    """(in, out, saved) of single linears. These entries take precedence over the operator's name."""
    ranks: tuple[int, ...] = ()
    """The ranks of the adapters."""

    def counts(self, name: str) -> bool:
        """Whether the rule speaks of the operator `name`, by its name or by its group."""
        return group_of(name) is not None or name in self.saved or name in self.recomputed

    def saves(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Whether a call of the operator `name` with `arguments` saves its result."""
        if group_of(name) == "matmuls" and (shape := weight_shape(name, arguments)):
            for in_features, out_features, saved in self.linears:
                if shape == (in_features, out_features):
                    return saved
            if shape[0] in self.ranks:
                return False
        return self.saves_by_name(name)

    def saves_by_name(self, name: str) -> bool:
        """Whether a call of the operator `name` saves its result, if shapes are unknown."""
        for key in (name, STANDS_FOR.get(name, name)):
            if key in self.saved or key in self.recomputed:
                return key in self.saved
        group = group_of(name)
        return group in self.saved and group not in self.recomputed

    def contexts(self) -> Any:
        """The `context_fn` for torch.utils.checkpoint. It can be pickled. torch.compile's cache distinguishes rules by
        its `cache_hash`."""
        context_fn: Any = functools.partial(_contexts, *self)
        context_fn.cache_hash = repr(tuple(self))
        return context_fn


def _contexts(*fields: Any) -> Any:
    rule = Rule(*fields)

    def policy(_: Any, operator: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
        saved = (name := name_of(operator)) in ROUTING or rule.saves(name, arguments)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def name_of(operator: Any) -> str:
    """The operator's name without its overload, such as `aten.mm`; `higher_order.NAME` if the operator takes
    functions."""
    namespace, _, own = operator.name().partition("::")
    return f"{namespace}.{own.partition('.')[0]}" if own else f"higher_order.{namespace}"


@functools.cache
def group_of(name: str) -> str | None:
    """The operator's group: `attention`, `matmuls` or None. Words in the name decide for other packages' operators."""
    namespace, _, own = name.partition(".")
    if "backward" in own or own.endswith("_bwd"):
        return None
    if any(word in own for word in ("attention", "flash", "attn", "fmha")) and not own.startswith("_fused_sdp_choice"):
        return "attention"
    product = own.endswith("mm") or any(word in own for word in ("matmul", "linear", "gemm", "gemv"))
    return "matmuls" if name in MATMULS or (namespace != "aten" and product) else None


def weight_shape(name: str, arguments: tuple[Any, ...]) -> tuple[int, int] | None:
    """(in, out) of a product's second operand, or None if the operand is no matrix."""
    if name.startswith("fxtune.lora_"):  # (x, As [rank, in], Bs [out, rank], ...)
        a, b = arguments[1:3]
        if name != "fxtune.lora_linear":
            return None
        return int(a[0].shape[1]), sum(int(lora_b.shape[0]) for lora_b in b)
    if name in EXPERT_OPERATORS:  # their weights are tensors of all experts
        return None
    packed = name.startswith("bitsandbytes.")  # weights [out, in]; the shape in 4 bits is an argument
    at = 2 if packed and ("4bit" in name or "mixed" in name) else SECOND_OPERAND.get(name, 1)
    second: Any = arguments[at] if len(arguments) > at else None
    shape = second if isinstance(second, (list, tuple)) else getattr(second, "shape", ())
    if len(shape) != 2:
        return None
    return (shape[1], shape[0]) if packed else (shape[0], shape[1])


def linears(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """Last part of a linear's name -> (in, out), for the linears of a layer without its adapters."""
    sizes: dict[str, Any] = {}
    for path, module in layer.named_modules():
        parts = [part for part in path.split(".") if part != "base_layer"]
        in_features, out_features = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if in_features and out_features and parts and not any(part.startswith("lora_") for part in parts):
            sizes[parts[-1]] = (in_features, out_features)
    return sizes


def ranks(layer: nn.Module) -> tuple[int, ...]:
    """The ranks of a layer's adapters."""
    adapters = [module for path, module in layer.named_modules() if "lora_A" in path.split(".")]
    return tuple(sorted({module.out_features for module in adapters if isinstance(module, nn.Linear)}))


def operators() -> Iterator[str]:
    """The names of all operators that torch knows in this process, and the names in KNOWN."""
    registered = {name.partition(".")[0].replace("::", ".") for name in operator_names()}
    yield from sorted(KNOWN | registered)
