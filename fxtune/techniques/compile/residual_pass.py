"""A pass over the graph of a compiled layer: the operators of fused adapters add the residual stream to their result.

A pre-norm decoder layer ends with `residual + mlp(norm(residual))`, and its first half with `residual + o_proj(...)`.
Where adapters are fused, the last step of that MLP or linear is a product by quack's kernel (kernels/matmul.py), which
adds the stream to its float32 sums and rounds once; over fp8, nf4 and int8 it is a pass that adds the adapters' share
(lora_adapters.add), and rounds before it adds the stream. Both save a pass over three tensors of hidden_size.

The pass changes the graph just before Inductor generates code, so autograd does not see the change. It leaves a sum
alone if there is a norm (Gemma 2) or a factor (Granite) in between, if the dtypes differ (autocast over a float32
stream), if shapes are dynamic, and if cuBLAS computes the product, which would copy and round before it adds.
"""

from __future__ import annotations

import operator
from typing import Any, Optional

import torch
from torch import fx

from fxtune.kernels import fused_lora  # noqa: F401  (registers the operators below)
from fxtune.kernels.frozen_base import DENSE
from fxtune.upstream.torch import UNSAFE_VIEW, install_graph_pass

_KIND_ARGUMENT: dict[Any, int] = {torch.ops.fxtune.lora_linear.default: 6, torch.ops.fxtune.lora_mlp.default: 7}
"""By operator: the argument that says how the weights of its last product are stored, and which kernel multiplies by
them."""
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, UNSAFE_VIEW)


def install() -> None:
    """Make torch.compile run the pass, after any pass that is already installed."""
    install_graph_pass("fxtune.residual", fold)


def fold(graph: fx.Graph) -> int:
    """If the result of a fused operator is only added to an earlier tensor, let the operator add it. Returns the
    number of sums that were replaced."""
    folded, order = 0, {node: index for index, node in enumerate(graph.nodes)}
    for total in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if total.kwargs or not all(isinstance(term, fx.Node) for term in total.args):
            continue
        for result, residual in (total.args, total.args[::-1]):
            fused = _fused_operator(result)
            if fused is None or order[residual] > order[fused] or not _same_layout(residual, result):
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


def _fused_operator(node: fx.Node) -> Optional[fx.Node]:
    """The operator whose first result is `node` or the tensor that `node` views, if it can take a residual and nothing
    else reads it."""
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not operator.getitem or node.args[1] != 0 or len(node.users) != 1:
        return None
    call: Any = node.args[0]
    is_fused = call.target in _KIND_ARGUMENT
    kind = call.args[_KIND_ARGUMENT[call.target]] if is_fused else DENSE
    return call if kind != DENSE and call.args[-1] is None else None


def _same_layout(left: fx.Node, right: fx.Node) -> bool:
    """The same static shape, dtype and device."""
    first, second = left.meta["val"], right.meta["val"]
    static = all(isinstance(size, int) for size in (*first.shape, *second.shape))
    return static and (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
