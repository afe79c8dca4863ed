"""Fused LoRA equals peft linear by linear: results and gradients of whole groups and MLPs, over each kind of frozen weight."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import slow_but
from support.lora_linears import ACTS, Mlp, Siblings, adapted, group, halves, inputs, mlp, weights
from support.quantized import kinds
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fxtune.kernels import fused_lora
from fxtune.kernels.frozen_base import Dense, augment
from fxtune.kernels.fused_lora import lora_linear, lora_mlp
from fxtune.techniques.quantized_modules import dequantized, grouped, quantized

OPERATORS = {
    "fxtune.lora_linear": fused_lora._linear,
    "fxtune.lora_linear_backward": fused_lora._linear_backward,
    "fxtune.lora_mlp": fused_lora._mlp,
    "fxtune.lora_mlp_backward": fused_lora._mlp_backward,
}


def compare(mine: torch.Tensor, theirs: torch.Tensor, leaves: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Results and gradients, each relative to the largest number in it."""
    above = torch.randn_like(theirs)
    found = [mine, *torch.autograd.grad(mine, leaves, above)]
    wanted = [theirs, *torch.autograd.grad(theirs, leaves, above)]
    for result, expected in zip(found, wanted, strict=True):
        assert result.dtype is expected.dtype
        largest = expected.abs().max().item() if expected.numel() else 0
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance * max(largest, 0.05))


sizes = st.integers(1, 33)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 20),
    inner=sizes,
    outs=st.lists(sizes, min_size=1, max_size=5),
    bias=st.booleans(),
    data=st.data(),
)
def test_any_group_matches_peft(rows, inner, outs, bias, data):
    ranks = [data.draw(st.integers(1, 9)) for _ in outs]
    model, fused, trained = group(
        inner, outs, ranks, bias, torch.float64
    )  # where no sum that nearly cancels is far off
    x = inputs(rows, inner, dtype=torch.float64)
    compare(fused(x), model(x), [x, *trained], 1e-12)


@settings(max_examples=30)
@given(
    rows=st.integers(0, 20),
    hidden=sizes,
    width=sizes,
    ranks=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    act=st.sampled_from(sorted(ACTS)),
    keep=st.booleans(),
    tiles=st.integers(1, 7),
)
def test_any_mlp_matches_peft_with_keep_and_tiles(rows, hidden, width, ranks, act, keep, tiles):
    model, fused, trained = mlp(hidden, width, ranks, act, torch.float64)
    x = inputs(rows, hidden, dtype=torch.float64)
    compare(fused(x, keep=keep, tiles=tiles), model(x), [x, *trained], 1e-12)


@pytest.mark.parametrize("keep", [True, False])
def test_float32_matches_peft(keep):
    model, fused, trained = group(64, [48, 16, 16], [8, 4, 4], True)
    x = inputs(50, 64)
    compare(fused(x), model(x), [x, *trained])
    model, fused, trained = mlp(64, 96, [8, 8, 4])
    compare(fused(x, keep=keep), model(x), [x, *trained], 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["group", "mlp"])
def test_16_bits_are_as_accurate_as_peft(what, dtype):
    """peft under autocast, as in training. Without autocast it computes adapters in float32."""
    make = (
        (lambda dtype: group(67, [33, 40], [3, 5], True, dtype))
        if what == "group"
        else (lambda dtype: mlp(64, 97, [8, 4, 3], dtype=dtype))
    )
    (model, fused, trained), exact = make(dtype), make(torch.float32)
    with torch.no_grad():  # the same numbers, rounded
        for parameter, rounded in zip(exact[0].parameters(), model.parameters(), strict=True):
            parameter.copy_(rounded)
    x = inputs(200, 67 if what == "group" else 64, dtype=dtype)
    x32 = x.detach().float().requires_grad_()
    wanted, ours = exact[0](x32), fused(x)
    with torch.autocast("cpu", dtype):
        theirs = model(x)
    assert ours.dtype is theirs.dtype is dtype
    above = torch.randn_like(wanted).to(dtype)
    results = [
        (y, *torch.autograd.grad(y, [leaf, *leaves], above.to(y.dtype)))
        for y, leaf, leaves in ((wanted, x32, exact[2]), (ours, x, trained), (theirs, x, trained))
    ]
    for reference, result, expected in zip(*results, strict=True):
        mine, pefts = ((found.float() - reference).norm() / reference.norm() for found in (result, expected))
        assert 0 < mine < 1.02 * pefts, (mine, pefts)


@kinds
def test_quantized_weights_match_lora_over_dequantized_ones(kind):
    torch.manual_seed(0)
    stored = [
        quantized(nn.Linear(inner, out, False), kind, torch.float32, torch.device("cpu"))
        for inner, out in ((128, 256), (128, 256), (256, 128))
    ]
    name = stored[0].stored_as
    plain = Mlp(128, 256, "silu")
    for linear, weight in zip((plain.gate, plain.up, plain.down), stored, strict=True):
        linear.weight.data = dequantized(weight)
    model, linears = adapted(plain, [3, 4, 5])
    own = halves(linears)
    trained, x = [*own["a"], *own["b"]], inputs(9, 128)
    for options in ({}, {"keep": False}, {"tiles": 2}):
        compare(
            lora_mlp(
                x, **own, up=grouped(stored[:2]), down=grouped(stored[2:]), up_kind=name, down_kind=name, **options
            ),
            model(x),
            [x, *trained],
            2e-5,
        )
    pair = {half: own[half][:2] for half in own}
    compare(
        lora_linear(x, **pair, base=grouped(stored[:2]), kind=name),
        torch.cat([linears[0](x), linears[1](x)], -1),
        [x, *pair["a"], *pair["b"]],
    )


def test_gradcheck_in_float64():
    for parts in (group(5, [3, 4], [2, 1], True, torch.float64), mlp(4, 5, [2, 1, 3], dtype=torch.float64)):
        trained = [part.detach().double().requires_grad_() for part in parts[2]]
        half = len(trained) // 2
        assert torch.autograd.gradcheck(
            lambda x, *own, parts=parts, half=half: parts[1](x, a=own[:half], b=own[half:]),
            (inputs(3, parts[0].linear0.in_features if half == 2 else 4, dtype=torch.float64), *trained),
        )


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 mistakes a bool for a size in its test of dynamic shapes"
)
def test_operators_pass_opcheck():
    """Schema, fake implementation, gradients and compilation agree with what the operators do."""
    _, linears = adapted(Siblings(6, [4, 5], True), [2, 3])
    own, x = halves(linears), inputs(7, 6)
    base, bias = augment(weights(linears), [2, 3], True), [linear.base_layer.bias.detach() for linear in linears]
    given = (own["a"], own["b"], bias, [base], own["scaling"], "dense")
    y, xa = torch.ops.fxtune.lora_linear(
        x, *given, False, None
    )  # which also packs A and B: once more changes no number
    torch.library.opcheck(torch.ops.fxtune.lora_linear.default, (x, *given, False, None))
    detached = [[tensor.detach() for tensor in half] for half in given[:2]]
    torch.library.opcheck(
        torch.ops.fxtune.lora_linear_backward.default,
        (y.detach(), x.detach(), xa.detach(), *detached, *given[2:], [True] * 3, False),
    )
    _, linears = adapted(Mlp(6, 8, "silu"), [2, 3, 1])
    own = halves(linears)
    bases = [augment(weights(linears[:2]), [2, 3])], [augment(weights(linears[2:]), [1])]
    for keep, tiles in ((True, 1), (False, 2)):
        given = (own["a"], own["b"], *bases, own["scaling"], "dense", "dense", "silu", keep, tiles)
        y, *kept = torch.ops.fxtune.lora_mlp(x, *given, None)
        torch.library.opcheck(torch.ops.fxtune.lora_mlp.default, (x, *given, None))
        detached = [[tensor.detach() for tensor in half] for half in given[:2]]
        torch.library.opcheck(
            torch.ops.fxtune.lora_mlp_backward.default,
            (y.detach(), x.detach(), *(tensor.detach() for tensor in kept), *detached, *given[2:], [True] * 3),
        )


@pytest.mark.parametrize("frozen", ["x", "a", "b", "adapters", "all"])
def test_frozen_inputs_have_no_gradient_and_cost_no_matmul(frozen):
    for parts, width in ((group(6, [4, 5], [2, 3]), 6), (mlp(6, 8, [2, 3, 1]), 6)):
        model, fused, trained = parts
        a, b = trained[: len(trained) // 2], trained[len(trained) // 2 :]
        x = inputs(7, width).requires_grad_(frozen not in ("x", "all"))
        for half, name in ((a, "a"), (b, "b")):
            for tensor in half:
                tensor.requires_grad_(frozen not in (name, "adapters", "all"))
        leaves = [leaf for leaf in (x, *trained) if leaf.requires_grad]
        y = fused(x)
        assert y.requires_grad == bool(leaves)
        if leaves:
            compare(y, model(x), leaves)
            with Calls() as seen:
                fused(x).sum().backward()
            assert [leaf.grad is not None for leaf in (x, *trained)] == [leaf.requires_grad for leaf in (x, *trained)]
            if frozen == "x" and len(a) == 2:
                assert seen.named("backward") == 1
                assert (7, 6) not in seen.products, "dx of something that takes no gradient"


def test_autocast_sets_the_compute_dtype():
    for (model, fused, trained), width in ((group(64, [64, 32], [4, 8]), 64), (mlp(64, 96, [4, 8, 2]), 64)):
        x = inputs(50, width)
        with torch.autocast("cpu", torch.bfloat16):
            mine, theirs = fused(x), model(x)
        assert mine.dtype is theirs.dtype is torch.bfloat16
        above = torch.randn_like(mine)
        for result, expected in zip(
            torch.autograd.grad(mine, [x, *trained], above),
            torch.autograd.grad(theirs, [x, *trained], above),
            strict=True,
        ):
            assert result.dtype is expected.dtype is torch.float32
            assert (result - expected).norm() < 0.02 * expected.norm()


def test_no_grad_gives_the_same_result_and_keeps_nothing():
    for (model, fused, _), width in ((group(6, [4, 5], [2, 3]), 6), (mlp(6, 8, [2, 3, 1]), 6)):
        for rows in (1, 7):  # one: a token of generation
            x = inputs(rows, width)
            with torch.no_grad():
                y = fused(x)
                torch.testing.assert_close(y, model(x))
            assert not y.requires_grad
            with torch.inference_mode():
                torch.testing.assert_close(fused(x), y)
    with torch.no_grad(), Calls() as seen:
        mlp(6, 8, [2, 3, 1])[1](inputs(7, 6))
    assert seen.arguments["fxtune.lora_mlp"][-3] is False, "gate_up was to be returned where nobody could use it"


@pytest.mark.parametrize("shape", [(2, 3, 6), (1, 1, 6), (6,)])
def test_any_leading_dimensions_and_strides(shape):
    for model, fused, trained in (group(6, [4, 5], [2, 3]), mlp(6, 8, [2, 3, 1])):
        x = inputs(*shape)
        compare(fused(x), model(x), [x, *trained])
    model, fused, trained = group(6, [4, 5], [2, 3])
    x = inputs(6, 9)
    compare(fused(x.t()), model(x.t()), [x, *trained])
    wide = inputs(9, 8)
    compare(fused(wide[::2, 1:7]), model(wide[::2, 1:7]), [wide, *trained])
    y = fused(x.t())  # a gradient whose columns lie apart
    theirs = model(x.t())
    above = torch.randn(9, 9).t()
    for result, expected in zip(
        torch.autograd.grad(y, trained, above), torch.autograd.grad(theirs, trained, above), strict=True
    ):
        torch.testing.assert_close(result, expected)


def test_several_forward_passes_before_their_backward_passes():
    """Each call has its own buffer: inputs and adapters of a later call do not change an earlier one's gradients."""
    for (model, fused, trained), width in ((group(6, [4, 5], [2, 3]), 6), (mlp(6, 8, [2, 3, 1]), 6)):
        xs = [inputs(7, width) for _ in range(2)]
        others = [torch.randn_like(tensor).requires_grad_() for tensor in trained]
        half = len(trained) // 2
        ys = [fused(x) for x in xs]
        wanted = torch.autograd.grad(sum(model(x).sum() for x in xs), trained)
        fused(xs[0], a=others[:half], b=others[half:])  # another adapter over the same weights
        for result, expected in zip(torch.autograd.grad(sum(y.sum() for y in ys), trained), wanted, strict=True):
            torch.testing.assert_close(result, expected)
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(1.5)
        compare(fused(xs[0]), model(xs[0]), [xs[0], *trained])
        y = fused(xs[0])
        with torch.no_grad():
            trained[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_frozen_weights_are_not_changed():
    weights = [torch.randn(out, 6) for out in (4, 5)]
    matrix = augment(weights, [2, 3])
    a, b = [torch.randn(rank, 6) for rank in (2, 3)], [torch.randn(out, rank) for out, rank in ((4, 2), (5, 3))]
    lora_linear(torch.randn(7, 6), a, b, [matrix], [2.0, 1.0])
    assert torch.equal(matrix[:9, :6], torch.cat(weights))


@pytest.mark.parametrize("keep", [True, False])
def test_tensors_kept_for_the_backward_pass(keep):
    """Of the activations: x, x A^T and, with `keep`, gate_up. Never p."""
    _, fused, _ = mlp(16, 40, [2, 3, 1])
    x, kept = inputs(11, 16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.shape) or one, lambda one: one):
        fused(x, keep=keep)
    assert [shape for shape in kept if shape[0] == 11] == [(11, 16)] + [(11, 80), (11, 16), (11, 16)] * keep


def test_checkpoints_recompute_and_the_compiler_drops_unused_products(monkeypatch):
    """Products with frozen weights: two each way and gate_up once more. Operator by operator a checkpoint repeats both."""
    products = []
    for name in ("split", "full", "split_backward"):
        own = getattr(Dense, name)
        monkeypatch.setattr(
            Dense, name, lambda *given, own=own, name=name, **more: products.append(name) or own(*given, **more)
        )
    model, fused, trained = mlp(16, 24, [2, 3, 1])
    x = inputs(11, 16)
    wanted = torch.autograd.grad((model(x) + x).sum(), [x, *trained])

    def run(x):
        return checkpoint(lambda x: fused(x * 1.0, keep=False), x, use_reentrant=False) + x

    for forward, times in ((run, 5), (torch.compile(run, fullgraph=True, backend="aot_eager"), 3)):
        products.clear()
        found = torch.autograd.grad(forward(x).sum(), [x, *trained])
        assert (products.count("split") + products.count("full"), products.count("split_backward")) == (times, 2)
        for result, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_one_compiled_graph_gives_the_same_result():
    for (model, fused, trained), width in ((group(6, [4, 5], [2, 3], True), 6), (mlp(6, 8, [2, 3, 1]), 6)):
        compiled = torch.compile(lambda x, fused=fused: fused(x * 2) + 1, fullgraph=True, backend="aot_eager")
        for rows in (7, 9, 1):
            x = inputs(rows, width)
            compare(compiled(x), model(x * 2) + 1, [x, *trained])


def test_uninitialized_memory_does_not_leak_into_results():
    """oneDNN reads the gaps between rows, and nan times zero is nan."""
    _, fused, _ = mlp(66, 129, [2, 3, 1], dtype=torch.bfloat16)
    x = inputs(301, 66, dtype=torch.bfloat16)
    for options in ({}, {"tiles": 3}):
        garbage = [torch.full((301, width), torch.nan, dtype=torch.bfloat16) for width in (66, 82, 129, 145, 258, 274)]
        del garbage
        y = fused(x, **options)
        y.float().square().sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


def test_tiles_need_less_memory():
    _, fused, _ = mlp(16, 40, [2, 3, 1])
    for tiles, rows in ((1, 1000), (5, 200)):
        with Calls() as seen:
            fused(inputs(1000, 16), tiles=tiles).sum().backward()
        assert max(numbers for numbers in seen.sizes) <= max(rows * (80 + 16), 1000 * 16)


def test_a_tile_is_freed_before_the_next_one(monkeypatch):
    _, fused, _ = mlp(16, 40, [2, 3, 1])
    own, made, alive = Dense.split, [], []

    def split(self, x):
        alive.append(sum(reference() is not None for reference in made))
        y, narrow = own(self, x)
        assert narrow._base is None  # a view would keep y alive
        made.append(weakref.ref(y))
        return y, narrow

    monkeypatch.setattr(Dense, "split", split)
    y = fused(inputs(100, 16), tiles=4)
    assert alive == [0] * 4
    y.sum().backward()
    assert alive == [0] * 8


class Calls(TorchDispatchMode):
    """Records fxtune's operators and, inside them, the shapes of matmul results and the sizes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.arguments, self.products, self.sizes = [], {}, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().replace("::", ".")
        self.names.append(name)
        self.arguments[name] = args
        inside = OPERATORS.get(name)
        if inside is not None and not isinstance(args[0], FakeTensor):
            with self:  # what an operator calls is seen, too
                out = inside._init_fn(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.sizes.append(out.untyped_storage().nbytes() // out.element_size())
            if func.overloadpacket.__name__ == "mm":
                self.products.append(tuple(out.shape))
        return out

    def named(self, name: str) -> int:
        return sum(operator.startswith("fxtune.") and operator.endswith(name) for operator in self.names)


@pytest.mark.parametrize(("size", "by_peft"), slow_but([(1e-4, 0.3), (1e-3, 0.98)], (1e-4, 0.3)))
def test_updates_too_small_for_a_bfloat16_sum_act(size, by_peft, monkeypatch):
    """The first updates of an adapter are smaller than half of the last bit of a bfloat16 result, so adding them to a
    rounded result loses them. The fused operators over dense weights add first and round once, also with the residual
    stream of compiled layers. On average the change of the result then equals the exact change.
    """
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    def acting(run, b, exact) -> float:
        with_it, without = (run(given).double() for given in (b, [torch.zeros_like(tensor) for tensor in b]))
        return float(((with_it - without) * exact).sum() / exact.square().sum())

    def exactly(x, weight, a, b):
        return x.double() @ (weight.double() + b.double() @ a.double()).t()

    inner, width = 256, 768
    x, a = (
        normal(2048, inner).bfloat16(),
        [normal(16, inner) * inner**-0.5 for _ in range(2)] + [normal(16, width) * width**-0.5],
    )
    up = [(normal(width, inner) * inner**-0.5).bfloat16() for _ in range(2)]
    down = (normal(inner, width) * width**-0.5).bfloat16()
    b = [normal(width, 16) * size for _ in range(2)]

    made, plain = [augment(up[:1], [16])], x @ up[0].t()
    exact = exactly(x, up[0], a[0], b[0]) - exactly(x, up[0], a[0], 0 * b[0])
    assert acting(lambda given: lora_linear(x, a[:1], given, made, [1.0]), b[:1], exact) == pytest.approx(1, abs=0.01)
    assert acting(lambda given: plain + (x @ a[0].bfloat16().t()) @ given[0].bfloat16().t(), b[:1], exact) < by_peft
    stream = 2 * normal(2048, width).bfloat16()
    assert acting(
        lambda given: torch.ops.fxtune.lora_linear(x, a[:1], given, [], made, [1.0], "dense", False, stream)[0],
        b[:1],
        exact,
    ) == pytest.approx(1, abs=0.02)

    def exact_mlp(given):
        gate, above = (exactly(x, weight, *halves) for weight, *halves in zip(up, a, given, strict=False))
        return (F.silu(gate) * above) @ down.double().t()

    both, zero = ([augment(up, [16, 16])], [augment([down], [16])]), torch.zeros(inner, 16)
    exact = exact_mlp(b) - exact_mlp([0 * tensor for tensor in b])
    assert acting(lambda given: lora_mlp(x, a, [*given, zero], *both, [1.0] * 3), b, exact) == pytest.approx(
        1, abs=0.03
    )

    last, zeros = [normal(inner, 16) * size], [torch.zeros_like(tensor) for tensor in b]
    p = F.silu(x.double() @ up[0].double().t()) * (x.double() @ up[1].double().t())
    exact = exactly(p, down, a[2], last[0]) - exactly(p, down, a[2], 0 * last[0])
    stream = 2 * normal(2048, inner).bfloat16()
    for residual, tiles in ((None, 1), (stream, 1), (stream, 3)):

        def run(given, residual=residual, tiles=tiles):
            return torch.ops.fxtune.lora_mlp(
                x, a, [*zeros, *given], *both, [1.0] * 3, "dense", "dense", "silu", False, tiles, residual
            )[0]

        assert acting(run, last, exact) == pytest.approx(1, abs=0.03), (residual is None, tiles)
    monkeypatch.setattr(Dense, "operand", None)
    run(b[:0] + last)  # what down_proj reads is written where its product reads it, and not copied
