"""Compares the Triton kernels of fused LoRA with their plain
references.

Products on tensor cores are compared in float16, because the interpreter multiplies bfloat16 values as integers.
"""

from __future__ import annotations

import torch

from fxtune.kernels import lora_triton, swiglu_lora_triton, swiglu_reduce_triton
from fxtune.kernels.lora_adapters import Adapters, pack
from fxtune.kernels.swiglu import FusedSums, gated, gated_backward

lora_triton.COLUMNS, lora_triton.NUMBERS, lora_triton.PROGRAMS = 32, 256, 6
swiglu_reduce_triton.WALK.update(ROWS=16, COLUMNS=32)
swiglu_reduce_triton.LEAST_ROWS = swiglu_lora_triton.WALK_ROWS = 40
swiglu_lora_triton.WALK.update(ROWS=16, COLUMNS=32)
lora_triton.PROJECT.update(ROWS=32, STEP=32)
lora_triton.REDUCE.update(COLUMNS=32, STEP=32)
lora_triton.ADD.update(ROWS=32, COLUMNS=32, TILES=3)
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative error of one rounding."""


def with_gaps(rows: int, width: int, gap: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, width] with `gap` other numbers between the rows."""
    return torch.full((rows, width + gap), 7.0, dtype=dtype)[:, :width]


def assert_close(one: torch.Tensor, other: torch.Tensor, relative: float, absolute: float = 1e-6) -> None:
    torch.testing.assert_close(one, other, rtol=relative, atol=absolute)
    if one.stride(0) > one.shape[1] and one.dim() == 2:
        gap = one._base[:, one.shape[1] :] if one._base is not None else one[:, :0]
        assert (gap == 7).all(), "the kernel wrote between two rows"


def random_rows(dtype: torch.dtype, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
    """Random rows with a gap between them."""
    return (torch.randn(rows, columns + 5) * scale).to(dtype)[:, :columns]


def activation(dtype: torch.dtype, act: str, rows: int, width: int, wide: int) -> None:
    """Compare the gated activation and its gradient: with few rows one program per tile, with many rows a loop."""
    relative = 3 * DTYPES[dtype]
    gate_up, dp = random_rows(dtype, rows, 2 * width, 3.0), random_rows(dtype, rows, width)
    share = random_rows(dtype, rows, wide), random_rows(dtype, 2 * width, wide, 0.2)
    above = random_rows(dtype, rows, 16), random_rows(dtype, 16, width, 0.2)
    mine, theirs = with_gaps(rows, width, 16, dtype), with_gaps(rows, width, 16, dtype)
    swiglu_lora_triton.forward(act, gate_up, mine, share)
    assert_close(mine, gated(act, gate_up, share, theirs), relative, relative)
    mine, theirs = with_gaps(rows, 2 * width, 16, dtype), with_gaps(rows, 2 * width, 16, dtype)
    first, second = dp.clone(), dp.clone()
    swiglu_lora_triton.backward(act, gate_up, first, mine, share, above)
    assert_close(mine, gated_backward(act, gate_up, second, share, above, theirs), relative, relative)
    assert_close(first, second, relative, relative)


def reducing_backward(act: str, keep_p: bool, rows: int, width: int, ranks: tuple[int, int, int]) -> None:
    """Compare the fused backward kernel that also reduces adapter gradients, in two calls, on rows with gaps."""
    (gate, _, down), both = ranks, sum(ranks[:2])
    wide, narrow = -(-both // 16) * 16, -(-down // 16) * 16
    gate_up, dp, xa, dyb = (random_rows(torch.float16, rows, size) for size in (2 * width, width, wide, narrow))
    b, a = random_rows(torch.float16, 2 * width, wide, 0.2), random_rows(torch.float16, narrow, width, 0.2)
    b[:width, gate:] = b[width:, :gate] = b[:, both:] = a[down:] = 0
    mine, theirs = with_gaps(rows, 2 * width, 16, torch.float16), torch.empty(rows, 2 * width).half()
    first, second = dp.clone(), dp.clone()
    expected = FusedSums(xa, dyb, ranks, True)
    gated_backward(act, gate_up, second, (xa, b), (dyb, a), theirs, expected)
    totals = None, None
    for part in (slice(0, 2 * rows // 3), slice(2 * rows // 3, rows)):
        totals = swiglu_reduce_triton.backward(
            act, gate_up[part], first[part], mine[part], xa[part], dyb[part], ranks, totals, (b, a), keep_p
        )
    assert_close(mine, theirs, 3e-3, 2e-3)
    torch.testing.assert_close(first, second if keep_p else dp, rtol=3e-3, atol=2e-3)
    of_b, of_a = (one.sum(0) for one in totals)
    exact_b, exact_a = (one[0] for one in expected.totals)
    for one, other in (
        (of_b[:width, :gate], exact_b[:width, :gate]),
        (of_b[width:, gate:both], exact_b[width:, gate:both]),
        (of_a[:, :down], exact_a[:, :down]),
    ):
        torch.testing.assert_close(one, other, rtol=5e-3, atol=2e-2)


def adapters(dtype: torch.dtype, ranks: tuple[int, ...], outs: tuple[int, ...], bias: bool) -> None:
    inner = 50
    a, b = (
        [torch.randn(rank, inner) for rank in ranks],
        [torch.randn(out, rank) for out, rank in zip(outs, ranks, strict=True)],
    )
    offsets, scaling = [torch.randn(out) for out in outs] if bias else [], [0.5 + index for index in range(len(ranks))]
    group = Adapters(a, b, offsets, scaling, dtype)
    rank = group.padded_rank
    made = [(with_gaps(rank, inner, 9, dtype), with_gaps(sum(outs), rank, 9, dtype)) for _ in range(2)]
    pack(group, *made[0])
    lora_triton.pack(a, b, scaling, torch.cat(offsets) if bias else None, *made[1])
    for one, other in zip(*made, strict=True):
        assert_close(other, one, DTYPES[dtype], 0)
    if dtype is torch.float16:
        products(group, *made[0])


def products(group: Adapters, a: torch.Tensor, b: torch.Tensor) -> None:
    rows, ones_column = 300, sum(group.ranks) if group.bias else -1
    inner = group.in_features
    x, dy = (torch.randn(rows, width + 4).half()[:, :width] for width in (inner, sum(group.out_features)))
    buffer = torch.zeros(rows, inner + group.padded_rank, dtype=torch.float16)
    xa = lora_triton.project(x, a.t(), buffer[:, :inner], buffer[:, inner:], ones_column, 1.0)
    expected = (x.float() @ a.t().float()).half()
    if group.bias:
        expected[:, ones_column] = 1
    assert_close(xa, expected, 2e-3, 2e-3)
    assert torch.equal(buffer, torch.cat([x, xa], 1))
    dyb = lora_triton.project(dy, b)
    assert_close(dyb, (dy.float() @ b.float()).half(), 2e-3, 2e-3)
    for narrow, factor in ((xa, b.t()), (dyb, a)):  # row-major and column-major factors
        y = with_gaps(rows, factor.shape[1], 5, torch.float16).copy_(torch.randn(rows, factor.shape[1]))
        added = (y.float() + narrow.float() @ factor.float()).half()
        out = with_gaps(rows, factor.shape[1], 16, torch.float16)
        assert lora_triton.add(y, narrow, factor, out) is out
        assert_close(out, added, 2e-3, 2e-3)
        more = with_gaps(rows, factor.shape[1], 3, torch.float16).copy_(torch.randn(rows, factor.shape[1]))
        sums = lora_triton.add(y, narrow, factor, with_gaps(rows, factor.shape[1], 16, torch.float16), more)
        assert torch.equal(sums, out + more)  # rounded twice
        assert_close(lora_triton.add(y, narrow, factor, y), added, 2e-3, 2e-3)
    da = lora_triton.reduce(x[250:], dyb[250:], lora_triton.reduce(x[:250], dyb[:250]))
    db = lora_triton.reduce(dy, xa)
    assert_close(da.sum(0), x.t().float() @ dyb.float(), 1e-4, 1e-3)
    assert_close(db.sum(0), dy.t().float() @ xa.float(), 1e-4, 1e-3)
    gradients(group, da, db)


def gradients(group: Adapters, da: torch.Tensor, db: torch.Tensor) -> None:
    for first, second in ((da, db), (None, db), (da, None)):
        mine = [[torch.full_like(one, 7.0) for one in half] for half in (group.a, group.b)]
        lora_triton.unpack(first, second, group.scaling, *mine)
        row, column = 0, 0
        for one, two, scaling in zip(*mine, group.scaling, strict=True):
            ranks = slice(column, column + len(one))
            assert_close(one, da.sum(0).t()[ranks] if first is not None else torch.full_like(one, 7.0), 1e-5)
            assert_close(
                two,
                db.sum(0)[row : row + len(two), ranks] * scaling if second is not None else torch.full_like(two, 7.0),
                1e-5,
            )
            row, column = row + len(two), column + len(one)


torch.manual_seed(0)
compared = 0
SILU, GELU = "silu", "gelu_pytorch_tanh"
# Each pair of options, not each combination: tests/gpu has the matrix.
for case in (
    (torch.float32, SILU, 41, 40, 32),
    (torch.float32, GELU, 150, 40, 48),
    (torch.float16, SILU, 150, 40, 48),
    (torch.float16, GELU, 41, 40, 32),
):
    activation(*case)
    compared += 1
LONG, SHORT = (150, 70, (16, 8, 4)), (33, 40, (3, 20, 17))
for case in ((SILU, False, *LONG), (SILU, True, *SHORT), (GELU, True, *LONG), (GELU, False, *SHORT)):
    reducing_backward(*case)
    compared += 1
GROUPS = (((3,), (40,)), ((4, 4, 7), (33, 8, 8)), ((8, 1), (5, 70)), ((1, 2, 3, 4), (5, 6, 7, 8)))
for index, (ranks, outs) in enumerate(GROUPS):
    adapters(torch.float16, ranks, outs, bias=index % 2 == 0)
    compared += 1
for dtype, index in ((torch.float32, 0), (torch.bfloat16, 1)):
    adapters(dtype, *GROUPS[index], bias=bool(index))
    compared += 1
print(compared, "compared")
