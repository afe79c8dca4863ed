"""Liger's kernels behind operators: autograd, shapes, compiled graphs, and that nothing is written.

The kernels' mathematics is torch's own here; they themselves need a card: tests/gpu/test_liger.py.
"""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fxtune.kernels import liger_operators as operators
from fxtune.techniques.checkpointing.policy import Rule, name_of

ops = pytest.importorskip("liger_kernel.ops")
ACTS = {"swiglu": F.silu, "geglu": lambda gate: F.gelu(gate, approximate="tanh")}


def rms(x, weight, offset, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)


EPS = 1e-6
CASES = {
    "llama": (lambda x, w: rms(x, w, 0.0, EPS), lambda x, w: operators.rms_norm(x, w, EPS, 0.0, "llama")[0]),
    "gemma": (lambda x, w: rms(x, w, 1.0, EPS), lambda x, w: operators.rms_norm(x, w, EPS, 1.0, "gemma")[0]),
    "layer_norm": (
        lambda x, w: F.layer_norm(x, w.shape, w, w, EPS),
        lambda x, w: operators.layer_norm(x, w, w, EPS)[0],
    ),
    **{
        kind: (lambda gate, up, kind=kind: ACTS[kind](gate) * up, partial(operators.gated, kind=kind)) for kind in ACTS
    },
}
"""Name -> the operation in plain torch and by Liger's kernel."""


def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    assert X.is_contiguous()
    assert row_mode is None
    assert casting_mode in ("llama", "gemma")
    assert eps == EPS
    scale = torch.rsqrt(X.float().square().mean(-1) + eps).flatten()
    return rms(X, W, offset, eps).to(X.dtype), X, scale, 16, 4, 0


def rms_norm_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode, needs_dw=None):
    assert dY.is_contiguous()
    assert X.dim() == 2
    assert RSTD.shape == X.shape[:1]
    assert isinstance(casting_mode, int)
    assert in_place is False
    assert row_mode is None
    assert (BLOCK_SIZE, num_warps) == (16, 4)
    dy, scale = dY.view(X.shape), RSTD[:, None]
    m = dy * (offset + W)
    dx = scale * (m - X * scale.square() * (m * X).mean(-1, keepdim=True))
    return dx.view(dY.shape).to(dY.dtype), (dy * X * scale).sum(0).to(W.dtype) if needs_dw else None


def layer_norm_forward(X, W, B, eps):
    assert X.is_contiguous()
    rows = X.flatten(0, -2)
    scale = torch.rsqrt((rows - rows.mean(-1, keepdim=True)).square().mean(-1) + eps)
    return F.layer_norm(X, W.shape, W, B, eps), rows, rows.mean(-1), scale, 16, 4


def layer_norm_backward(dY, X, W, B, Mean, RSTD, needs_dw=None, needs_db=None):
    assert dY.is_contiguous()
    assert X.dim() == 2
    assert Mean.shape == RSTD.shape == X.shape[:1]
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        dY.view(X.shape).float(),
        X.float(),
        W.shape,
        Mean[:, None],
        RSTD[:, None],
        W,
        B,
        [True, bool(needs_dw), bool(needs_db)],
    )
    return dx.view(dY.shape).to(X.dtype), dw, db


def gated_forward(kind):
    def forward(a, b):
        assert a.is_contiguous()
        assert b.is_contiguous()
        return a, b, ACTS[kind](a) * b

    return forward


def gated_backward(kind):
    def backward(a, b, dc):
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert dc.is_contiguous()
        of_act = (
            torch.ops.aten.silu_backward(dc * b, a)
            if kind == "swiglu"
            else torch.ops.aten.gelu_backward(dc * b, a, approximate="tanh")
        )
        b.copy_(dc * ACTS[kind](a))
        return a.copy_(of_act), b  # as Liger does

    return backward


STAND_INS = {
    "rms_norm_forward": rms_norm_forward,
    "rms_norm_backward": rms_norm_backward,
    "layer_norm_forward": layer_norm_forward,
    "layer_norm_backward": layer_norm_backward,
}
GATED = {
    f"{kind}_{way}": make(kind)
    for kind in ACTS
    for way, make in (("forward", gated_forward), ("backward", gated_backward))
}


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    for name, function in {**STAND_INS, **GATED}.items():
        monkeypatch.setattr(ops, name, function)


@pytest.mark.parametrize("name", STAND_INS)
def test_norms_are_called_as_ligers_own(name):
    module = __import__(f"liger_kernel.ops.{name.rpartition('_')[0]}", fromlist=[name])
    assert str(inspect.signature(getattr(module, name))) == str(inspect.signature(STAND_INS[name]))


@pytest.mark.parametrize("name", GATED)
def test_gated_products_are_called_as_ligers_own(name):
    module = __import__(f"liger_kernel.ops.{name.partition('_')[0]}", fromlist=[name])
    wanted = [one for one in inspect.signature(getattr(module, name)).parameters.values() if one.default is one.empty]
    assert [one.name for one in wanted] == [*inspect.signature(GATED[name]).parameters]


def layer(operation, norm, inputs):
    """An operation with its neighbours in a layer: a residual sum that is read again, and a function of the result."""
    x, other = inputs
    stream = x * 1.0
    return operation(stream, other if norm else other * 1.0).sin() + stream


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_operators_equal_plain_torch_and_write_no_input(name, compiled, trained):
    norm, results = name not in ACTS, []
    torch.manual_seed(0)
    inputs = [torch.randn(2, 5, 15)[..., :12], torch.randn(12) if norm else torch.randn(2, 5, 15)[..., :12]]
    for operation in CASES[name]:
        leaves = [one.clone().requires_grad_(trained or index == 0) for index, one in enumerate(inputs)]
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        for _ in range(2):  # the second finds what the first has left
            out = run(operation, norm, leaves)
            found = torch.autograd.grad(out.square().sum(), [one for one in leaves if one.requires_grad])
        assert all(torch.equal(one, leaf) for one, leaf in zip(inputs, leaves, strict=True)), (
            "what went in was written"
        )
        results.append((out.detach(), *found))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


OPERATORS = {
    "rms_norm": lambda x, weight, bias: (x, weight, EPS, 0.0, "llama"),
    "layer_norm": lambda *given: (*given, EPS),
    "gated": lambda x, weight, bias: (x, x.detach() + 1, "swiglu"),
}


@pytest.mark.parametrize("shape", [(4, 12), (2, 3, 5, 12), (0, 12)], ids=str)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_operators_pass_opcheck(name, trained, shape):
    """Results have the shapes, dtypes and strides of the fake implementation, and share no memory with the inputs."""
    x, weight, bias = torch.randn(*shape[:-1], 15)[..., :12], torch.randn(12), torch.randn(12)
    given = OPERATORS[name](x.requires_grad_(), weight.requires_grad_(trained), bias)
    torch.library.opcheck(getattr(operators, name), given)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_operators_pass_opcheck(dtype, trained):
    """Called as autograd calls them, with float32 weights: a backward graph relies on the shapes and dtypes of the
    fakes."""
    x, dy = (torch.randn(2, 5, 15, dtype=dtype)[..., :12] for _ in range(2))
    weight, bias, scale, mean = torch.randn(12), torch.randn(12), torch.rand(10), torch.rand(10)
    of = torch.ops.fxtune
    for operator, given in (
        (of.liger_rms_norm_backward, (dy, x, weight, scale, 0.0, "llama", trained)),
        (of.liger_layer_norm_backward, (dy, x, weight, bias, mean, scale, trained, not trained)),
        (of.liger_gated_backward, (dy, x, x + 1, "geglu")),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
        promised = [one.dtype for one in operator(*given)]
        assert promised == [
            dtype,
            *([dtype] if operator is of.liger_gated_backward else [torch.float32] * (len(promised) - 1)),
        ]


def test_selective_checkpointing_recomputes_the_operators():
    """They are cheap, so the policy never saves them. It recognises them by name."""
    made = [getattr(torch.ops.fxtune, f"liger_{name}{way}").default for name in OPERATORS for way in ("", "_backward")]
    assert not [name for name in map(name_of, made) if Rule().saves_by_name(name)]
