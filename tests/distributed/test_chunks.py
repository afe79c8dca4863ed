"""Rectangles of divided tensors. Tensors on several ranks: tests/checkpoint/test_sharded.py."""

from __future__ import annotations

import torch

from fxtune.distributed.chunks import Chunk, chunk_of, coordinates, divided_like, is_divided, local, whole


def test_overlap_is_the_common_rectangle_and_lies_within_both():
    upper, middle = Chunk((6, 4), (0, 0), (4, 4)), Chunk((6, 4), (2, 1), (3, 2))
    common = upper.overlap(middle)
    assert common == Chunk((6, 4), (2, 1), (2, 2)) == middle.overlap(upper)
    matrix = torch.arange(24).view(6, 4)
    for chunk in (upper, middle):
        held = matrix[chunk.within(Chunk.whole((6, 4)))]
        assert torch.equal(held[common.within(chunk)], matrix[2:4, 1:3])


def test_neighbours_and_empty_chunks_have_nothing_in_common():
    assert Chunk((6,), (0,), (3,)).overlap(Chunk((6,), (3,), (3,))) is None
    empty = Chunk((6,), (0,), (0,))
    assert empty.empty
    assert empty.overlap(Chunk.whole((6,))) is None


def test_plain_tensor_is_the_whole():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    assert not is_divided(weight)
    assert chunk_of(weight) == Chunk.whole((2, 3))
    assert coordinates(weight) == ()
    assert local(weight).data_ptr() == whole(weight).data_ptr() == weight.data_ptr()
    assert divided_like(weight, weight) is weight
