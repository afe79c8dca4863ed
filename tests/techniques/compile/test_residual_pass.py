"""The pass that lets fused adapters add the residual stream: which sums it folds, and equal results."""

from __future__ import annotations

import pytest
import torch
from support.architectures import built, lora, random_model
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from fxtune.facts.options import Switch
from fxtune.kernels import lora_adapters
from fxtune.kernels.frozen_base import DENSE, DENSE_CUTE, augment
from fxtune.kernels.fused_lora import lora_linear, lora_mlp
from fxtune.techniques.compile import residual_pass
from fxtune.techniques.compile.technique import Compile

HIDDEN, WIDE, RANK = 8, 12, 4


def drawn(*shape):
    return torch.randn(*shape, generator=DRAW) / shape[-1] ** 0.5


DRAW = torch.Generator().manual_seed(0)
INS, OUTS = (HIDDEN, HIDDEN, WIDE), (WIDE, WIDE, HIDDEN)
A, B = [drawn(RANK, width) for width in INS], [drawn(width, RANK) for width in OUTS]
WEIGHTS = {out: (drawn(out, HIDDEN), drawn(out)) for out in (HIDDEN, 2 * HIDDEN)}
UP, DOWN = augment([drawn(WIDE, HIDDEN), drawn(WIDE, HIDDEN)], [RANK] * 2), augment([drawn(HIDDEN, WIDE)], [RANK])


def mlp(x, kind=DENSE_CUTE):
    return lora_mlp(x, A, B, [UP], [DOWN], [1.0] * 3, DENSE, kind)


def linear(x, out=HIDDEN, bias=False, kind=DENSE_CUTE):
    weight, offset = WEIGHTS[out]
    made = augment([weight], [RANK], bias)
    return lora_linear(
        x, [A[0]], [B[0][:1].expand(out, -1).contiguous()], [made], [1.0], kind, [offset] if bias else []
    )


def twice(stream):
    y = mlp(stream)
    return stream + y, y * 2


@pytest.mark.parametrize(
    ("layer", "folds"),
    [
        (lambda stream: stream + mlp(stream * 2), 1),
        (lambda stream: mlp(stream) + stream, 1),
        (lambda stream: stream + mlp(stream) + mlp(stream + 1), 2),
        (lambda stream: (stream * 3 + mlp(stream)).relu(), 1),
        (lambda stream: stream + linear(stream), 1),
        (lambda stream: stream + mlp(stream + linear(stream)), 2),
        (lambda stream: stream + linear(stream, bias=True), 1),
        (lambda stream: torch.cat([stream, stream], -1) + linear(stream, 2 * HIDDEN), 1),
        (lambda stream: stream + mlp(stream, DENSE), 0),
        (lambda stream: stream + linear(stream, kind=DENSE), 0),  # cuBLAS's product
        (lambda stream: torch.add(stream, mlp(stream), alpha=2), 0),  # another sum
        (lambda stream: stream + mlp(stream).relu(), 0),
        (lambda stream: stream + mlp(stream) * 0.5, 0),
        (twice, 0),  # the MLP's output has another reader
        (lambda stream: stream[:1] + mlp(stream), 0),  # other shapes
        (lambda stream: stream.double() + mlp(stream), 0),  # another dtype
        (lambda stream: mlp(stream) + 1, 0),
        (
            lambda stream: (lambda y: y.new_ones(y.shape) + y)(mlp(stream)),
            0,
        ),  # the other term is computed after the MLP
    ],
)
def test_only_sums_with_an_earlier_tensor_are_folded(layer, folds):
    stream = torch.randn(2, 5, HIDDEN)
    with torch.no_grad():
        graph = make_fx(layer)(stream)
    assert residual_pass.fold(graph.graph) == folds
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(stream), layer(stream), rtol=1e-5, atol=1e-5)
    assert residual_pass.fold(graph.graph) == 0, "each once"


def test_sums_with_dynamic_shapes_are_not_folded():
    def layer(stream, *weights):
        return stream + lora_mlp(
            stream, weights[:3], weights[3:6], weights[6:7], weights[7:], [1.0] * 3, DENSE, DENSE_CUTE
        )

    with torch.no_grad():
        graph = make_fx(layer, tracing_mode="symbolic")(torch.randn(2, 5, HIDDEN), *A, *B, UP, DOWN)
    assert any("lora_mlp" in str(node.target) for node in graph.graph.nodes)
    assert residual_pass.fold(graph.graph) == 0


@pytest.mark.slow
def test_compiled_layer_runs_the_pass_and_has_the_same_gradients(monkeypatch):
    found, fold = [], residual_pass.fold
    monkeypatch.setattr(residual_pass, "fold", lambda graph: found.append(fold(graph)))
    pipeline = lora(fused=Switch.on)
    pipeline.compile = Compile(enabled=True)

    def layer(stream):
        stream = stream + linear(stream)
        return stream + mlp(stream)

    stream, trained = torch.randn(2, 5, HIDDEN, requires_grad=True), [*A, *B]
    for parameter in trained:
        monkeypatch.setattr(parameter, "requires_grad", True)
    # A fresh cache: no pass runs for a graph that the cache has.
    with config.patch(post_grad_custom_post_pass=None), fresh_cache():
        built(pipeline, random_model("llama", num_hidden_layers=1))  # registers the pass
        wanted, mine = (
            torch.autograd.grad(run(stream).square().sum(), [stream, *trained])
            for run in (layer, torch.compile(layer, fullgraph=True, dynamic=False))
        )
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    assert max(found) == 2


def test_bfloat16_sum_outside_of_a_product_is_rounded_like_two_operators():
    """y + stream has many ties. Rounded once with the adapters' share, even a tiny share would decide each tie."""
    draw = torch.Generator().manual_seed(0)
    y, stream, narrow, factor = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((512, 64), (512, 64), (512, 16), (16, 64))
    )
    whole = (y.float() + narrow.float() @ factor.float()).bfloat16() + stream
    found = lora_adapters.add(y, narrow, factor, torch.empty_like(y), stream)
    assert (found == whole).float().mean() > 0.999  # sums in another order may round differently next to a tie
    nothing = lora_adapters.add(y, narrow, 1e-6 * factor, torch.empty_like(y), stream)
    assert torch.equal(nothing, y + stream)
