"""Which operators' results a checkpointed layer keeps, and which it computes again in the backward pass.

Checkpointing a layer whole computes its matrix products and its attention twice. They are nearly all of its time, and what
they produce is a part of what it holds: norms, rotary embeddings, activations and residuals, which cost next to nothing to
repeat, hold the rest. So the operators that compute much are named here and kept, and everything else is repeated
(torch.utils.checkpoint's op-level policy; torchtitan and Megatron's "selective" recomputation, arXiv 2205.05198).

A rule is plain data (tuples of names and numbers) and keeps no count: a product is told apart by its operator and by the shape
of its second operand, which is that of the linear's weight. So the same rule serves a layer run operator by operator and
one that torch.compile traces, which reads the rule's answers as marks for its own choice of what to save, and it can be a
part of the compiler's cache key. Two linears of one shape cannot be told apart.

The products of adapters: x A is kept, it is rank wide; (x A) B is repeated, it is as wide as the linear's own product and costs
rank multiplications for each element. Where adapters are fused (fused_lora.py), one operator does the products of a group of
linears, adapters included, known by the size of all its linears together; another a whole MLP.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MATMULS = frozenset(
    {
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten._scaled_mm",
        "aten._int_mm",
        "aten._grouped_mm",
        "aten._scaled_grouped_mm",
        "aten.convolution",
        "fxtune.lora_linear",
        "fxtune.lora_mlp",
    }
)
_SECOND = {"aten.addmm": 2, "aten.baddbmm": 2}
"""Where the second operand stands, if not at 1."""
INSIDE = {"fxtune.lora_linear": "aten.mm", "fxtune.lora_mlp": "aten.mm"}
"""What operators do that are named by none of the lists."""
GROUPS = ("attention", "matmuls")
KNOWN = MATMULS | {
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_efficient_attention",
    "higher_order.flex_attention",
    "fxtune.flash4",
}
"""Names that are right whether or not their package has been imported yet."""


class Rule(NamedTuple):
    """What is kept. A name is an operator (`aten.mm`) or a group; an operator's own name goes before its group's."""

    saved: tuple[str, ...] = GROUPS
    recomputed: tuple[str, ...] = ()
    linears: tuple[tuple[int, int, bool], ...] = ()
    """(in, out, kept) of the linears whose products are decided by name; this goes before the operator's name."""
    ranks: tuple[int, ...] = ()
    """Ranks of the adapters."""

    def keeps(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Whether the result of the operator `name`, called with `arguments`, is kept."""
        if group_of(name) == "matmuls" and (shape := weight_shape(name, arguments)):
            for inward, outward, kept in self.linears:
                if shape == (inward, outward):
                    return kept
            if shape[0] in self.ranks:
                return False
        return self.keeps_all(name)

    def keeps_all(self, name: str) -> bool:
        """keeps(), where nothing is known of the shape."""
        for one in (name, INSIDE.get(name, name)):
            if one in self.saved or one in self.recomputed:
                return one in self.saved
        group = group_of(name)
        return group in self.saved and group not in self.recomputed

    def contexts(self) -> Any:
        """What torch.utils.checkpoint takes as `context_fn`. It can be pickled, and torch.compile's cache tells rules apart."""
        made: Any = functools.partial(_contexts, *self)
        made.cache_hash = repr(tuple(self))
        return made


def _contexts(
    saved: tuple[str, ...],
    recomputed: tuple[str, ...],
    linears: tuple[tuple[int, int, bool], ...],
    ranks: tuple[int, ...],
) -> Any:
    rule = Rule(saved, recomputed, linears, ranks)

    def policy(_: Any, operator: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
        kept = rule.keeps(name_of(operator), arguments)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@functools.cache
def name_of(operator: Any) -> str:
    """`aten.mm` for each overload of that operator; `higher_order.NAME` for operators that take functions."""
    schema = getattr(operator, "_schema", None)
    return schema.name.replace("::", ".") if schema is not None else f"higher_order.{operator.name()}"


@functools.cache
def group_of(name: str) -> str | None:
    """`attention`, `matmuls` or None. Operators of other packages are known by the words in their names."""
    space, _, own = name.partition(".")
    if "backward" in own or own.endswith("_bwd"):
        return None
    if any(word in own for word in ("attention", "flash", "attn", "fmha")) and not own.startswith("_fused_sdp_choice"):
        return "attention"
    foreign = space != "aten" and (
        own.endswith("mm") or any(word in own for word in ("matmul", "linear", "gemm", "gemv"))
    )
    if name in MATMULS or foreign:
        return "matmuls"
    return None


def weight_shape(name: str, arguments: tuple[Any, ...]) -> tuple[int, int] | None:
    """(in, out) of a product's second operand; None where it is no matrix."""
    if name.startswith("fxtune.lora_"):  # x, then each linear's A [rank, in] and B [out, rank]
        a, b = arguments[1:3]
        return (int(a[0].shape[1]), sum(int(one.shape[0]) for one in b)) if name == "fxtune.lora_linear" else None
    packed = name.startswith("bitsandbytes.")  # stored as [out, in], in 4 bits next to its shape
    at = 2 if packed and ("4bit" in name or "mixed" in name) else _SECOND.get(name, 1)
    second: Any = arguments[at] if len(arguments) > at else None
    shape = second if isinstance(second, (list, tuple)) else getattr(second, "shape", ())
    if len(shape) != 2:
        return None
    return (shape[1], shape[0]) if packed else (shape[0], shape[1])


def linears(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """(in, out) of each linear of a layer by the last part of its name, adapters left out."""
    found = {}
    for path, module in layer.named_modules():
        parts = [part for part in path.split(".") if part != "base_layer"]
        inward, outward = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if isinstance(inward, int) and isinstance(outward, int) and parts and not _of_adapter(parts):
            found[parts[-1]] = (inward, outward)
    return found


def ranks(layer: nn.Module) -> tuple[int, ...]:
    """The ranks of a layer's adapters."""
    return tuple(
        sorted(
            {
                module.out_features
                for path, module in layer.named_modules()
                if "lora_A" in path.split(".") and isinstance(module, nn.Linear)
            }
        )
    )


def _of_adapter(parts: list[str]) -> bool:
    return any(part.startswith("lora_") for part in parts)


def operators() -> Iterator[str]:
    """The names of all operators that torch knows in this process, and of those that a package will add."""
    yield from sorted(
        KNOWN | {name.partition(".")[0].replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}
    )
