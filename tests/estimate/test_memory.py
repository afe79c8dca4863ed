"""Memory forecasts against their formulas and against measured bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.architectures import built, enable, facts_of, lora, tiny_model
from support.decoder_sizes import decoder_sizes
from support.forecasts import LLAMA, PEFT, QWEN3_5, TECHNIQUES, allocated, card
from transformers import AutoConfig, AutoModelForCausalLM

from fxtune.distributed.parallel import Degrees
from fxtune.estimate.memory import forecast
from fxtune.estimate.weights import trained_parameters
from fxtune.facts.execution import OptimizerState
from fxtune.facts.recomputation import RecomputePlan
from fxtune.kernels import frozen_base, fused_lora
from fxtune.kernels.linear_attention import document_chunks
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer, state_of
from fxtune.system.terminal.units import GIB


def test_the_forecast_equals_its_formula():
    """Bytes per token and layer, by the docstring of estimate/memory.py with two bytes a number."""
    facts, cells = card(139, 65536, techniques=PEFT), 65536 * 32
    adapters, lse = 2 * 7 * 16, 4 * 32
    for level, floats in (
        ("everything", 4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336),
        ("wide", 4 * 4096 + 2 * 1024 + 2 * 14336),
        ("narrow", 4 * 4096 + 2 * 1024),
    ):
        kept = cells * (2 * floats + adapters + lse)
        assert forecast(facts, RecomputePlan(level)).kept == kept
        # A shared prompt has a copy of its keys and values, at most one a token.
        assert forecast(replace(facts, shares_prompts=True), RecomputePlan(level)).kept == kept + cells * 2 * 2 * 1024
    assert forecast(facts, RecomputePlan("input")).kept == cells * 2 * 4096 == 16 * GIB
    assert forecast(facts, RecomputePlan("attention")).kept == cells * (4 * 4096 + lse)
    sent = forecast(facts, RecomputePlan("input", sent="inputs"))
    assert sent.kept == GIB  # two layers' inputs
    assert sent.host == 31 * GIB // 2
    assert forecast(facts, RecomputePlan("input", sent="inputs", senders=10)).kept == 11 * GIB  # the ten are gone
    assert abs(forecast(facts, RecomputePlan("input")).weights - 8.03e9 * 2) < 0.2e9


def test_recurrent_layers_keep_their_operators_tensors():
    """Bytes per token of Qwen3.5-9B: 24 recurrent layers with 32 heads, 8 layers of attention with 16 heads of 256."""
    tokens, facts = 16384, card(139, 16384, model=QWEN3_5)
    chunks = 4 * 32 + 2 * 64 * 32  # sums of decays, and rows of matrices
    kept = 24 * (2 * (4096 + 4096) + chunks) + 8 * (2 * (4096 + 4096) + 4 * 16)
    assert forecast(facts, RecomputePlan("attention")).kept == tokens * kept
    whole, without = (forecast(facts, RecomputePlan(level)).kept for level in ("everything", "wide"))
    # What convolutions made, queries and keys after their norms, results before and after their norm, decays and steps;
    # and the inputs of both norms.
    inputs = 24 * (2 * (8192 + 2 * 16 * 128 + 2 * 4096) + 4 * 32 + 2 * 32) + 32 * 2 * 2 * 4096
    assert whole - without == tokens * inputs
    # The states of all chunks and their gradients, and tensors like keys and values.
    many = {**QWEN3_5, "intermediate_size": 64}
    heads = 2 * 32 * (2 * 128 * 128 / 64 + 4 * 256)
    few = card(139, 16384, model={**many, "layer_types": ["full_attention"] * 32})
    more = forecast(card(139, 16384, model=many), RecomputePlan("input")).backward
    assert more - forecast(few, RecomputePlan("input")).backward > tokens * heads / 2


def test_the_reference_holds_the_state_of_each_token():
    heads, keys, values, tokens = 2, 64, 64, 512
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    q, k, v = torch.rand(tokens, heads, keys), torch.rand(tokens, heads, keys), torch.rand(tokens, heads, values)
    g, beta, empty = -torch.rand(tokens, heads), torch.rand(tokens, heads), torch.empty(0)
    given = (v, q, k, v, g, beta, 1.0, bounds, document_chunks(bounds, tokens), empty, empty, empty)
    peak = allocated(lambda: torch.ops.fxtune.linear_attention_backward(*given))[0]
    assert peak == pytest.approx(tokens * 4 * heads * keys * values, rel=0.25)


def test_layers_with_low_levels_come_first():
    """The first layers recompute when the gate and up of the last ones are free again, so they add nothing to the peak."""
    facts = card(139, 65536)
    mixed = forecast(facts, RecomputePlan(mix=(("input", 16), ("wide", 16))))
    wide = forecast(facts, RecomputePlan("wide"))
    assert RecomputePlan(mix=(("wide", 2), ("attention", 1))).levels(5) == [
        "input",
        "input",
        "attention",
        "wide",
        "wide",
    ]
    assert mixed.backward == wide.backward < forecast(facts, RecomputePlan("input")).backward
    assert mixed.kept == (forecast(facts, RecomputePlan("input")).kept + wide.kept) // 2


@pytest.mark.parametrize(("keep", "tiles"), [(True, 1), (False, 1), (False, 4)])
def test_the_forecast_counts_the_buffers_of_a_fused_mlp(monkeypatch, keep, tiles):
    """Backward pass, in floats per token, without the activation's kernel, which is plain torch on a CPU."""
    monkeypatch.setattr(fused_lora, "gated", lambda act, gate_up, share, out: out)
    monkeypatch.setattr(fused_lora, "gated_backward", lambda act, gate_up, dp, share, above, out, *_: out)
    h, i, r, rows = 64, 256, 16, 2048
    a, b = (
        [torch.ones(r, h), torch.ones(r, h), torch.ones(r, i)],
        [torch.ones(i, r), torch.ones(i, r), torch.ones(h, r)],
    )
    up = [frozen_base.augment([torch.ones(i, h)] * 2, [r, r])]
    down = [frozen_base.augment([torch.ones(h, i)], [r])]
    options = (a, b, up, down, [1.0] * 3, "dense", "dense", "silu", keep, tiles)
    x, dy = torch.ones(rows, h), torch.ones(rows, h)
    _, *kept = torch.ops.fxtune.lora_mlp(x, *options, None)
    peak = allocated(lambda: torch.ops.fxtune.lora_mlp_backward(dy, x, *kept, *options, [True] * 3))[0] / 4 / rows
    shape = dict(
        LLAMA,
        hidden_size=h,
        intermediate_size=i,
        **decoder_sizes(layers=1, heads=1, key_heads=1, head_dim=4),
    )
    facts = card(
        139,
        rows,
        model=shape,
        dtype="float32",
        techniques={"lora": {"r": r, "target_modules": ["all-linear"], "fused": "on"}, "compile": {}},
    )
    said = forecast(facts, RecomputePlan("wide" if keep else "narrow", tiles=tiles)).backward / 4 / rows
    assert peak == pytest.approx(said - 3 * h, rel=0.06)  # without dy, x and the norm's input


def test_pinned_memory_is_allocated_in_pieces():
    """The inputs of 400,000 tokens are 3.05 GiB per layer; rounded to a power of two they would be 4."""
    need = forecast(card(139, 400000), RecomputePlan("input", sent="inputs"))
    assert 31 * 400000 * 8192 <= need.host < 1.03 * 31 * 400000 * 8192


def test_offloaded_moments_are_on_the_host_and_those_of_two_weights_of_each_size_on_the_device():
    facts = replace(card(139, 8192, techniques={"compile": {}}), optimizer=OptimizerState())
    plain, away = (
        forecast(each, RecomputePlan("input", sent="inputs"))
        for each in (facts, replace(facts, optimizer=OptimizerState(slots=2)))
    )
    assert plain.host_moments == 0
    assert away.host_moments == pytest.approx(2 * 2 * 8.03e9, rel=0.01)
    assert (away.host, away.pinned) == (plain.host, plain.host + away.host_moments)
    sizes = (128256 * 4096, 4096**2, 1024 * 4096, 4096 * 14336)
    kept = away.host_moments - (plain.trained - away.trained)
    assert kept == pytest.approx(2 * 2 * 2 * sum(sizes), rel=0.001)


def test_a_quantized_base_and_adapters_take_less_memory():
    facts = card(24, 8192)
    small = replace(facts, techniques=enable(**TECHNIQUES, quantize={"type": "nf4"}))
    assert forecast(small, RecomputePlan()).weights < 0.4 * forecast(facts, RecomputePlan()).weights
    full = replace(facts, techniques=enable(compile={}), dtype="float32")
    assert forecast(full, RecomputePlan()).trained > 8e9 * 12


@pytest.mark.parametrize(("kind", "adapted"), [("llama", False), ("llama", True), ("mixtral", False)])
def test_the_forecast_counts_the_moments_of_muon_and_adamw(kind, adapted):
    """AdamW updates embeddings, the head, norms and experts."""
    config = AutoConfig.for_model(
        kind,
        **decoder_sizes(vocabulary=3000, hidden=64, intermediate=96, layers=2, heads=4, key_heads=2),
    )
    model = AutoModelForCausalLM.from_config(config)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    optimizer = Optimizer(model, OptimizerConfig(name=OptimizerName.muon))
    gradients = 0
    for parameter in optimizer.names:
        parameter.grad = torch.ones_like(parameter)
        gradients += parameter.nbytes
    optimizer.step(1e-3, torch.tensor(True))
    facts = card(
        24,
        64,
        model=config.to_dict(),
        dtype="float32",
        optimizer=state_of(OptimizerConfig(name=OptimizerName.muon)),
        techniques={"lora": {"r": 8, "target_modules": ["all-linear"], "fused": "off"}} if adapted else {},
    )
    moments = sum(tensor.nbytes for tensor in optimizer.state()[0].values())
    assert forecast(facts, RecomputePlan()).trained == pytest.approx(
        gradients + moments, rel=0.005
    )  # routers are not counted


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_adapters_of_experts_are_forecast(kind):
    model = built(lora(r=4), tiny_model(kind), packing=False)
    wanted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained_parameters(facts_of(tiny_model(kind), techniques=lora(r=4))) == wanted
    apart = lora(r=4, exclude_modules=["experts"])
    model = built(apart, tiny_model(kind), packing=False)
    wanted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained_parameters(facts_of(tiny_model(kind), techniques=apart)) == wanted


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"rank_pattern": {"layers.0.mlp.down_proj": 8, "q_proj": 2}}),
        ("llama", {"layers_to_transform": [1]}),
        ("qwen3_moe", {"rank_pattern": {"gate_up_proj": 4}}),
    ],
)
def test_other_ranks_of_some_modules_are_forecast(kind, options):
    model = built(lora(r=4, **options), tiny_model(kind), packing=False)
    wanted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained_parameters(facts_of(tiny_model(kind), techniques=lora(r=4, **options))) == wanted
    assert trained_parameters(facts_of(tiny_model(kind), techniques=lora(r=4))) != wanted


FULL_8B = {"liger": {"kernels": ["rms_norm", "fused_linear_cross_entropy"]}, "compile": {}}


def test_gradients_grow_while_activations_are_freed():
    """Full fine-tuning of 8B: with many tokens the loss is the peak, with few the end of the backward pass."""
    moments, gradients = 4 * 8.03e9, 2 * 8.03e9
    long, short = (forecast(card(139, tokens, techniques=FULL_8B), RecomputePlan()) for tokens in (16384, 128))
    assert long.allocated == pytest.approx(gradients + moments + long.kept + long.loss, rel=0.001)
    assert short.kept < gradients / 8
    assert gradients + moments + gradients < short.allocated < 1.03 * (gradients + moments + gradients)


@pytest.mark.parametrize("why", ["micro-batches", "CUDA graphs"])
def test_gradients_that_are_held_from_step_to_step_come_on_top(why):
    facts = replace(card(139, 16384, techniques=FULL_8B), micro_batch_size=1, step_rows=1)
    once = forecast(facts, RecomputePlan()).allocated
    if why == "micro-batches":
        held = replace(facts, step_rows=2)
        assert not replace(held, degrees=Degrees(replicate=2)).accumulates, "one on each rank"
    else:
        held = replace(facts, techniques=enable(liger=FULL_8B["liger"], compile={"cuda_graphs": "on"}))
    assert forecast(held, RecomputePlan()).allocated - once == pytest.approx(2 * 8.03e9, rel=0.001)


def test_copies_that_undo_a_bad_step_are_counted():
    """Weights, gradients and 8-bit moments of the head in the backward pass; of all adapters in a step of its own."""
    head = 128256 * 4096
    limits = [OptimizerState(0.5, size=4, undo_limit=limit) for limit in (0, 2**31)]
    whole = [replace(card(139, 4096, techniques=FULL_8B), optimizer=state) for state in limits]
    assert forecast(whole[0], RecomputePlan()) == forecast(whole[1], RecomputePlan())  # too large
    seen = [forecast(replace(facts, in_backward=True), RecomputePlan("input")) for facts in whole]
    assert [need.update for need in seen] == [0, pytest.approx(head * (2 + 2 + 2), rel=0.01)]
    assert seen[1].backward - seen[0].backward > 2 * head
    adapters = replace(card(139, 4096), optimizer=OptimizerState(1.0, undo_limit=2**31))
    assert forecast(adapters, RecomputePlan()).update == 4 * 3 * trained_parameters(adapters)
