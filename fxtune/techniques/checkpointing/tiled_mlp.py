"""The MLP of a layer in tiles of the sequence, so that its wide tensors never exist for the whole row.

Gate, up and their product are the widest tensors of a layer. For a row of 65,536 tokens of Llama-3-8B each takes 1.75
GiB in bfloat16, and the backward pass holds six of them. An MLP treats each token alone, so it can process the row
tile by tile. The forward pass saves only the MLP's input. The backward pass recomputes a tile before it computes that
tile's gradients (the tiled MLP of ALST, arXiv 2506.13996). A tile should have some thousand tokens, so that its
matmuls fill the GPU.

In eager mode an autograd function runs the tiles. It saves its input before it computes (kernels/save_input.py). So a
checkpoint around the layer runs the MLP twice in all, and not three times. torch.compile cannot trace a backward pass
that calls autograd, so in a compiled layer the tiles are a plain loop. A checkpoint around the layer marks the
operators of each tile for recomputation. If the layer has no checkpoint, each tile gets one. The compiler frees each
tile before the next tile begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxtune.kernels.save_input import Forward, save_input_first
from fxtune.models.replacement import InPlaceOf


class TiledMlp(InPlaceOf):
    """An MLP in `tiles` tiles. It maps [..., hidden] to [..., hidden] and treats each token alone."""

    def __init__(self, mlp: nn.Module, tiles: int, checkpointed: bool) -> None:
        """`checkpointed`: whether the layer around the MLP recomputes it."""
        super().__init__(mlp)
        self.tiles, self.checkpointed = tiles, checkpointed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _tiled(self, self.replaced.forward, self.tiles, self.checkpointed, hidden)


def _tiled(mlp: nn.Module, forward: Forward, tiles: int, checkpointed: bool, hidden: torch.Tensor) -> torch.Tensor:
    flat = hidden.flatten(0, -2)
    size = -(-flat.shape[0] // tiles)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        tiles_checkpointed = torch.is_grad_enabled() and not checkpointed
        results = []
        for piece in flat.split(size):
            piece = piece.unsqueeze(0)
            result = checkpoint(forward, piece, use_reentrant=False) if tiles_checkpointed else forward(piece)
            results.append(result.squeeze(0))
        out = torch.cat(results)
    else:
        trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
        work = _EagerTiles(forward, size, trained)
        out = save_input_first(work.forward, work.backward, flat, trained)
    return out.view(hidden.shape)


class _EagerTiles:
    """Forward and backward of an MLP, tile by tile, for save_input_first()."""

    def __init__(self, forward: Forward, size: int, trained: list[nn.Parameter]) -> None:
        self.run, self.size, self.trained = forward, size, trained

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        device = flat.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self.autocast = partial(torch.autocast, device, dtype, enabled)
        self.random = torch.get_rng_state(), torch.cuda.get_rng_state(flat.device) if device == "cuda" else None
        out, start = torch.empty(0), 0
        for piece in flat.split(self.size):
            result = self.run(piece.unsqueeze(0)).squeeze(0)
            if start == 0:
                out = result.new_empty(flat.shape)  # in the dtype that autocast chose
            out[start : start + len(piece)] = result
            start += len(piece)
        return out

    def backward(self, flat: torch.Tensor, gradient: torch.Tensor, needed: Sequence[bool]) -> Sequence[Any]:
        trained, cuda, start = self.trained, flat.device.type == "cuda", 0
        dflat = torch.empty_like(flat) if needed[0] else None
        sums: list[torch.Tensor | None] = [None] * len(trained)
        with torch.random.fork_rng(devices=[flat.device] if cuda else []), torch.enable_grad(), self.autocast():
            torch.set_rng_state(self.random[0])
            if self.random[1] is not None:
                torch.cuda.set_rng_state(self.random[1], flat.device)
            for piece, above in zip(flat.split(self.size), gradient.split(self.size), strict=True):
                piece = piece.detach().requires_grad_(needed[0])
                out = self.run(piece.unsqueeze(0)).squeeze(0)
                inputs = [*([piece] if needed[0] else []), *trained]
                with torch.autocast(flat.device.type, enabled=False):
                    gradients = torch.autograd.grad(out, inputs, above, allow_unused=True)
                if dflat is not None:
                    dflat[start : start + len(piece)] = gradients[0]
                for index, part in enumerate(gradients[needed[0] :]):
                    if part is not None:
                        # These sums are float32, because a bfloat16 sum would be rounded at each tile.
                        before = sums[index]
                        sums[index] = part.float() if before is None else before.add_(part)
                start += len(piece)
        totals = zip(sums, trained, strict=True)
        return dflat, *(None if total is None else total.to(parameter.dtype) for total, parameter in totals)
