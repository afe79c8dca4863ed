"""fp8 on a GPU: rows are quantized as in plain torch, products and models are close to 16-bit ones, and faster."""

from __future__ import annotations

import gc

import pytest
import torch
from support import reference
from torch.nn import functional as F

from fxtune.distributed.world import World
from fxtune.facts.options import WeightFormat
from fxtune.facts.run import Facts
from fxtune.kernels import fp8
from fxtune.kernels.fused_lora import lora_linear, lora_mlp
from fxtune.kernels.linear_cross_entropy import linear_cross_entropy
from fxtune.kernels.swiglu import gated, gated_backward
from fxtune.models.load import DType, Init, ModelConfig, load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.quantize.technique import Quantize
from fxtune.techniques.quantized_modules import dequantized, head_of, is_quantized


@pytest.fixture(autouse=True)
def _capable():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")


def random(*size: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device="cuda") * scale).bfloat16()


@pytest.mark.parametrize("width", [16, 100, 4096, 14336, 17000, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("powers", [False, True])
def test_rows_are_quantized_as_in_plain_torch(width, dtype, powers):
    whole = (torch.randn(37, width + 24, device="cuda") * torch.logspace(-30, 20, 37, device="cuda")[:, None]).to(
        dtype
    )
    whole[3] = 0
    x = whole[:, 8 : 8 + width]
    codes, scales = fp8.quantize_rows(x, powers)
    expected, expected_scales = fp8.quantize_rows(x.cpu(), powers)
    assert torch.equal(scales.cpu(), expected_scales)
    unlike = codes.cpu().view(torch.uint8) != expected.view(torch.uint8)
    assert unlike.float().mean() < (0 if powers else 1e-4) + 1e-9  # implementations round 1 / scale differently
    assert (codes.cpu().float() - expected.float()).abs().max() <= 32  # one step of fp8


@pytest.mark.parametrize("width", [16, 4096, 6000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_dequantized_as_on_a_cpu(width, dtype):
    weight = fp8.quantize_weight(random(300, width, scale=0.02))
    found = fp8.dequantize_weight(weight.codes, weight.scales, dtype)
    assert torch.equal(found.cpu(), fp8.dequantize_weight(weight.codes.cpu(), weight.scales.cpu(), dtype))


def test_nonfinite_numbers_stay_nonfinite():
    x = random(4, 4096)
    x[1, 7], x[2, 9] = float("nan"), float("inf")
    codes, scales = fp8.quantize_rows(x)
    weight = fp8.quantize_weight(random(512, 4096, scale=0.02))
    finite = fp8.scaled_mm((codes, scales), weight.codes, weight.scales).isfinite()
    assert finite.all(1).tolist() == [True, False, False, True]
    assert not finite[1].any()


def test_rows_beyond_int32():
    free = torch.cuda.mem_get_info()[0]
    rows = 2**31 // 28672 + 100
    if free < 4 * rows * 28672:
        pytest.skip("needs 9 GiB")
    x = torch.zeros(rows, 28672, dtype=torch.bfloat16, device="cuda")
    x[-1] = random(28672)
    codes, scales = fp8.quantize_rows(x)
    last, scale = fp8.quantize_rows(x[-1:])
    assert torch.equal(codes[-1].view(torch.uint8), last[0].view(torch.uint8))
    assert scales[-1] == scale[0]


@pytest.mark.parametrize("rows", [0, 1, 24, 700, 4096])
@pytest.mark.parametrize(("inward", "outward"), [(4096, 6144), (14336, 4096), (1024, 16), (16, 2816)])
def test_products_match_float32_of_the_quantized_factors(rows, inward, outward):
    x, weight = random(rows, inward), fp8.quantize_weight(random(outward, inward, scale=0.02))
    codes = fp8.quantize_rows(x)
    made = fp8.scaled_mm(codes, weight.codes, weight.scales)
    expected = (
        fp8.dequantize_rows(*codes, torch.float32)
        @ fp8.dequantize_rows(weight.codes, weight.scales, torch.float32).t()
    )
    assert made.shape == (rows, outward)
    assert rows == 0 or reference.relative(made, expected) < reference.LIMITS["bfloat16"]


def test_transpose_holds_the_same_numbers():
    weight = fp8.quantize_weight(random(3072, 2048, scale=0.02))
    forward, back = (fp8.dequantize_rows(*pair, torch.float32) for pair in (weight[:2], weight[2:]))
    assert reference.relative(back.t(), forward) < 1e-4


def shares(rows: int, width: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return (random(rows, 32), random(2 * width, 32, scale=0.2)), (random(rows, 48), random(48, width, scale=0.2))


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (700, 2816), (129, 14336)])
def test_adapters_inside_the_gated_activation(act, rows, width):
    gate_up, dp = random(rows, 2 * width + 32)[:, : 2 * width], random(rows, width)
    share, above = shares(rows, width)
    wide = [one.float().cpu() for one in (gate_up, dp, *share, *above)]
    expected_p = gated(act, wide[0], (wide[2], wide[3]), torch.empty(rows, width))
    expected = gated_backward(
        act, wide[0], wide[1], (wide[2], wide[3]), (wide[4], wide[5]), torch.empty(rows, 2 * width)
    )
    p = gated(act, gate_up, share, torch.empty_like(dp))
    d = gated_backward(act, gate_up, dp, share, above, torch.empty_like(gate_up))
    for mine, theirs in ((p, expected_p), (dp, expected_p), (d, expected)):
        assert reference.relative(mine.cpu(), theirs) < reference.LIMITS["bfloat16"]


def group(inward: int, outs: tuple[int, ...], rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], fp8.Weight]:
    return (
        [torch.randn(rank, inward, device="cuda", requires_grad=True) for _ in outs],
        [(0.05 * torch.randn(out, rank, device="cuda")).requires_grad_() for out in outs],
        fp8.quantize_weight(random(sum(outs), inward, scale=0.02)),
    )


def on_cpu(tensors):
    return [one.detach().cpu().requires_grad_(one.requires_grad) for one in tensors]


@pytest.mark.parametrize("rows", [700, 4100])
def test_linear_group_matches_the_cpu(rows):
    """Also with enough rows for fxtune's own kernels."""
    a, b, weight = group(1024, (1024, 256, 256), 16)
    x = random(rows, 1024).requires_grad_()
    dy = random(rows, 1536)
    mine = lora_linear(x, a, b, list(weight), [2.0] * 3, "fp8")
    found = torch.autograd.grad(mine, [x, *a, *b], dy)
    (plain_x,), plain_a, plain_b = on_cpu([x]), on_cpu(a), on_cpu(b)
    expected = lora_linear(plain_x, plain_a, plain_b, on_cpu(weight), [2.0] * 3, "fp8")
    wanted = torch.autograd.grad(expected, [plain_x, *plain_a, *plain_b], dy.cpu())
    for one, other in zip([mine, *found], [expected, *wanted], strict=True):
        assert reference.relative(one.cpu(), other) < reference.LIMITS["bfloat16"]


@pytest.mark.parametrize(("keep", "tiles"), [(True, 1), (False, 1), (False, 3)])
def test_mlp_matches_the_cpu(keep, tiles):
    a, b, up = group(512, (1408, 1408), 16)
    a_down, b_down, down = group(1408, (512,), 16)
    a, b = a + a_down, b + b_down
    x, dy = random(700, 512).requires_grad_(), random(700, 512)
    mine = lora_mlp(x, a, b, list(up), list(down), [2.0] * 3, "fp8", "fp8", "silu", keep, tiles)
    found = torch.autograd.grad(mine, [x, *a, *b], dy)
    (plain_x,), plain_a, plain_b = on_cpu([x]), on_cpu(a), on_cpu(b)
    expected = lora_mlp(
        plain_x, plain_a, plain_b, on_cpu(up), on_cpu(down), [2.0] * 3, "fp8", "fp8", "silu", keep, tiles
    )
    wanted = torch.autograd.grad(expected, [plain_x, *plain_a, *plain_b], dy.cpu())
    # A number that bfloat16 rounds differently may have another fp8 code, 1/16 away.
    for one, other in zip([mine, *found], [expected, *wanted], strict=True):
        assert reference.relative(one.cpu(), other) < 1.5 * reference.LIMITS["bfloat16"]


def pipeline(fused: str = "auto", compiled: bool = False, quantized: bool = True) -> Pipeline:
    made = Pipeline()
    made.attention.backend = "sdpa"
    made.lora.enabled = True
    made.lora.fused = type(made.lora.fused)(fused)
    made.precision.autocast = type(made.precision.autocast)("bfloat16")
    made.compile.enabled = compiled
    made.quantize = Quantize(quantized, WeightFormat.fp8)
    return made


@pytest.mark.parametrize("shape", reference.SHAPES)
def test_fp8_model_is_close_to_bfloat16(shape):
    """fp8 products have a relative error of 0.037, which two layers of random weights do not reduce."""
    given = reference.batch(shape)
    results = {}
    for fused in ("on", "off"):
        ours, made, evidence, _ = reference.build(pipeline(fused), shape, given)
        assert [one.acted for one in evidence if one.technique == "quantize"] == [True] * 4
        results[fused] = reference.passed(ours, made, given)
    plain, made, _, _ = reference.build(pipeline("off", quantized=False), shape, given)
    theirs = dict(ours.named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            if name in theirs and is_quantized(theirs[name]):
                module.weight.copy_(dequantized(theirs[name]))
    results["plain"] = reference.passed(plain, made, given)
    for fused in ("on", "off"):
        apart = reference.relative_errors(results[fused], results["plain"])
        assert apart["logits"] < 0.1, (fused, apart)
        assert apart["grads"] < 0.15, (fused, apart)
        assert abs(results[fused].loss / results["plain"].loss - 1) < 0.005, (
            fused,
            results[fused].loss,
            results["plain"].loss,
        )
    apart = reference.relative_errors(results["on"], results["off"])
    assert apart["logits"] < 0.09, apart


@pytest.mark.parametrize("fused", ["on", "off"])
def test_compiled_layers_equal_eager_layers(fused):
    given = reference.batch("llama")
    plain, made, _, _ = reference.build(pipeline(fused), "llama", given)
    eager = reference.passed(plain, made, given)
    model, chosen, evidence, _ = reference.build(pipeline(fused, compiled=True), "llama", given)
    assert [one for one in evidence if one.technique == "compile"]
    apart = reference.relative_errors(reference.passed(model, chosen, given), eager)
    # A number that bfloat16 rounds differently may have another fp8 code, 1/16 away: noise as large as fp8's own.
    assert apart["logits"] < 0.09, apart
    assert apart["grads"] < 0.12, apart


def test_wide_layers_are_built_with_little_extra_memory():
    """The loss falls as far as in the same bfloat16 steps from the same weights."""
    sizes = dict(reference.LAYERS_OF_8B, num_hidden_layers=4)
    given = reference.batch(sizes, lengths=(700, 600, 748))
    model = ModelConfig(path=None, init=Init.random, dtype=DType.bfloat16, architecture=sizes)
    ends = {}
    for quantized in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        world, hf_config = World.create(), load_config(model)
        facts = Facts.of(
            world.facts(),
            model=hf_config.to_dict(),
            dtype="bfloat16",
            packing=True,
            sequence_length=2048,
            rows=(2048,),
        )
        chosen, _ = pipeline(quantized=quantized).resolved(facts)
        prepared = assemble(chosen, model, hf_config, world, 0)
        built = prepared.module
        weights = sum(parameter.numel() * parameter.element_size() for parameter in built.parameters())
        if quantized:
            linears = [module for module in built.modules() if is_quantized(module)]
            weights += sum(module.back.numel() for module in linears)
            one = 14336 * 4096 * 2
            assert torch.cuda.memory_allocated() - before < 1.02 * weights + 80 * 2**20
            assert torch.cuda.max_memory_allocated() - before < weights + 8 * one
        chosen.prove(prepared, make_probe(built))
        built.train()
        optimizer = torch.optim.AdamW(
            [parameter for parameter in built.parameters() if parameter.requires_grad], lr=1e-3
        )
        losses = []
        for _ in range(8):
            with chosen.precision.context(torch.device("cuda")):
                loss = reference.loss_of(chosen, built, given) / given.supervised
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends[quantized] = losses
        del built, optimizer, loss
    assert ends[True][-1] < ends[True][0]
    assert ends[True][-1] == pytest.approx(ends[False][-1], abs=0.02 * ends[False][0])


@pytest.mark.parametrize("vocabulary", [4096, 4112])
def test_fp8_head_matches_the_cpu(vocabulary):
    """Also with padded rows of logits, as for 4,112 tokens of vocabulary."""
    source = torch.nn.Linear(1024, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden, labels = random(700, 1024, scale=3.0).requires_grad_(), torch.randint(0, vocabulary, (700,), device="cuda")
    results = []
    for device in ("cuda", "cpu"):
        head = head_of(source, torch.bfloat16, torch.device(device))
        inputs = hidden.detach().to(device).requires_grad_()
        loss = linear_cross_entropy(inputs, head.weight, labels.to(device), chunk_rows=256, fp8_scales=head.scales)
        loss.backward()
        own = F.cross_entropy(head(inputs).float(), labels.to(device), reduction="sum")
        assert loss.item() == pytest.approx(own.item(), rel=1e-3)
        (gradient,) = torch.autograd.grad(own, inputs)
        assert reference.relative(inputs.grad, gradient) < 2 * reference.LIMITS["bfloat16"]
        results.append((loss.item(), inputs.grad.cpu()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-3)
    assert reference.relative(results[0][1], results[1][1]) < 2 * reference.LIMITS["bfloat16"]


def test_a_model_with_fp8_embeddings_and_head():
    given, asked = reference.batch("llama"), pipeline()
    asked.quantize.head = asked.quantize.embeddings = True
    ours, made, evidence, _ = reference.build(asked, "llama", given)
    assert all(one.acted for one in evidence)
    theirs, plainly, _, _ = reference.build(pipeline(), "llama", given)
    apart = reference.relative_errors(reference.passed(ours, made, given), reference.passed(theirs, plainly, given))
    assert apart["loss"] < 0.01, apart
    assert apart["logits"] < 0.12, apart


@pytest.mark.timed
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="for Hopper and newer"
)
def test_fp8_is_faster_than_bfloat16():
    """A frozen linear of an 8B model's MLP over 16k tokens, forward and backward, activations quantized in each."""
    x, dy = random(16384, 4096).requires_grad_(), random(16384, 14336)
    weight = random(14336, 4096, scale=0.02)
    stored = fp8.quantize_weight(weight)
    times = {
        "bfloat16": reference.milliseconds(lambda: torch.autograd.grad(F.linear(x, weight), x, dy)),
        "fp8": reference.milliseconds(lambda: torch.autograd.grad(fp8.linear(x, stored), x, dy)),
    }
    print(times)
    assert times["fp8"] < 0.75 * times["bfloat16"], times
