"""The MLP of a layer in tiles of the sequence, so that what is between its matrices never exists for the whole row.

Gate, up and their product are the widest tensors of a layer: 28 KiB a token each for Llama-3-8B in bfloat16, 1.75 GiB each for
a row of 65,536 tokens, and the backward pass holds six of them. An MLP treats each token alone, so it can take them a tile at
a time: forward without keeping anything but its input, backward tile by tile, each one computed again first (ALST's tiled
MLP, arXiv 2506.13996). With `tiles` of them the six shrink to six in `tiles`. The products' FLOPs are those of a checkpoint,
and a tile should stay some thousand tokens long, so that its matmuls fill the card.

Run operator by operator this is an autograd function. Its input is kept by a node of its own (`_Keep`) before the work is
done: where a checkpoint around the whole layer computes again what was kept, it can stop there, and the MLP is computed twice
in all, not three times. That node lives as long as what an ordinary function saved (`_saving`): until a backward pass that does
not retain its graph. torch.compile traces no backward that calls autograd, so inside a compiled layer the tiles are a plain
loop: the checkpoint around the layer (or one around each tile, where there is none) marks their insides for recomputation, and
the compiler frees each tile's before the next begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[[torch.Tensor], torch.Tensor]


def tile(mlp: nn.Module, tiles: int, checkpointed: bool) -> None:
    """Make `mlp` (a function of each token alone: [..., hidden] -> [..., hidden]) run in `tiles` tiles.

    `checkpointed`: whether the layer around it recomputes what the MLP does.
    """
    own = mlp.__dict__.pop("forward", None)  # a kernel library may have given this one a forward of its own
    forward = own.__func__ if isinstance(own, MethodType) else own or type(mlp).forward
    bound = own is not None and not isinstance(own, MethodType)
    mlp.__class__ = _tiled_kind(type(mlp), forward, bound, tiles, checkpointed)  # type: ignore[arg-type]


@functools.cache
def _tiled_kind(
    kind: type[nn.Module], forward: Callable[..., torch.Tensor], bound: bool, tiles: int, checkpointed: bool
) -> type[nn.Module]:
    """A class for all MLPs of a kind: a function for each one would make torch.compile compile each layer anew."""

    def run(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return _tiled(self, forward if bound else partial(forward, self), tiles, checkpointed, hidden)

    return type(kind.__name__, (kind,), {"forward": run, "__module__": kind.__module__, "tiles": tiles})


def _tiled(mlp: nn.Module, forward: Forward, tiles: int, checkpointed: bool, hidden: torch.Tensor) -> torch.Tensor:
    flat = hidden.flatten(0, -2)
    size = -(-flat.shape[0] // tiles)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        once = checkpointed or not torch.is_grad_enabled()
        out = torch.cat(
            [
                (
                    forward(piece.unsqueeze(0))
                    if once
                    else checkpoint(forward, piece.unsqueeze(0), use_reentrant=False)
                ).squeeze(0)
                for piece in flat.split(size)
            ]
        )
    else:
        trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
        with _saving(flat):
            out = _Tiles.apply(forward, size, flat, *trained)
    return out.view(hidden.shape)


def kept_early(
    forward: Forward, backward: Callable[..., Sequence[Any]], flat: torch.Tensor, trained: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`forward(flat)`, whose backward pass needs `flat` alone, inside a checkpoint that runs operator by operator: what is kept
    is kept before the work, so that the checkpoint stops there and does not do the work a second time.

    `backward(flat, gradient, wanted)` gives the gradients of flat and of each of `trained`, or None; `wanted`: a bool of each.
    """
    with _saving(flat):
        out: torch.Tensor = _Early.apply(forward, backward, flat, *trained)
    return out


class _Early(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Any, flat: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        ctx.run = backward
        ctx.save_for_backward(flat)
        return forward(flat)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (flat,) = ctx.saved_tensors
        return None, None, *ctx.run(flat, gradient, ctx.needs_input_grad[2:])


def _saving(flat: torch.Tensor) -> AbstractContextManager[Any]:
    """What a function saves in this context is `flat`, and it is kept here and now, before the function does its work.

    Saved in its stead is an empty tensor, which alone holds the node that keeps `flat` (a node by itself drops what it saved in
    torch 2.11). So autograd lets go of it when it lets go of what the function saved, and says so where it is asked for later.
    """
    kept = _Keep.apply(flat, torch.empty(0, requires_grad=True))
    return torch.autograd.graph.saved_tensors_hooks(lambda _: kept, lambda kept: kept.grad_fn.saved_tensors[0])


class _Keep(torch.autograd.Function):
    """Keeps the first argument. The second one, which requires a gradient, makes sure that there is a node to keep it in."""

    @staticmethod
    def forward(ctx: Any, flat: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(flat)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nothing depends on what _Keep returns")


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Forward, size: int, flat: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.size, ctx.trained = forward, size, trained
        ctx.save_for_backward(flat)
        kind = flat.device.type
        ctx.autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.random = torch.get_rng_state(), torch.cuda.get_rng_state(flat.device) if kind == "cuda" else None
        out, start = torch.empty(0), 0
        for piece in flat.split(size):
            result = forward(piece.unsqueeze(0)).squeeze(0)
            if start == 0:
                out = result.new_empty(flat.shape)  # of the dtype that autocast gave it
            out[start : start + len(piece)] = result
            start += len(piece)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (flat,) = ctx.saved_tensors
        trained, wanted = ctx.trained, ctx.needs_input_grad[2]
        into = torch.empty_like(flat) if wanted else None
        sums: list[torch.Tensor | None] = [None] * len(trained)
        cuda, start = flat.device.type == "cuda", 0
        with torch.random.fork_rng(devices=[flat.device] if cuda else []), torch.enable_grad(), ctx.autocast():
            torch.set_rng_state(ctx.random[0])
            if cuda:
                torch.cuda.set_rng_state(ctx.random[1], flat.device)
            for piece, above in zip(flat.split(ctx.size), gradient.split(ctx.size), strict=True):
                piece = piece.detach().requires_grad_(wanted)
                out = ctx.run(piece.unsqueeze(0)).squeeze(0)
                with torch.autocast(flat.device.type, enabled=False):
                    found = torch.autograd.grad(
                        out, [*([piece] if wanted else []), *trained], above, allow_unused=True
                    )
                if into is not None:
                    into[start : start + len(piece)] = found[0]
                for index, part in enumerate(found[wanted:]):
                    if part is not None:
                        # In float32: a bfloat16 sum would round once a tile.
                        before = sums[index]
                        sums[index] = part.float() if before is None else before.add_(part)
                start += len(piece)
        return (
            None,
            None,
            into,
            *(
                None if total is None else total.to(parameter.dtype)
                for total, parameter in zip(sums, trained, strict=True)
            ),
        )
