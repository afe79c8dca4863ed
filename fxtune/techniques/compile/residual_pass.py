"""The residual stream is added where fused adapters write their result: a pass over the graph of a compiled layer.

`residual + mlp(norm(residual))` is how a pre-norm decoder layer ends, and `residual + o_proj(...)` how its first half does. The
last act of fused LoRA in it is quack's product (matmul.py), or over fp8, nf4 and int8 a pass over something hidden_size wide that
adds what adapters add (lora_adapters.add); adding the stream is another pass, over three such tensors. quack's kernel adds it to
its float32 sums and rounds once: on random data the result is 1.66e-3 from float32's, where two roundings make 2.35e-3. The pass
rounds before it adds it, as two operators would, and saves one reading and one writing.

The two are found in the graph that Inductor is about to write code for: after autograd, for which they stay what they were, and
whatever the model's own code looks like. A norm in between (Gemma 2), a factor (Granite), another dtype (autocast over a float32
stream) and shapes that the compiler leaves open keep them apart, and so does eager mode. So do products that cuBLAS does: torch
would copy the stream to where the result goes first, and cuBLAS rounds before it adds it.
"""

from __future__ import annotations

import operator
from typing import Any, Optional

import torch
from torch import fx

from fxtune.kernels import fused_lora  # noqa: F401  (its operators are named below)
from fxtune.kernels.frozen_base import DENSE

_ADD = torch.ops.aten.add.Tensor
_KIND: dict[Any, int] = {torch.ops.fxtune.lora_linear.default: 6, torch.ops.fxtune.lora_mlp.default: 7}
"""Which argument of an operator says how the weights of its last product are stored, and who multiplies by them."""
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def install() -> None:
    """Have torch.compile run the pass from now on, beside the one that somebody else may have installed."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Residuals(CustomGraphPass):
        def __init__(self, before: Any) -> None:
            self.before = before

        def __call__(self, graph: fx.Graph) -> None:
            if self.before is not None:
                self.before(graph)
            fold(graph)

        def uuid(self) -> Optional[Any]:
            # What fold() does is not part of it: compiled code is kept in a folder for each state of kernels/ (compiled.py).
            if self.before is None:
                return ("fxtune.residual",)
            before = self.before.uuid() if isinstance(self.before, CustomGraphPass) else None
            return before and ("fxtune.residual", before)

    installed = config.post_grad_custom_post_pass
    if type(installed).__qualname__ != Residuals.__qualname__:
        config.post_grad_custom_post_pass = Residuals(installed)


def fold(graph: fx.Graph) -> int:
    """Let each fused operator whose result is only added to a tensor that is there before it add that tensor itself, and return
    how many do."""
    folded, order = 0, {node: index for index, node in enumerate(graph.nodes)}
    for total in graph.find_nodes(op="call_function", target=_ADD):
        if total.kwargs or not all(isinstance(one, fx.Node) for one in total.args):
            continue
        for result, residual in (total.args, total.args[::-1]):
            fused = _fused(result)
            if fused is None or order[residual] > order[fused] or not _alike(residual, result):
                continue
            y = next(node for node in fused.users if node.args[1] == 0)
            with graph.inserting_before(fused):
                flat = graph.call_function(torch.ops.aten.reshape.default, (residual, list(y.meta["val"].shape)))
                flat.meta["val"] = residual.meta["val"].reshape(y.meta["val"].shape)
            fused.args = (*fused.args[:-1], flat)
            total.replace_all_uses_with(result)
            graph.erase_node(total)
            folded += 1
            break
    return folded


def _fused(node: fx.Node) -> Optional[fx.Node]:
    """The operator whose first result `node` is, seen through views, if nobody reads it but one, and it has no residual yet."""
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not operator.getitem or node.args[1] != 0 or len(node.users) != 1:
        return None
    made: Any = node.args[0]
    kind = made.args[_KIND[made.target]] if made.target in _KIND else DENSE
    return made if kind != DENSE and made.args[-1] is None else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    mine, its = one.meta["val"], other.meta["val"]
    known = all(isinstance(size, int) for size in (*mine.shape, *its.shape))
    return known and (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)
