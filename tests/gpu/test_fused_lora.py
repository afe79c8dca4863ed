"""Fused LoRA on a GPU: more accurate than plain linear layers with adapters, and as fast as its matmuls, at any
length.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial

import pytest
import torch
from support import reference
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxtune.kernels import frozen_base, fused_lora, lora_adapters, lora_triton
from fxtune.kernels.frozen_base import augment
from fxtune.kernels.fused_lora import lora_linear, lora_mlp
from fxtune.kernels.swiglu import FusedSums, gated, gated_backward
from fxtune.techniques.quantized_modules import dequantized, grouped, quantized

ROWS = (1, 100, 5000)
"""One row, too few rows for the Triton products, and enough rows with a partial last tile."""
ACTS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


def drawn(inner: int, outs: list[int], ranks: list[int], dtype: torch.dtype = torch.bfloat16):
    """Weights in `dtype`; lora_A, lora_B in float32 with gradients; scalings."""
    weights = [torch.randn(out, inner, device="cuda").mul_(inner**-0.5).to(dtype) for out in outs]
    a = [torch.randn(rank, inner, device="cuda").mul_(inner**-0.5).requires_grad_() for rank in ranks]
    b = [
        torch.randn(out, rank, device="cuda").mul_(0.1).requires_grad_() for out, rank in zip(outs, ranks, strict=True)
    ]
    return weights, a, b, [1.0 + index for index in range(len(outs))]


def plain(x, weights, a, b, scaling):
    """One linear layer after the other, like peft under autocast."""
    return torch.cat(
        [
            F.linear(x, weight) + F.linear(F.linear(x, one.to(x.dtype)), two.to(x.dtype)) * scale
            for weight, one, two, scale in zip(weights, a, b, scaling, strict=True)
        ],
        -1,
    )


def plain_mlp(x, up, down, act="silu"):
    gate, other = plain(x, *up).chunk(2, -1)
    return plain(ACTS[act](gate) * other, *down)


def exactly(parts):
    return [one.float() for one in parts[0]], *parts[1:]


def inputs(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda").to(dtype).requires_grad_()


def nearer(mine, theirs, exact, x, trained, slack: float = 1.05) -> None:
    """Assert that errors of results and gradients against float32 are at most `slack` times those of plain linears.

    With one row a gradient may depend on a single rounded number, so four times the slack is allowed.
    """
    slack = slack if len(x) > 1 else 4 * slack
    above = torch.randn_like(mine)
    exact_x = exact[1]
    wanted = [exact[0], *torch.autograd.grad(exact[0], [exact_x, *trained], above.float())]
    ours = [mine, *torch.autograd.grad(mine, [x, *trained], above)]
    pefts = [theirs, *torch.autograd.grad(theirs, [x, *trained], above)]
    for one, other, truth in zip(ours, pefts, wanted, strict=True):
        assert one.dtype is other.dtype
        limit = max(slack * reference.relative(other, truth), 1e-5)
        assert reference.relative(one, truth) < limit, (reference.relative(one, truth), limit)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", reference.LIMITS)
@pytest.mark.parametrize(
    ("outs", "ranks"),
    [([512, 256, 256], [16, 16, 16]), ([512], [8]), ([160, 96], [3, 5]), ([512, 512], [100, 100])],
    ids=["qkv", "one", "odd", "wide"],
)
def test_groups_match_float32(outs, ranks, dtype, rows):
    kind = getattr(torch, dtype)
    parts, x = drawn(768, outs, ranks, kind), inputs(rows, 768, kind)
    exact = x.detach().float().requires_grad_()
    bias = [torch.randn(out, device="cuda").to(kind) for out in outs]
    for offset in ([], bias):
        mine = lora_linear(x, *parts[1:3], [augment(parts[0], ranks, bool(offset))], parts[3], bias=offset)
        more = torch.cat(offset) if offset else torch.zeros((), device="cuda")
        nearer(
            mine,
            plain(x, *parts) + more.to(kind),
            (plain(exact, *exactly(parts)) + more.float(), exact),
            x,
            [*parts[1], *parts[2]],
        )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", reference.LIMITS)
@pytest.mark.parametrize(("keep", "tiles"), [(True, 1), (False, 1), (False, 3)])
@pytest.mark.parametrize("act", ACTS)
def test_mlps_match_float32(act, keep, tiles, dtype, rows):
    kind = getattr(torch, dtype)
    up, down = drawn(768, [1504, 1504], [16, 8], kind), drawn(1504, [768], [16], kind)
    x = inputs(rows, 768, kind)
    exact = x.detach().float().requires_grad_()
    a, b, scaling = ([*one, *other] for one, other in zip(up[1:], down[1:], strict=True))
    mine = lora_mlp(
        x, a, b, [augment(up[0], [16, 8])], [augment(down[0], [16])], scaling, act=act, keep=keep, tiles=tiles
    )
    nearer(mine, plain_mlp(x, up, down, act), (plain_mlp(exact, exactly(up), exactly(down), act), exact), x, [*a, *b])


def test_no_rows():
    up, down = drawn(64, [128, 128], [16, 8]), drawn(128, [64], [16])
    a, b, scaling = ([*one, *other] for one, other in zip(up[1:], down[1:], strict=True))
    x = inputs(0, 64)
    for y in (
        lora_mlp(x, a, b, [augment(up[0], [16, 8])], [augment(down[0], [16])], scaling),
        lora_linear(x, *up[1:3], [augment(up[0], [16, 8])], up[3]),
    ):
        y.sum().backward()
        assert x.grad.shape == (0, 64)
        assert not a[0].grad.any()


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_quantized_weights(kind):
    """As accurate as plain linear layers with the dequantized weights. fp8 also rounds activations."""
    if kind != "fp8":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(1)
    sizes = ((1024, 2048), (1024, 2048), (2048, 1024))
    stored = [
        quantized(nn.Linear(inner, out, False), kind, torch.bfloat16, torch.device("cuda")) for inner, out in sizes
    ]
    name = stored[0].stored_as
    up, down = drawn(1024, [2048, 2048], [16, 8]), drawn(2048, [1024], [16])
    up = ([dequantized(one) for one in stored[:2]], *up[1:])
    down = ([dequantized(stored[2])], *down[1:])
    a, b, scaling = ([*one, *other] for one, other in zip(up[1:], down[1:], strict=True))
    slack = 60.0 if kind == "fp8" else 1.1
    for rows in (100, 5000):
        x = inputs(rows, 1024)
        exact = x.detach().float().requires_grad_()
        truth = plain_mlp(exact, exactly(up), exactly(down)), exact
        for options in ({}, {"keep": False, "tiles": 2}):
            mine = lora_mlp(x, a, b, grouped(stored[:2]), grouped(stored[2:]), scaling, name, name, **options)
            truth = plain_mlp(exact, exactly(up), exactly(down)), exact
            nearer(mine, plain_mlp(x, up, down), truth, x, [*a, *b], slack)
        mine = lora_linear(x, *up[1:3], grouped(stored[:2]), up[3], name)
        nearer(mine, plain(x, *up), (plain(exact, *exactly(up)), exact), x, [*up[1], *up[2]], slack)


@pytest.mark.parametrize(
    ("rows", "width", "ranks"), [(5000, 1504, (16, 16, 16)), (4099, 200, (16, 8, 4)), (4096, 136, (3, 20, 32))]
)
def test_fused_sums(rows, width, ranks):
    """Sums of g = [dgate | dup] and p against float32 on the CPU, then with more rows added."""
    both = sum(ranks[:2])
    wide, narrow = -(-both // 16) * 16, -(-ranks[2] // 16) * 16
    gate_up, dp, xa, dyb = (
        torch.randn(rows, size, device="cuda").bfloat16() for size in (2 * width, width, wide, narrow)
    )
    b, a = (torch.randn(*size, device="cuda").mul_(0.2).bfloat16() for size in ((2 * width, wide), (narrow, width)))
    b[:width, ranks[0] :] = b[width:, : ranks[0]] = b[:, both:] = a[ranks[2] :] = 0
    for act, keep_p in zip(ACTS, (True, False), strict=True):
        ours, theirs, results = FusedSums(xa, dyb, ranks, keep_p), FusedSums(xa.cpu(), dyb.cpu(), ranks, True), []
        for one in (ours, theirs):
            own = [part.to(one.xa.device) for part in (gate_up, dp.clone(), torch.empty_like(gate_up), b, a)]
            for _ in range(2):
                above = own[1].clone()
                gated_backward(act, own[0], above, (one.xa, own[3]), (one.dyb, own[4]), own[2], one)
            results.append((own[2].cpu(), above.cpu(), *(total.sum(0).cpu() for total in one.totals)))
        (g, p, of_b, of_a), (exact_g, exact_p, exact_b, exact_a) = results
        assert reference.relative(g, exact_g) < 3e-3
        assert reference.relative(p, exact_p if keep_p else dp.cpu()) < 3e-3
        for rows_of, columns in ((slice(width), slice(ranks[0])), (slice(width, None), slice(ranks[0], both))):
            assert reference.relative(of_b[rows_of, columns], exact_b[rows_of, columns]) < 3e-3
        assert reference.relative(of_a[:, : ranks[2]], exact_a[:, : ranks[2]]) < 3e-3


def test_more_than_int32_numbers():
    """80,000 rows of 2 x 14336: the last rows lie beyond 2^31 numbers."""
    rows, width = 80000, 14336
    assert rows * 2 * width > 2**31
    gate_up, dp = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (2 * width, width))
    out, slopes = torch.empty_like(dp), torch.empty_like(gate_up)
    last = slice(rows - 300, rows)
    share, above = (
        [torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in sizes]
        for sizes in (((rows, 32), (2 * width, 32)), ((rows, 16), (16, width)))
    )
    alone = [one[last].clone() for one in (gate_up, dp)]
    own, more = [(one[0][last], one[1]) for one in (share, above)]
    gated("silu", gate_up, share, out)
    assert torch.equal(out[last], gated("silu", alone[0], own, torch.empty_like(alone[1])))
    gated_backward("silu", gate_up, dp, share, above, slopes)
    assert torch.equal(slopes[last], gated_backward("silu", alone[0], alone[1], own, more, torch.empty_like(alone[0])))
    assert torch.equal(dp[last], alone[1])
    del dp, out, alone
    factor = torch.randn(2 * width, 32, device="cuda", dtype=torch.bfloat16)
    found = lora_triton.project(gate_up, factor)
    assert reference.relative(found[last], gate_up[last].float() @ factor.float()) < 1e-2
    sums = lora_triton.reduce(gate_up, found).sum(0)
    wanted = sum(
        part.float().t() @ other.float() for part, other in zip(gate_up.split(8000), found.split(8000), strict=True)
    )
    assert reference.relative(sums, wanted) < 1e-3


@pytest.mark.parametrize(
    ("rows", "width", "ranks"), [(4096, 4096, 16), (5000, 6144, 48), (4099, 1000, 128), (80000, 28672, 32)]
)
def test_add_rounds_and_leaves_gaps_between_rows(rows, width, ranks):
    """Rows with gaps, row-major and column-major factors, the residual stream, and more than 2^31 elements."""
    whole, stream = (torch.randn(rows, width + room, device="cuda", dtype=torch.bfloat16) for room in (16, 8))
    narrow, factor = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((rows, ranks), (width, ranks))
    )
    for one, more in ((factor.t(), None), (factor.t().contiguous(), None), (factor.t(), stream[:, :width])):
        before = whole.clone()
        lora_adapters.add(whole[:, :width], narrow, one, residual=more)
        assert torch.equal(whole[:, width:], before[:, width:])
        for part in (slice(0, 300), slice(rows - 300, rows)):
            wanted = before[part, :width].float() + narrow[part].float() @ one.float()
            if more is not None:
                assert (
                    whole[part, :width] == wanted.bfloat16() + more[part]
                ).float().mean() > 0.99  # the others are close to ties
                wanted += more[part].float()
            assert reference.relative(whole[part, :width], wanted) < 2.0**-8
            assert more is not None or ((whole[part, :width] - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-2).all()


def test_results_are_the_same_bits_each_time():
    up, down = drawn(1024, [2048, 2048], [16, 16]), drawn(2048, [1024], [16])
    a, b, scaling = ([*one, *other] for one, other in zip(up[1:], down[1:], strict=True))
    made, x = ([augment(up[0], [16, 16])], [augment(down[0], [16])]), inputs(9000, 1024)
    runs = [
        torch.autograd.grad(lora_mlp(x, a, b, *made, scaling, tiles=tiles).square().sum(), [x, *a, *b])
        for tiles in (1, 1, 2, 2)
    ]
    for first, second in ((runs[0], runs[1]), (runs[2], runs[3])):
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_compiled_and_checkpointed():
    up, down = drawn(1024, [2048, 2048], [16, 16]), drawn(2048, [1024], [16])
    a, b, scaling = ([*one, *other] for one, other in zip(up[1:], down[1:], strict=True))
    made = [augment(up[0], [16, 16])], [augment(down[0], [16])]
    qkv = drawn(1024, [512, 512], [16, 16])
    whole = [augment(qkv[0], [16, 16])]
    trained = [*a, *b, *qkv[1], *qkv[2]]

    def layer(x):
        x = x + lora_linear(F.rms_norm(x, (1024,)), *qkv[1:3], whole, qkv[3])
        return x + lora_mlp(F.rms_norm(x, (1024,)), a, b, *made, scaling, keep=False)

    x = inputs(6000, 1024)
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *trained])
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True, dynamic=False)
    for run in (compiled, torch.compile(layer, fullgraph=True, dynamic=False)):
        for one, other in zip(torch.autograd.grad(run(x).square().sum(), [x, *trained]), wanted, strict=True):
            assert reference.relative(one, other) < 2e-2


def seconds(run, times: int = 5) -> float:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def llama_mlp(rows: int = 16384):
    up, down = drawn(4096, [14336, 14336], [16, 16]), drawn(14336, [4096], [16])
    a, b, scaling = ([*one, *other] for one, other in zip(up[1:], down[1:], strict=True))
    made = [augment(up[0], [16, 16])], [augment(down[0], [16])]
    x = inputs(rows, 4096)
    return x, [*a, *b], partial(lora_mlp, x, a, b, *made, scaling), partial(plain_mlp, x, up, down)


@pytest.mark.timed
def test_mlp_time_is_close_to_its_matmuls():
    """Llama-3-8B's, 16,384 tokens, forward and backward: six products of 1.9 TFLOP each."""
    x, trained, fused, linear_by_linear = llama_mlp()
    above = torch.randn_like(x)
    weight, wide = (
        torch.randn(4096, 28672, device="cuda").bfloat16(),
        torch.randn(16384, 28672, device="cuda").bfloat16(),
    )

    def products():
        for _ in range(2):
            torch.mm(x.detach(), weight, out=wide)
        torch.mm(wide, weight.t())

    floor = seconds(
        products
    )  # 2 x (4096 x 28672) like forward and one like backward: the total size of all six products
    ours = seconds(lambda: torch.autograd.grad(fused(), [x, *trained], above))
    theirs = seconds(lambda: torch.autograd.grad(linear_by_linear(), [x, *trained], above))
    print(f"matmuls {1e3 * floor:.1f} ms, fused {1e3 * ours:.1f} ms, linear by linear {1e3 * theirs:.1f} ms")
    assert ours < 1.3 * floor
    assert ours < 0.85 * theirs


@pytest.mark.timed
def test_gated_kernels_run_at_memory_bandwidth(monkeypatch):
    """As an MLP calls them: gaps between rows, adapters added and, in the backward pass, adapter gradients summed.

    The gain of summing in the same kernel shows only in a complete MLP. Alone, separate kernels are as fast: they then
    run at higher clocks than between matmuls that draw all of the GPU's power.
    """
    rows, width = 16384, 14336
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    gate_up, dp, out = (frozen_base.spaced(like, rows, size).normal_() for size in (2 * width, width, 2 * width))
    xa, dyb, b, a = (
        torch.randn(*size, device="cuda", dtype=torch.bfloat16).mul_(0.1)
        for size in ((rows, 32), (rows, 16), (2 * width, 32), (16, width))
    )
    copy = 8 * rows * width / seconds(lambda: out.copy_(gate_up))
    forward = 6 * rows * width / seconds(lambda: gated("silu", gate_up, (xa, b), out[:, :width]))
    backward = (
        10
        * rows
        * width
        / seconds(
            lambda: gated_backward(
                "silu", gate_up, dp, (xa, b), (dyb, a), out, FusedSums(xa, dyb, (16, 16, 16), False)
            )
        )
    )
    x, trained, fused, _ = llama_mlp()
    above, times = torch.randn_like(x), {True: [], False: []}
    for passing in (True, False) * 6:
        monkeypatch.setattr(fused_lora, "can_fuse_sums", lambda x, ranks, passing=passing: passing)
        times[passing].append(seconds(lambda: torch.autograd.grad(fused(), [x, *trained], above)))
    with_sums, apart = (statistics.median(times[passing]) for passing in (True, False))
    print(
        f"copy {copy / 1e12:.2f} TB/s, forward {forward / 1e12:.2f}, backward {backward / 1e12:.2f}; "
        f"an MLP {1e3 * with_sums:.2f} ms, sums apart {1e3 * apart:.2f}"
    )
    assert forward > 0.8 * copy
    assert backward > 0.7 * copy
    assert with_sums < apart


def test_memory_of_an_mlp():
    """Saved: x A^T, p A^T and optionally gate_up.

    Temporary: two buffers as wide as gate_up, or a part of them with tiles.
    """
    wide = 16384 * 28672 * 2
    for options, kept, most in (
        ({}, wide, 3.3 * wide),
        ({"keep": False}, 0, 3.3 * wide),
        ({"tiles": 4}, 0, 1.4 * wide),
    ):
        gc.collect()  # frees what earlier tests left in cycles, now and not while this test counts
        x, trained, fused, _ = llama_mlp()
        fused(**options)  # allocates the workspace of cuBLAS, which stays
        before = torch.cuda.memory_allocated()
        y = fused(**options)
        held = torch.cuda.memory_allocated() - before - y.numel() * 2
        assert kept <= held < kept + 2**23
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, [x, *trained], torch.ones_like(y))
        assert torch.cuda.max_memory_allocated() - before < most
        del x, trained, fused, y


@pytest.mark.parametrize("ranks", [16, 32, 48, 64, 112])
@pytest.mark.parametrize("rows", [4096, 5000])
def test_narrow_products_are_exact_and_deterministic(rows, ranks):
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    factor = torch.randn(ranks, 1024 + ranks, device="cuda", dtype=torch.bfloat16)[:, :1024].t()
    exact = x.float() @ factor.float()
    buffer = torch.empty(rows, 1024 + ranks, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        found = lora_triton.project(x, factor, buffer[:, :1024], buffer[:, 1024:])
        assert ((found - exact).abs() <= 2.0**-8 * exact.abs() + 1e-2).all()
        assert torch.equal(buffer, torch.cat([x, found], 1))


def test_few_rows_use_cublas_with_the_same_results(monkeypatch):
    parts, x = drawn(1024, [512, 256, 256], [16] * 3), inputs(5000, 1024)
    made, results = [augment(parts[0], [16] * 3)], []
    for fewest in (4096, 10**9):
        monkeypatch.setattr(lora_adapters, "MIN_ROWS", fewest)
        y = lora_linear(x, *parts[1:3], made, parts[3])
        results.append([y, *torch.autograd.grad(y, [x, *parts[1], *parts[2]], torch.ones_like(y))])
    for one, other in zip(*results, strict=True):
        assert reference.relative(one, other) < 1e-2
