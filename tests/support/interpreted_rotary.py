"""Compares the Triton kernel of RoPE with the plain reference."""

from __future__ import annotations

import itertools

import torch

from fxtune.kernels import rotary_triton
from fxtune.kernels.rotary import reference

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}
"""Relative tolerance of one rounding. The interpreter truncates to bfloat16; a GPU rounds to nearest."""
SHAPES = {"llama": (2, 5, 4, 2, 16, 16), "partial": (2, 3, 4, 4, 10, 6), "odd": (1, 4, 7, 1, 12, 12)}
"""rows, length, heads, kv_heads, dim, width."""


def apart(*shape: int, dtype: torch.dtype, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor with contiguous last two dimensions and `gap` numbers after them, and a view of these numbers."""
    rows, length, heads, dim = shape
    whole = torch.full((rows, length, heads * dim + gap), 7.0, dtype=dtype)
    return whole[..., : heads * dim].unflatten(-1, (heads, dim)), whole[..., heads * dim :]


def compare(dtype: torch.dtype, name: str, back: bool, third: bool, pairs: int) -> None:
    rotary_triton.PAIRS = pairs
    rows, length, heads, kv_heads, dim, width = SHAPES[name]
    # Heads first in memory, like the gradients of some attention kernels, and rows with gaps.
    q = torch.randn(rows, heads, length, dim).to(dtype).transpose(1, 2)
    sources = [q, *(torch.randn(rows, length, kv_heads, dim + 2).to(dtype)[..., :dim] for _ in range(1 + third))]
    made = [apart(*x.shape, dtype=dtype, gap=3) for x in sources]
    cos, sin = (torch.randn(1 if name == "llama" else rows, length, width).to(dtype) for _ in range(2))
    rotary_triton.rotate(sources, [target for target, _ in made], cos, sin, back)
    for index, (source, (target, gap)) in enumerate(zip(sources, made, strict=True)):
        wanted = reference(source, cos, sin, back).to(dtype) if index < 2 else source
        torch.testing.assert_close(target, wanted, rtol=DTYPES[dtype], atol=1e-6)
        assert gap.eq(7).all(), "written between two rows"


torch.manual_seed(0)
compared = 0
options = itertools.cycle(itertools.product((False, True), (False, True), (8, 2048)))
for (dtype, shape), (back, third, pairs) in zip(itertools.product(DTYPES, SHAPES), options, strict=False):
    compare(dtype, shape, back, third, pairs)
    compared += 1
rotary_triton.rotate(
    *[[torch.empty(0, 4, 2, 8)] * 2] * 2, *[torch.empty(1, 4, 8)] * 2, False
)  # without rows no kernel is launched
print(compared, "compared")
