"""A pass over a compiled layer's graph, after which operators of fused adapters also add the residual stream.

A pre-norm decoder layer ends with `residual + mlp(norm(residual))`. Its first half ends with `residual + o_proj(...)`.
With fused adapters over 16-bit weights, quack's kernel computes the last product of this MLP or linear
(kernels/matmul.py). The kernel can add the stream to its float32 sums and round once. Over fp8, nf4 and int8 weights
the last step adds the adapters' share (lora_adapters.add). That step rounds before it adds the stream. Either way the
layer saves reading and writing three tensors of hidden_size.

The pass changes the graph just before Inductor generates code, so autograd does not see the change. A sum stays as it
is if a norm (Gemma 2) or a factor (Granite) comes before it, if the dtypes differ (autocast over a float32 stream), if
shapes are dynamic, or if cuBLAS computes the product: cuBLAS would copy the stream and round before it adds.
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
"""The position of each operator's argument that says how the weights of its last product are stored, and which kernel
multiplies by them."""
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, UNSAFE_VIEW)


def install() -> None:
    """Make torch.compile run this pass, after any pass that is already installed."""
    install_graph_pass("fxtune.residual", fold)


def fold(graph: fx.Graph) -> int:
    """Replace each sum of a fused operator's result and an earlier tensor, if nothing else reads that result: the
    operator adds the tensor itself. Returns the number of replaced sums."""
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
    """The fused operator whose first result is `node` or is viewed by `node`, if the operator can add a residual and
    only one node reads the result; else None."""
    while node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not operator.getitem or node.args[1] != 0 or len(node.users) != 1:
        return None
    call: Any = node.args[0]
    is_fused = call.target in _KIND_ARGUMENT
    kind = call.args[_KIND_ARGUMENT[call.target]] if is_fused else DENSE
    return call if kind != DENSE and call.args[-1] is None else None


def _same_layout(left: fx.Node, right: fx.Node) -> bool:
    """Whether both tensors have the same static shape, dtype and device."""
    first, second = left.meta["val"], right.meta["val"]
    static = all(isinstance(size, int) for size in (*first.shape, *second.shape))
    return static and (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
