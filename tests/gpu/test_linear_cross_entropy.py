"""The fused head and loss on a GPU: the numbers of plain float32, in a chunk's memory, near its matmuls' time, without
a wait.
"""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from support import reference
from support.losses import reference_log_probs

from fxtune.kernels import linear_cross_entropy as kernel
from fxtune.kernels.linear_cross_entropy import (
    default_chunk_rows,
    linear_cross_entropy,
    linear_log_probs,
)
from fxtune.system.terminal.units import GIB
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline

WORDS = 128256
FUSED = dict(enabled=True, kernels=["fused_linear_cross_entropy"])


def drawn(
    rows: int,
    width: int,
    words: int = WORDS,
    dtype: torch.dtype = torch.bfloat16,
    head: bool = True,
    bias: bool = False,
    spread: float = 1.0,
):
    """hidden, weight, labels, bias on the GPU; logits of standard deviation `spread`.

    `head`: whether it is trained.
    """
    hidden = torch.randn(rows, width, device="cuda").mul_(spread).to(dtype).requires_grad_()
    weight = torch.randn(words, width, device="cuda").mul_(width**-0.5).to(dtype).requires_grad_(head)
    labels = torch.randint(words, (rows,), device="cuda")
    return hidden, weight, labels, torch.randn(words, device="cuda").to(dtype).requires_grad_(head) if bias else None


def in_float32(hidden, weight, labels, bias=None, **options):
    """Loss and gradients of the same rounded inputs, with autograd over all logits."""
    leaves = [leaf.detach().float().requires_grad_() for leaf in (hidden, weight, bias) if leaf is not None]
    losses = -reference_log_probs(leaves[0], leaves[1], labels, leaves[2] if bias is not None else None, **options)
    return losses.detach(), list(torch.autograd.grad(losses.sum(), leaves))


@pytest.mark.parametrize("options", [{}, {"scale": 0.125}, {"cap": 30.0}, {"chunk_rows": 700}], ids=str)
@pytest.mark.parametrize("dtype", reference.LIMITS)
def test_5000_rows_of_128k_words(dtype, options):
    hidden, weight, labels, _ = drawn(5000, 1024, dtype=getattr(torch, dtype), spread=2.0)
    bending = {name: value for name, value in options.items() if name != "chunk_rows"}
    losses, wanted = in_float32(hidden, weight, labels, **bending)
    limit = reference.LIMITS[dtype]
    loss = linear_cross_entropy(hidden, weight, labels, **options)
    assert loss.dtype is torch.float32
    assert abs(loss - losses.sum()) < min(limit, 1e-3) * losses.sum()
    assert reference.relative(-linear_log_probs(hidden, weight, labels, **options), losses) < limit
    for mine, theirs in zip(torch.autograd.grad(loss, [hidden, weight]), wanted, strict=True):
        assert reference.relative(mine, theirs) < limit


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", reference.LIMITS)
def test_log_probs_with_an_upstream_gradient_for_each_row(dtype, trained):
    hidden, weight, labels, _ = drawn(3000, 512, dtype=getattr(torch, dtype), head=trained)
    labels[::7] = -100
    upstream = torch.randn(3000, device="cuda")
    exact = [leaf.detach().float().requires_grad_() for leaf in (hidden, weight)]
    expected = reference_log_probs(*exact, labels)
    log_probs = linear_log_probs(hidden, weight, labels, chunk_rows=700)
    assert log_probs.dtype is torch.float32
    assert reference.relative(log_probs, expected) < reference.LIMITS[dtype]
    mine = torch.autograd.grad(log_probs, [hidden, weight][: 1 + trained], upstream)
    theirs = torch.autograd.grad(expected, exact[: 1 + trained], upstream)
    for one, other in zip(mine, theirs, strict=True):
        assert reference.relative(one, other) < reference.LIMITS[dtype]


@pytest.mark.parametrize("words", [5, 1000, 32001, 50257, 151936, 262144])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_vocabularies_of_all_sizes(words, bias):
    hidden, weight, labels, offset = drawn(777, 256, words, torch.float32, bias=bias)
    losses, wanted = in_float32(hidden, weight, labels, offset)
    loss = linear_cross_entropy(hidden, weight, labels, offset, chunk_rows=300)
    assert reference.relative(loss, losses.sum()) < 1e-5
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    for mine, theirs in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
        assert reference.relative(mine, theirs) < 1e-5


def test_chunk_size_does_not_change_the_loss():
    hidden, weight, labels, _ = drawn(3000, 512, dtype=torch.float32, head=False)
    wanted = linear_cross_entropy(hidden, weight, labels, chunk_rows=3000)
    for chunk in (128, 999, None):
        assert reference.relative(linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk), wanted) < 1e-6


def test_more_logits_than_int32_can_index():
    """20,000 rows of 128k logits: the last rows lie beyond 2^31 elements."""
    hidden, weight, labels, _ = drawn(20000, 64, head=False)
    assert 20000 * WORDS > 2**31
    at_once = -linear_log_probs(hidden, weight, labels, chunk_rows=20000)
    in_parts = -linear_log_probs(hidden, weight, labels, chunk_rows=1000)
    torch.testing.assert_close(at_once, in_parts, rtol=0, atol=0.05)  # another matmul may round a logit differently
    both = [
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_rows=rows), hidden)[0]
        for rows in (20000, 1000)
    ]
    assert reference.relative(both[0][-500:], both[1][-500:]) < 1e-2


def test_large_logits_and_labels_outside_the_vocabulary():
    hidden, weight, labels, _ = drawn(64, 64, 1000, torch.float32, spread=1e4)
    losses, wanted = in_float32(hidden, weight, labels)
    loss = linear_cross_entropy(hidden, weight, labels)
    assert reference.relative(loss, losses.sum()) < 1e-5
    assert reference.relative(torch.autograd.grad(loss, hidden)[0], wanted[0]) < 1e-2
    labels[3], labels[5], labels[6] = -1, 1000, -100
    assert linear_log_probs(hidden, weight, labels).isnan().nonzero().flatten().tolist() == [3, 5]
    assert linear_log_probs(hidden, weight, labels)[6] == 0


def test_under_autocast_with_float32_master_weights():
    hidden, weight, labels, _ = drawn(2000, 512, dtype=torch.float32)
    losses, wanted = in_float32(hidden, weight, labels)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    assert reference.relative(loss, losses.sum()) < 1e-3
    for mine, theirs in zip(torch.autograd.grad(loss, [hidden, weight]), wanted, strict=True):
        assert mine.dtype is torch.float32
        assert reference.relative(mine, theirs) < 1e-2


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_no_host_sync(trained):
    hidden, weight, labels, _ = drawn(9000, 512, head=trained)
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    linear_cross_entropy(hidden, weight, labels).backward()  # kernels are compiled, libraries loaded
    linear_log_probs(hidden, weight, labels).sum().backward()
    torch.cuda.synchronize()
    with no_waiting():
        loss = linear_cross_entropy(hidden, weight, labels)
        (loss / 1000).backward()
        linear_log_probs(hidden, weight, labels).logsumexp(0).backward()
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, labels)
            linear_log_probs(hidden, weight, labels)


@contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_of_64k_rows_of_an_8b_model():
    """16.8 GB of logits in bfloat16, 50 GB with what autograd makes of them, in under 3 GiB."""
    hidden, weight, labels, _ = drawn(65536, 4096, head=False)
    linear_cross_entropy(hidden[:128], weight, labels[:128])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (linear_cross_entropy(hidden, weight, labels) / 65536).backward()
    training = torch.cuda.max_memory_allocated() - before
    hidden.grad = None
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels)
    evaluation = torch.cuda.max_memory_allocated() - before
    print(f"\nbeyond the inputs: {training / GIB:.2f} GiB in training, {evaluation / GIB:.2f} GiB in evaluation")
    assert training < 3 * GIB
    assert evaluation < 1.1 * GIB


@pytest.mark.timed
@pytest.mark.parametrize("kind", ["frozen", "trained", "evaluation"])
def test_time_is_close_to_its_matmuls(kind):
    """16,384 rows of an 8B model: the matmuls alone, and the complete loss for chunks of 1k to 16k rows."""
    hidden, weight, labels, _ = drawn(16384, 4096, head=kind == "trained")
    chunk = default_chunk_rows(WORDS, torch.bfloat16)
    logits = torch.randn(chunk, WORDS, device="cuda", dtype=torch.bfloat16)
    rows = hidden.detach()[:chunk]
    into = torch.empty_like(logits)
    times = 16384 // chunk

    def floor():
        with torch.no_grad():
            for _ in range(times):
                torch.mm(rows, weight.t(), out=into)
                if kind != "evaluation":
                    torch.mm(logits, weight)
                if kind == "trained":
                    torch.mm(logits.t(), rows)

    def whole(size):
        def step():
            if kind == "evaluation":
                with torch.no_grad():
                    linear_cross_entropy(hidden, weight, labels, chunk_rows=size)
                return
            hidden.grad = weight.grad = None
            linear_cross_entropy(hidden, weight, labels, chunk_rows=size).backward()

        return step

    least = milliseconds(floor)
    print(f"\n{kind}: the matmuls alone {least:.2f} ms")
    seen = {size: milliseconds(whole(size)) for size in (1024, 2048, 4096, 8192, 16384)}
    for size, took in seen.items():
        print(
            f"  {size:6d} rows at once: {took:7.2f} ms, {took / least:.3f} of the matmuls, {size * WORDS * 2 / GIB:.2f} GiB"
        )
    assert min(seen.values()) < 1.25 * least
    assert seen[4096] < 1.3 * least


def milliseconds(step, repeats: int = 5) -> float:
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1000


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shape", reference.SHAPES)
def test_float32_models_equal_plain_transformers(monkeypatch, shape, lora):
    monkeypatch.setattr(kernel, "BUFFER", 1)  # chunks of 128 rows, so that there are several
    pipeline = Pipeline()
    pipeline.precision.tf32 = False
    pipeline.liger = Liger(**FUSED)
    given = reference.batch(shape)
    apart = reference.relative_errors(
        reference.ours(pipeline, shape, given, dtype="float32", lora=lora), reference.plain(shape, given, lora=lora)
    )
    assert max(apart.values()) < 2e-5, apart


@pytest.mark.parametrize("shape", reference.SHAPES)
def test_bfloat16_models_are_as_accurate_as_plain_bfloat16(shape):
    pipeline = Pipeline()
    pipeline.liger = Liger(**FUSED)
    given = reference.batch(shape)
    exact = reference.plain(shape, given)
    usual = reference.relative_errors(reference.plain(shape, given, dtype="bfloat16"), exact)
    apart = reference.relative_errors(reference.ours(pipeline, shape, given), exact)
    print(f"\n{shape}: plain bfloat16 {usual}, fused {apart}")
    for name, value in apart.items():
        assert value < 1.3 * usual[name] + 1e-3 * (name == "loss"), (name, apart, usual)
