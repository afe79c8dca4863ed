"""Tensors divided over ranks: the part that a rank holds, and the whole tensor.

A divided parameter is torch's DTensor, as `fully_shard` makes it. A plain tensor counts as a single chunk.
`torch.distributed.tensor` is imported where it is used: the import takes half a second, and the command line does not
need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Coordinates = tuple[tuple[str, int, int], ...]
"""(placement, size, position) for each dimension of the mesh along which a tensor is divided. Ranks with the same
coordinates hold the same chunk. A plain tensor has no coordinates."""


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor, held or stored separately. Each field has a number for each dimension."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offset: tuple[int, ...]
    """The place of the chunk's first element in the whole tensor."""
    size: tuple[int, ...]
    """The shape of the chunk."""

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Chunk:
        return Chunk(shape, (0,) * len(shape), shape)

    @property
    def empty(self) -> bool:
        return 0 in self.size

    def overlap(self, other: Chunk) -> Chunk | None:
        """The part that both chunks hold; None if it is empty."""
        begin = tuple(max(pair) for pair in zip(self.offset, other.offset, strict=True))
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        size = tuple(min(a + m, b + n) - start for start, (a, m, b, n) in zip(begin, ends, strict=True))
        return None if any(length <= 0 for length in size) else Chunk(self.shape, begin, size)

    def within(self, other: Chunk) -> tuple[slice, ...]:
        """The slices by which this chunk is read from a tensor that holds the larger chunk `other`."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.size, strict=True))


class LinearWeights:
    """A module with the frozen weights of several linears."""

    @property
    def weight_count(self) -> int:
        """The number of these weights."""
        raise NotImplementedError


def is_divided(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's chunk, which shares its memory with `tensor`."""
    chunk: torch.Tensor = tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]
    return chunk.detach()


def chunk_of(tensor: torch.Tensor) -> Chunk:
    """Where local(tensor) lies in the whole tensor."""
    shape = tuple(tensor.shape)
    if not is_divided(tensor):
        return Chunk.whole(shape)
    (entry,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # torch.distributed.checkpoint's protocol
    size = tuple(local(tensor).shape)
    return Chunk(shape, tuple(entry.offsets) if 0 not in size else (0,) * len(shape), size)


def coordinates(tensor: torch.Tensor) -> Coordinates:
    """The coordinates of this rank's chunk of `tensor`, equal on all ranks that hold the same chunk."""
    if not is_divided(tensor):
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    dimensions = zip(tensor.placements, mesh.shape, mesh.get_coordinate(), strict=True)  # type: ignore[attr-defined]
    return tuple(
        (str(placement), size, position) for placement, size, position in dimensions if not placement.is_replicate()
    )


@torch.no_grad()
def divided_like(chunk: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A divided tensor with the shape and the layout of `weight`. `chunk`: this rank's part."""
    from torch.distributed.tensor import DTensor

    if not isinstance(weight, DTensor):
        return chunk
    return DTensor.from_local(
        chunk, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of `tensor`, on every rank. For a divided tensor all ranks of its mesh call this together."""
    full: torch.Tensor = tensor.detach()
    return full.full_tensor() if is_divided(full) else full  # type: ignore[attr-defined]
