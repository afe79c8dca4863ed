"""Liger's kernels on a GPU: each operation against plain float32, and complete models."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from support import reference
from support.decoder_sizes import decoder_sizes
from torch import nn

from fxtune.distributed.world import World
from fxtune.facts.options import Policy
from fxtune.kernels.rotary import apply_rotary
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.liger.technique import Liger, _operations
from fxtune.techniques.pipeline import Pipeline

DTYPES = pytest.mark.parametrize("dtype", reference.LIMITS)
PHI = dict(
    model_type="phi",
    **decoder_sizes(1024, 2816, layers=2, heads=8, vocabulary=4096),
    max_position_embeddings=8192,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
EVERY = {
    **reference.SHAPES,
    "phi": PHI,
    "gemma2": {**reference.SHAPES["gemma"], "model_type": "gemma2", "sliding_window": 512},
    "phi3": {**reference.SHAPES["mistral"], "model_type": "phi3"},
}
del EVERY["phi3"]["head_dim"]


def on(shape) -> Liger:
    """All operations of Liger's that this shape has, and the fused loss."""
    has = _operations(dict(EVERY[shape], hidden_act=activation(shape), hidden_activation=activation(shape)))
    return Liger(enabled=True, kernels=[*has, "fused_linear_cross_entropy"])


def activation(shape) -> str:
    return "gelu_new" if shape == "phi" else "gelu_pytorch_tanh" if shape.startswith("gemma") else "silu"


def two_models(shape, dtype):
    """A plain model in float32 and one with Liger's kernels in `dtype`, of the same rounded weights."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(reference._config(EVERY[shape])).to("cuda", getattr(torch, dtype))
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    prepared = PreparedModel(copy.deepcopy(plain))
    on(shape).apply(prepared, World(torch.device("cuda", 0)))
    mine = prepared.module
    return plain.float(), mine


def compare(plain, mine, dtype, *inputs, limit=None):
    """Outputs and gradients of `inputs` and parameters, for inputs rounded to `dtype`."""
    given = [x.to(getattr(torch, dtype)) for x in inputs]
    results = []
    for module, cast in ((plain, torch.float32), (mine, getattr(torch, dtype))):
        leaves = [x.to(cast).requires_grad_() for x in given]
        outs = module(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        weights = (
            [parameter for parameter in module.parameters() if parameter.requires_grad]
            if isinstance(module, nn.Module)
            else []
        )
        torch.manual_seed(1)
        seeds = [torch.randn(out.shape, device="cuda").to(getattr(torch, dtype)).to(out.dtype) for out in outs]
        found = torch.autograd.grad(outs, [*leaves, *weights], seeds)
        results.append([out.detach() for out in outs] + list(found))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert ours.dtype is getattr(torch, dtype)
        assert reference.relative(ours, theirs) < (limit or reference.LIMITS[dtype])


class Take(nn.Module):
    """Returns one half of its input.

    It replaces gate_proj or up_proj, so the test compares the product without matmuls.
    """

    def __init__(self, half):
        super().__init__()
        self.half = half

    def forward(self, x):
        return x.chunk(2, -1)[self.half]


@DTYPES
@pytest.mark.parametrize("shape", EVERY)
def test_norms(shape, dtype):
    plain, mine = two_models(shape, dtype)
    pairs = [
        (name, one, mine.get_submodule(name))
        for name, one in plain.named_modules()
        if type(one).__name__.endswith(("RMSNorm", "LayerNorm")) and ("layers.0." in name or "layers" not in name)
    ]
    assert len(pairs) >= 2
    for name, one, other in pairs:
        assert type(other).__name__.startswith("Liger"), name
        size = one.weight.shape[0]
        rows = (2, 600, 8, size) if size < 512 else (2, 600, size)
        compare(one, other, dtype, torch.randn(rows, device="cuda") * 3)


@DTYPES
def test_norms_of_many_short_rows(dtype):
    """Liger uses another kernel for heads of up to 256 in 32,768 or more rows."""
    plain, mine = two_models("qwen3", dtype)
    names = "model.layers.0.self_attn.q_norm"
    compare(plain.get_submodule(names), mine.get_submodule(names), dtype, torch.randn(1, 6000, 8, 128, device="cuda"))


@DTYPES
@pytest.mark.parametrize("shape", [shape for shape in EVERY if shape != "phi"])
def test_gated_products(shape, dtype):
    pairs = [model.model.layers[0].mlp for model in two_models(shape, dtype)]
    assert type(pairs[1]).__name__.startswith("Liger")
    for mlp in pairs:
        if hasattr(mlp, "gate_up_proj"):
            mlp.gate_up_proj = nn.Identity()
        else:
            mlp.gate_proj, mlp.up_proj = Take(0), Take(1)
        mlp.down_proj = nn.Identity()
    compare(*pairs, dtype, torch.randn(2, 600, 2 * 2816, device="cuda"))


@DTYPES
@pytest.mark.parametrize("shape", EVERY)
def test_rope(shape, dtype):
    plain, _ = two_models(shape, dtype)
    heads, width = EVERY[shape]["num_attention_heads"], plain.model.layers[0].self_attn.head_dim
    positions = torch.cat([torch.arange(500), torch.arange(200)]).cuda()[None]
    cos, sin = plain.model.rotary_emb(torch.zeros(1, 700, 8, device="cuda"), positions)
    turned = cos.shape[-1]
    own = sys.modules[type(plain.model.layers[0].self_attn).__module__].apply_rotary_pos_emb
    rounded = [x.to(getattr(torch, dtype)) for x in (cos, sin)]
    q, k = (
        torch.randn(1, 700, heads, turned if shape == "phi" else width, device="cuda"),
        torch.randn(1, 700, 2, turned if shape == "phi" else width, device="cuda"),
    )
    compare(
        lambda q, k: own(q.transpose(1, 2), k.transpose(1, 2), *[x.float() for x in rounded]),
        lambda q, k: apply_rotary(q.transpose(1, 2), k.transpose(1, 2), *rounded),
        dtype,
        q,
        k,
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("shape", EVERY)
def test_models_with_all_operations_in_float32(shape, lora):
    pipeline = Pipeline()
    pipeline.precision.tf32 = False
    pipeline.liger = on(shape)
    given = reference.batch(EVERY[shape])
    seen = reference.ours(pipeline, EVERY[shape], given, dtype="float32", lora=lora)
    apart = reference.relative_errors(seen, reference.plain(EVERY[shape], given, lora=lora))
    ran = [f"  {one.asked}: {one.observed}" for one in seen.evidence if one.technique == "liger"]
    print(f"\n{shape}: {apart}", *ran, sep="\n")
    assert max(apart.values()) < 2e-5, apart


@pytest.mark.parametrize("shape", EVERY)
def test_models_with_all_operations_in_bfloat16(shape):
    pipeline = Pipeline()
    pipeline.liger = on(shape)
    given = reference.batch(EVERY[shape])
    exact = reference.plain(EVERY[shape], given)
    usual = reference.relative_errors(reference.plain(EVERY[shape], given, dtype="bfloat16"), exact)
    seen = reference.ours(pipeline, EVERY[shape], given)
    apart = reference.relative_errors(seen, exact)
    print(f"\n{shape}: plain bfloat16 {usual}, with Liger {apart}")
    ran = [one for one in seen.evidence if one.technique == "liger"]
    assert len(ran) == len(pipeline.liger.kernels) - 1
    for name, value in apart.items():
        assert value < 1.3 * usual[name] + 1e-3 * (name == "loss"), (name, apart, usual)


@pytest.mark.parametrize("policy", [Policy.full, Policy.selective], ids=lambda policy: policy.value)
def test_checkpointing_keeps_gradients(policy):
    """Some kernels write in place, and some results are saved for the backward pass."""
    given, found = reference.batch("llama"), []
    for enabled in (False, True):
        pipeline = Pipeline()
        pipeline.precision.tf32 = False
        pipeline.liger = on("llama")
        pipeline.checkpointing.enabled, pipeline.checkpointing.policy = enabled, policy
        found.append(reference.ours(pipeline, "llama", given, dtype="float32"))
    apart = reference.relative_errors(*found)
    assert max(apart.values()) < 1e-5, apart


def test_plain_model_in_the_same_process_stays_plain():
    from transformers import AutoModelForCausalLM

    two_models("llama", "bfloat16")
    plain = AutoModelForCausalLM.from_config(reference._config("llama")).cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        plain(input_ids=torch.arange(64, device="cuda")[None])
        torch.cuda.synchronize()
    names = " ".join(event.name for event in seen.events())
    assert names
    assert not any(kernel in names for kernel in ("_rms_norm_forward", "_rotary", "_swiglu_forward"))
