"""An autograd function that an eager checkpoint (torch.utils.checkpoint) does not repeat when it recomputes. The
function saves its input before it computes, and a checkpoint stops as soon as it has what the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Forward = Callable[[torch.Tensor], torch.Tensor]


def save_input_first(
    forward: Forward, backward: Callable[..., Sequence[Any]], flat: torch.Tensor, trained: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`forward(flat)` inside an eager checkpoint. The backward pass needs only `flat`, which is saved before forward()
    runs. So the checkpoint stops recomputing at that place, and does not repeat forward().

    `backward(flat, gradient, needed)` returns the gradients of flat and of each of `trained`, or None; `needed`:
    whether each gradient is needed.
    """
    # In place of `flat` the node of _Early holds an empty tensor, the only owner of the node that saved `flat`. So
    # `flat` is freed with the rest of the function's graph, and a later backward pass raises autograd's usual error.
    anchor = _Keep.apply(flat, torch.empty(0, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(lambda _: anchor, lambda anchor: anchor.grad_fn.saved_tensors[0]):
        out: torch.Tensor = _Early.apply(forward, backward, flat, *trained)
    return out


class _Early(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Any, flat: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.run = backward
        ctx.save_for_backward(flat)
        return forward(flat)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (flat,) = ctx.saved_tensors
        return None, None, *ctx.run(flat, gradient, ctx.needs_input_grad[2:])


class _Keep(torch.autograd.Function):
    """Saves the first argument. The second argument requires a gradient, so that autograd makes a node."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(flat)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing depends on the result of _Keep")
