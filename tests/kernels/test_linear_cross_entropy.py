"""The fused head and loss equal plain autograd over all logits for any chunk size, and hold one chunk of logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.losses import reference_log_probs
from torch.utils._python_dispatch import TorchDispatchMode

from fxtune.kernels import linear_cross_entropy as kernel
from fxtune.kernels.linear_cross_entropy import (
    default_chunk_rows,
    linear_cross_entropy,
    linear_log_probs,
)


def drawn(
    rows: int,
    vocabulary: int,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    size: float = 1.0,
):
    """hidden, weight, labels, bias: leaves with gradients."""
    torch.manual_seed(rows * 1000 + vocabulary)
    tensors = [torch.randn(rows, width) * size, torch.randn(vocabulary, width)] + [torch.randn(vocabulary)] * bias
    hidden, weight, *offset = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    return hidden, weight, torch.randint(vocabulary, (rows,)), offset[0] if bias else None


def gradients(loss: torch.Tensor, *leaves: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]))


@settings(max_examples=60)
@given(
    rows=st.integers(0, 40),
    vocabulary=st.integers(1, 150),
    chunk=st.integers(1, 50),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.125, 3.0]),
    cap=st.sampled_from([0.0, 2.0, 30.0]),
)
def test_loss_and_gradients_equal_plain_autograd_for_every_chunk_size(rows, vocabulary, chunk, bias, scale, cap):
    hidden, weight, labels, offset = drawn(rows, vocabulary, bias=bias)
    wanted = -reference_log_probs(hidden, weight, labels, offset, scale=scale, cap=cap)
    options = dict(scale=scale, cap=cap, chunk_rows=chunk)
    loss = linear_cross_entropy(hidden, weight, labels, offset, **options)
    torch.testing.assert_close(loss, wanted.sum(), rtol=1e-6, atol=1e-6)
    leaves = (hidden, weight, offset)
    for mine, theirs in zip(gradients(loss / 7, *leaves), gradients(wanted.sum() / 7, *leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@settings(max_examples=60)
@given(
    rows=st.integers(0, 40),
    vocabulary=st.integers(1, 150),
    chunk=st.integers(1, 50),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.125, 3.0]),
    cap=st.sampled_from([0.0, 2.0, 30.0]),
    trained=st.sampled_from(["hidden", "head", "both"]),
)
def test_log_probs_and_gradients_equal_plain_autograd(rows, vocabulary, chunk, bias, scale, cap, trained):
    hidden, weight, labels, offset = drawn(rows, vocabulary, bias=bias)
    hidden.requires_grad_(trained != "head")
    for parameter in (weight, offset) if bias else (weight,):
        parameter.requires_grad_(trained != "hidden")
    labels[::5] = kernel.IGNORED
    upstream = torch.randn(rows)
    expected = reference_log_probs(hidden, weight, labels, offset, scale=scale, cap=cap)
    log_probs = linear_log_probs(hidden, weight, labels, offset, scale=scale, cap=cap, chunk_rows=chunk)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    leaves = (hidden, weight, offset)
    pairs = (gradients((tensor * upstream).sum(), *leaves) for tensor in (log_probs, expected))
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)
    with torch.no_grad():
        again = linear_log_probs(hidden, weight, labels, offset, scale=scale, cap=cap, chunk_rows=chunk)
    assert torch.equal(again, log_probs)


@pytest.mark.parametrize("trained", [False, True])
def test_bfloat16_log_probs_with_upstream_gradients_are_close_to_exact(trained):
    hidden, weight, labels, _ = drawn(300, 640, dtype=torch.bfloat16)
    weight.requires_grad_(trained)
    upstream, leaves = torch.randn(300), (hidden, weight)
    mine = gradients((linear_log_probs(hidden, weight, labels, chunk_rows=100) * upstream).sum(), *leaves)
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    theirs = gradients((reference_log_probs(*exact, labels).double() * upstream).sum(), *exact)
    for result, expected in zip(mine, theirs, strict=True):
        assert result.dtype is torch.bfloat16
        assert (result - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("trained", [False, True])
def test_log_probs_hold_one_chunk_of_logits(trained):
    hidden, weight, labels, _ = drawn(1000, 640, width=4)
    weight.requires_grad_(trained)
    with Largest() as seen, Matmuls() as matmuls:
        linear_log_probs(hidden, weight, labels, chunk_rows=100).sum().backward()
    assert seen.numbers == 100 * 640
    assert matmuls.count == 10 * (4 if trained else 2)


@pytest.mark.parametrize("fill", [0.0, 1e30])
def test_ignored_rows_change_nothing(fill):
    hidden, weight, labels, bias = drawn(11, 30, bias=True)
    more = torch.cat([hidden.detach(), torch.full((5, 16), fill)]).requires_grad_()
    padded = torch.cat([labels, torch.full((5,), kernel.IGNORED)])
    wanted = gradients(linear_cross_entropy(hidden, weight, labels, bias, chunk_rows=16), hidden, weight, bias)
    loss = linear_cross_entropy(more, weight, padded, bias, chunk_rows=16)
    mine = gradients(loss, more, weight, bias)
    torch.testing.assert_close(loss, -reference_log_probs(hidden, weight, labels, bias).sum())
    assert not mine[0][11:].any()
    for result, expected in zip([mine[0][:11], *mine[1:]], wanted, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    assert not linear_log_probs(more, weight, padded, bias)[11:].any()


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_gradcheck_in_float64(cap):
    hidden, weight, labels, bias = drawn(5, 7, width=3, dtype=torch.float64, bias=True)
    assert torch.autograd.gradcheck(
        lambda *leaves: linear_cross_entropy(
            leaves[0], leaves[1], labels, leaves[2], scale=0.5, cap=cap, chunk_rows=2
        ),
        (hidden, weight, bias),
    )
    assert torch.autograd.gradcheck(
        lambda *leaves: linear_log_probs(leaves[0], leaves[1], labels, leaves[2], scale=0.5, cap=cap, chunk_rows=2),
        (hidden, weight, bias),
    )


def test_large_logits_neither_overflow_nor_lose_their_gradient():
    hidden, weight, labels, _ = drawn(6, 9, size=3e3)
    assert (hidden @ weight.t()).abs().max() > 1e4
    loss = linear_cross_entropy(hidden, weight, labels, chunk_rows=4)
    torch.testing.assert_close(loss, -reference_log_probs(hidden, weight, labels).sum())
    assert all(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight))


@pytest.mark.parametrize("trained", ["head", "hidden", "both"])
def test_frozen_inputs_cost_no_matmul(trained):
    hidden, weight, labels, _ = drawn(12, 20)
    hidden.requires_grad_(trained != "head")
    weight.requires_grad_(trained != "hidden")
    with Matmuls() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_rows=6).backward()
    assert seen.count == 2 * {"head": 2, "hidden": 2, "both": 3}[trained]
    assert (weight.grad is None, hidden.grad is None) == (trained == "hidden", trained == "head")
    wanted = torch.autograd.grad(
        -reference_log_probs(hidden, weight, labels).sum(), [hidden] if weight.grad is None else [weight]
    )
    torch.testing.assert_close(hidden.grad if weight.grad is None else weight.grad, *wanted, rtol=1e-5, atol=1e-5)


def test_evaluation_computes_no_gradients():
    hidden, weight, labels, _ = drawn(12, 20)
    with torch.no_grad(), Matmuls() as seen:
        assert not linear_cross_entropy(hidden, weight, labels, chunk_rows=6).requires_grad
    assert seen.count == 2


def test_one_chunk_of_logits_is_held(monkeypatch):
    hidden, weight, labels, _ = drawn(1000, 640, width=4)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels, chunk_rows=100).backward()
    assert seen.numbers == 100 * 640
    monkeypatch.setattr(kernel, "BUFFER", 256 * 640 * 4)
    with Largest() as seen:
        linear_cross_entropy(hidden, weight, labels).backward()
    assert seen.numbers == 250 * 640, "four chunks of 250 rather than three of 256 and one of 232"


def test_default_chunk_is_one_gibibyte():
    assert default_chunk_rows(128256, torch.bfloat16) == 4096
    assert default_chunk_rows(128256, torch.float32) == 2048
    assert default_chunk_rows(128, torch.float32) == 65536
    assert default_chunk_rows(10**9, torch.float32) == 128


def test_bfloat16_head_gradient_accumulates_in_float32():
    """256 chunks of one row: a sum rounded to bfloat16 after each would lose most of them."""
    hidden, weight, _, _ = drawn(256, 8, dtype=torch.bfloat16)
    labels = torch.zeros(256, dtype=torch.int64)
    mine = gradients(linear_cross_entropy(hidden, weight, labels, chunk_rows=1), weight)[0]
    exact = weight.detach().double().requires_grad_()
    theirs = gradients(-reference_log_probs(hidden.detach().double(), exact, labels).sum(), exact)[0]
    assert (mine.double() - theirs).norm() < 1e-2 * theirs.norm()


def test_odd_vocabulary_size_in_bfloat16():
    """oneDNN reads the gap between rows whose stride is larger than their length."""
    hidden, weight, labels, _ = drawn(300, 1282, dtype=torch.bfloat16)
    freed = [torch.full((300, 1344), torch.nan, dtype=torch.bfloat16) for _ in range(4)]
    del freed  # the buffer may be allocated in this memory
    for mine, theirs in zip(
        gradients(linear_cross_entropy(hidden, weight, labels), hidden, weight),
        gradients(-reference_log_probs(hidden, weight, labels).sum(), hidden, weight),
        strict=True,
    ):
        assert (mine - theirs).norm() < 2e-2 * theirs.norm()


def test_autocast_runs_bfloat16_matmuls_and_returns_float32_gradients():
    hidden, weight, labels, bias = drawn(50, 30, bias=True)
    wanted = -reference_log_probs(hidden, weight, labels, bias).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16), Matmuls() as seen:
        loss = linear_cross_entropy(hidden, weight, labels, bias, chunk_rows=20)
        loss.backward()
    assert seen.dtypes >= {torch.bfloat16}
    assert loss.dtype is hidden.grad.dtype is weight.grad.dtype is torch.float32
    assert abs(loss - wanted) < 1e-2 * wanted
    for mine, theirs in zip(
        (hidden.grad, weight.grad, bias.grad), gradients(wanted, hidden, weight, bias), strict=True
    ):
        assert (mine - theirs).norm() < 1e-2 * theirs.norm()


def test_upstream_factor_is_not_rounded_to_bfloat16():
    """1.5039 lies between the bfloat16 numbers 1.5 and 1.5078: rounded, it would change all gradients by 0.3 %."""
    hidden, weight, labels, _ = drawn(64, 30, dtype=torch.bfloat16)
    once, times = (
        gradients(linear_cross_entropy(hidden, weight, labels) * by, hidden)[0].double() for by in (1, 1.5039)
    )
    assert (times * once).sum() / (once * once).sum() == pytest.approx(1.5039, abs=1.5e-3)


@given(rows=st.integers(0, 40000), most=st.integers(1, 6000))
def test_chunks_cover_all_rows_in_equal_sizes(rows, most):
    sizes = kernel.chunk_sizes(rows, most)
    assert sum(sizes) == rows
    assert len(sizes) == -(-rows // most)
    assert all(0 < size <= most for size in sizes)
    assert len({*sizes[:-1]}) <= 1


def test_head_dtype_decides_the_matmul_dtype():
    hidden, weight, labels, _ = drawn(9, 12)
    loss = linear_cross_entropy(half := hidden.detach().bfloat16().requires_grad_(), weight, labels)
    torch.testing.assert_close(loss, -reference_log_probs(half.float(), weight, labels).sum())
    assert gradients(loss, half)[0].dtype is torch.bfloat16


class Matmuls(TorchDispatchMode):
    """Counts matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.dtypes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.count += 1
            self.dtypes.add(args[1].dtype)
        return out


class Largest(TorchDispatchMode):
    """The largest number of elements of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.untyped_storage().nbytes() // out.element_size())
        return out
