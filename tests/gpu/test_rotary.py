"""Our RoPE kernel on a GPU: more accurate than transformers' own, faster than compiled code, used in fused models."""

from __future__ import annotations

import pytest
import torch
from support import reference

from fxtune.kernels.rotary import apply_rotary, qkv
from fxtune.kernels.rotary import reference as exact
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline

SHAPES = {
    "llama": (2, 500, 32, 8, 128, 128),
    "qwen2": (1, 333, 28, 4, 128, 128),
    "partial": (1, 70, 8, 8, 80, 32),
    "odd": (3, 50, 5, 1, 96, 72),
}
"""rows, length, heads, kv_heads, dim, width."""
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2.2e-3, torch.float16: 3e-4}
"""Largest error of one rounding, relative to the norm."""


def angles(rows, length, width, dtype):
    turned = (torch.arange(length, device="cuda") % 97)[:, None] * 1e4 ** -(
        torch.arange(0, width, 2, device="cuda") / width
    )
    turned = torch.cat([turned, turned], -1).expand(rows, -1, -1)
    return (turned.cos() * 1.2).to(dtype), (turned.sin() * 1.2).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_rounded_once(shape, dtype):
    rows, length, heads, kv, dim, width = SHAPES[shape]
    cos, sin = angles(rows, length, width, dtype)
    q = torch.randn(rows, heads, length, dim, device="cuda").to(dtype).transpose(1, 2)
    k = torch.randn(rows, length, kv, dim, device="cuda").to(dtype)
    for back in (False, True):
        for x, out in zip((q, k), torch.ops.fxtune.rotary(q, k, cos, sin, back), strict=True):
            assert reference.relative(out, exact(x.double(), cos, sin, back)) < ROUNDING[dtype]
    whole = torch.randn(rows, length, (heads + 2 * kv) * dim, device="cuda").to(dtype).requires_grad_()
    found = []
    for function in (lambda: qkv(whole, cos, sin, heads, kv, 48), lambda: apart(whole, cos, sin, heads, kv, dim)):
        out = function()
        found.append([*out, *torch.autograd.grad(out, whole, [one.detach().roll(1, 1) for one in out])])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def apart(whole, cos, sin, heads, kv, dim):
    q, k, v = whole.unflatten(-1, (-1, dim)).split([heads, kv, kv], 2)
    return *apply_rotary(q, k, cos, sin, unsqueeze_dim=2), v


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_models_with_fused_adapters(shape, compiled):
    """As accurate as plain bfloat16, with one operator per layer and no copy of its gradient."""
    pipeline = Pipeline()
    pipeline.liger = Liger(enabled=True, kernels=["rope"])
    if compiled:
        pipeline.compile = Compile(enabled=True)
    given = reference.batch(shape)
    true = reference.plain(shape, given, lora=True)
    usual = reference.relative_errors(reference.plain(shape, given, dtype="bfloat16", lora=True), true)
    seen = reference.ours(pipeline, shape, given, lora=True)
    distance = reference.relative_errors(seen, true)
    told = [one for one in seen.evidence if one.technique == "liger"]
    print(
        f"\n{shape}: {distance}, plain bfloat16 {usual}", *[f"  {one.asked}; {one.observed}" for one in told], sep="\n"
    )
    assert [one.acted for one in told] == [True]
    for name, value in distance.items():
        assert value < 1.3 * usual[name] + 1e-3 * (name == "loss"), (name, distance, usual)


@pytest.mark.timed
def test_kernels_run_at_memory_speed():
    """65,536 tokens of an 8B Llama: 1.6 GB each way. A quarter of that is done before autograd has come to its next
    call."""
    cos, sin = angles(16, 4096, 128, torch.bfloat16)
    x = torch.randn(16, 4096, 6144, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = qkv(x, cos, sin, 32, 8, 48)
    above = [torch.randn_like(one) for one in out]
    for name, run in (
        ("forward", lambda: qkv(x, cos, sin, 32, 8, 48)),
        ("backward", lambda: torch.autograd.grad(out, x, above, retain_graph=True)),
    ):
        for _ in range(3):
            run()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            run()
        end.record()
        torch.cuda.synchronize()
        speed = 4 * x.numel() / (start.elapsed_time(end) / 20) / 1e9
        print(f"\n{name}: {speed:.2f} TB/s", end="")
        assert speed > 2, (name, speed)
