"""Checkpointing: the same gradients, less kept, and what was asked to be kept not computed a second time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from architectures import CPU, FAMILIES, built, facts_of, lora, random_model

from fxtune.errors import ConfigError
from fxtune.kernels.offload import Offload
from fxtune.kernels.selective import group_of, weight_shape
from fxtune.memory import Keeping, forecast
from fxtune.model import load_config
from fxtune.pipeline import Pipeline, make_probe
from fxtune.technique import decoder_layers
from fxtune.techniques.checkpointing import Checkpointing, Policy
from fxtune.techniques.compile import Compile
from fxtune.world import Facts

NARROW = {"policy": Policy.selective, "recompute": ["gate_proj", "up_proj"]}
EXACT = {"full": {}, "selective": {"policy": Policy.selective}, "narrow": NARROW, "none": {"policy": Policy.none},
         "mm": {"policy": Policy.selective, "save": ["aten.mm"]}, "linears": {"policy": Policy.selective, "save": ["k_proj"]}}
TILED = {"tiles": {"mlp_tiles": 3}, "selective_tiles": {"policy": Policy.selective, "mlp_tiles": 5},
         "tiles_alone": {"policy": Policy.none, "mlp_tiles": 2}, "a_token_a_tile": {"mlp_tiles": 24}}


def checkpointed(pipeline: Pipeline, **options) -> Pipeline:
    pipeline.checkpointing = Checkpointing(enabled=True, **options)
    return pipeline


def gradients(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # dropout
    model.train()
    model.zero_grad()
    model(**make_probe(model)).logits.logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def moved(model):
    """Adapters whose B is zero give A no gradient."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def seen(pipeline: Pipeline, model) -> str:
    """What checkpointing's evidence says, all of which must hold."""
    evidence = list(pipeline.checkpointing.verify(model, make_probe(model)))
    assert all(one.acted for one in evidence), evidence
    return "\n".join(f"{one.asked} | {one.observed}" for one in evidence)


def close(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], limit: float) -> bool:
    assert ours.keys() == plain.keys()
    return all((ours[name] - plain[name]).norm() <= limit * plain[name].norm() for name in plain)


@pytest.mark.parametrize("pipelines", [lambda: lora(dropout=0.3), Pipeline], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_without_it_dropout_and_all(family, pipelines):
    model = random_model(family, attention_dropout=0.2)
    plain = gradients(moved(built(pipelines(), model)))
    for options in ({}, {"policy": Policy.selective}):
        saved = gradients(moved(built(checkpointed(pipelines(), **options), model)))
        assert plain.keys() == saved.keys()
        assert all(torch.equal(plain[name], saved[name]) for name in plain), options


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("pipelines", [lora, Pipeline], ids=["lora", "full"])
def test_each_policy_acts_and_changes_no_bit(pipelines, options):
    pipeline = checkpointed(pipelines(), **options)
    model = moved(built(pipeline, random_model("llama", num_hidden_layers=3)))
    seen(pipeline, model)
    plain = gradients(moved(built(pipelines(), random_model("llama", num_hidden_layers=3))))
    assert all(torch.equal(plain[name], value) for name, value in gradients(model).items())


@pytest.mark.parametrize("options", TILED.values(), ids=TILED)
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
@pytest.mark.parametrize("pipelines", [lora, Pipeline], ids=["lora", "full"])
def test_a_tiled_mlp_gives_the_whole_ones_gradients(family, pipelines, options):
    pipeline = checkpointed(pipelines(), **options)
    model = moved(built(pipeline, random_model(family)))
    assert f"each MLP in {options['mlp_tiles']} tiles (of the probe's 24 tokens)" in seen(pipeline, model)
    plain = gradients(moved(built(pipelines(), random_model(family))))
    assert close(gradients(model), plain, 1e-5)


def test_tiles_of_a_full_layer_are_computed_twice_not_three_times():
    pipeline = checkpointed(lora(), mlp_tiles=4)
    told = seen(pipeline, built(pipeline, random_model("llama")))
    assert "aten.mm (gate_proj, up_proj) 16+16, aten.mm (down_proj) 8+8" in told  # 2 layers x 4 tiles


def test_tiles_repeat_their_dropout_and_follow_autocast():
    pipeline = checkpointed(lora(dropout=0.5), mlp_tiles=2)
    model = moved(built(pipeline, random_model("llama")))
    with torch.autocast("cpu", torch.bfloat16):
        first, again = gradients(model), gradients(model)
    assert all(torch.equal(first[name], again[name]) for name in first)
    mlp = decoder_layers(model)[0].mlp.train()
    hidden = torch.randn(1, 8, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(5)
        out = mlp(hidden)
    out.float().sum().backward()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):  # the tiles' own order of draws, without the function that recomputes them
        other = hidden.detach().requires_grad_()
        expected = torch.cat([type(mlp).__mro__[1].forward(mlp, piece) for piece in other.split(4, dim=1)], dim=1)
    expected.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(hidden.grad, other.grad)


def test_what_is_saved_is_not_run_again_and_what_is_named_is():
    pipeline = checkpointed(lora(), **NARROW)
    told = seen(pipeline, built(pipeline, random_model("llama")))
    assert "aten.mm (q_proj, o_proj) 4+0" in told
    assert "aten.mm (k_proj, v_proj) 4+0" in told
    assert "aten.mm (gate_proj, up_proj) 4+4" in told
    assert "flash_attention_for_cpu 2+0" in told


def test_our_own_attention_operator_is_saved_by_its_name():
    model = random_model("llama")
    config = load_config(model)
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["fxtune.flash4"])
    pipeline.attention.backend = "flash4"
    ours = moved(pipeline.build(model, config, CPU, 0))
    told = seen(pipeline, ours)
    assert "fxtune.flash4 2+0" in told
    assert "aten.mm (q_proj, o_proj) 4+4" in told
    plain = lora()
    plain.attention.backend = "flash4"
    expected = gradients(moved(plain.build(model, config, CPU, 0)))
    assert all(torch.equal(expected[name], value) for name, value in gradients(ours).items())


@pytest.mark.parametrize(("name", "second", "shape"), [
    ("aten.mm", torch.empty(3, 5), (3, 5)), ("aten.addmm", torch.empty(3, 5), (3, 5)), ("aten.bmm", torch.empty(2, 3, 5), None),
    ("bitsandbytes.int8_linear_matmul", torch.empty(5, 3), (3, 5)), ("bitsandbytes.gemm_4bit", [5, 3], (3, 5))])
def test_a_product_is_known_by_its_weight(name, second, shape):
    at = {"aten.addmm": 2, "bitsandbytes.gemm_4bit": 2}.get(name, 1)
    assert group_of(name) == "matmuls"
    assert weight_shape(name, (*[torch.empty(4, 3)] * at, second)) == shape


@pytest.mark.parametrize("name", ["fxtune.flash4_backward", "aten._scaled_dot_product_flash_attention_backward", "aten.add",
                                  "aten._fused_sdp_choice", "aten.linalg_vector_norm", "bitsandbytes.dequantize_4bit"])
def test_what_is_neither_attention_nor_a_product(name):
    assert group_of(name) is None


def test_attention_alone_is_saved():
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["attention"])
    told = seen(pipeline, built(pipeline, random_model("llama")))
    assert "flash_attention_for_cpu 2+0" in told
    assert "aten.mm (q_proj, o_proj) 4+4" in told


@pytest.mark.parametrize(("every", "recomputed"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_one_layer_in_every_is_recomputed(every, recomputed):
    for options in ({}, {"policy": Policy.selective}):
        pipeline = checkpointed(lora(), every=every, **options)
        model = built(pipeline, random_model("llama", num_hidden_layers=4))
        assert f"{recomputed} of 4 layers ran twice" in seen(pipeline, model)


def test_verify_leaves_no_gradients_and_evaluation_is_not_recomputed():
    pipeline = checkpointed(Pipeline(), mlp_tiles=2)
    model = built(pipeline, random_model("llama")).train()
    pipeline.prove(model, make_probe(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=3).shape == (1, 6)


def test_layers_below_the_first_trained_one_need_no_recomputation():
    pipeline = checkpointed(lora(target_modules=["layers.1.mlp.down_proj"]))
    seen(pipeline, built(pipeline, random_model("llama")))


def test_a_layer_that_lost_its_wrapping_is_noticed():
    pipeline = checkpointed(lora())
    model = built(pipeline, random_model("llama"))
    del decoder_layers(model)[1].forward
    with pytest.raises(ConfigError, match="2 of 2 layers recomputed; seen: 1 of 2"):
        pipeline.prove(model, make_probe(model))


def test_an_operator_that_is_saved_and_never_runs_is_noticed():
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["attention", "aten.addmm"])
    model = built(pipeline, random_model("llama"))
    with pytest.raises(ConfigError, match=r"never ran: aten\.addmm"):
        pipeline.prove(model, make_probe(model))


def test_a_rule_that_is_not_followed_is_noticed():
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["attention"])
    model = built(pipeline, random_model("llama"))
    pipeline.checkpointing.save = []
    with pytest.raises(ConfigError, match="kept: attention, matmuls; seen"):
        pipeline.prove(model, make_probe(model))


# --- compiled. `aot_eager_decomp_partition` chooses what to save as Inductor does, and generates no code.

def traced(model):
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    return model


@pytest.fixture
def _anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_anew")
def test_compiled_policies_keep_what_they_say():
    """In floats a token and layer of a Llama: hidden 64, q 64, k and v 32 each, MLP 96; rank 4 on seven linears."""
    plain, kept = {}, {}
    for name, options in {"none": {"policy": Policy.none}, "selective": {"policy": Policy.selective}, "narrow": NARROW,
                          "full": {}, "tiles": {"mlp_tiles": 2}}.items():
        torch._dynamo.reset()
        pipeline = checkpointed(lora(), **options)
        model = traced(moved(built(pipeline, random_model("llama", num_hidden_layers=1))))
        told = seen(pipeline, model)
        kept[name] = [int(number.replace(",", "")) / 4 for number in re.findall(r"\| ([\d,]+) bytes", told)]
        plain = plain or gradients(model)
        assert close(gradients(model), plain, 1e-6), name
    assert close(plain, gradients(moved(built(lora(), random_model("llama", num_hidden_layers=1)))), 1e-5)
    small = 2 * 16 + 24 + 12  # cos and sin, kept once; the mask and positions
    adapters, lse = 7 * 4, 4
    (full,), (tiles,), (narrow,), (selective,) = (kept[name] for name in ("full", "tiles", "narrow", "selective"))
    assert 64 <= full <= 64 + small
    assert 64 <= tiles <= 64 + small
    assert abs(narrow - (64 + 64 + 64 + 64 + 32 + 32 + adapters + lse)) <= small  # x, q, attention, o, k, v
    assert abs(selective - narrow - 2 * 96) < 1


@pytest.mark.usefixtures("_anew")
def test_layers_of_a_kind_share_their_compiled_code_also_with_tiles():
    """One graph for the first layer, whose input needs no gradient, and one for all others."""
    model = traced(built(checkpointed(lora(), mlp_tiles=2), random_model("llama", num_hidden_layers=4)))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2


@pytest.mark.usefixtures("_anew")
def test_the_compiler_has_its_budget_for_this_model_alone():
    pipeline = checkpointed(lora(), policy=Policy.budget, budget=0.0)
    pipeline.compile = Compile(enabled=True)
    pipeline.check(facts_of(random_model("llama")))
    pipeline.compile.enabled = False
    model = random_model("llama", num_hidden_layers=1)
    plain = gradients(built(lora(), model))
    ours = traced(pipeline.build(model, load_config(model), CPU, 0))
    assert "a budget of 0 for the compiler | 0 while layers run" in seen(pipeline, ours)
    assert close(gradients(ours), plain, 1e-6)
    assert torch._functorch.config.activation_memory_budget == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("_anew")
def test_selective_acts_under_inductor():
    pipeline = checkpointed(lora(), **NARROW)
    pipeline.compile = Compile(enabled=True)
    model = moved(built(pipeline, random_model("llama"), rows=(24,)))
    seen(pipeline, model)
    assert close(gradients(model), gradients(moved(built(lora(), random_model("llama")))), 1e-5)


# --- offload: on a CPU the same bookkeeping copies from host memory to host memory

@pytest.mark.parametrize(("options", "compiled"), [({}, False), (NARROW, False), ({}, True)],
                         ids=["full", "selective", "compiled"])
@pytest.mark.usefixtures("_anew")
def test_offloaded_inputs_come_back_and_buffers_are_used_again(compiled, options):
    pipeline = checkpointed(lora(), **options)
    model = moved(built(pipeline, random_model("llama", num_hidden_layers=3)))
    plain = gradients(moved(built(lora(), random_model("llama", num_hidden_layers=3))))
    offload = model.offload = Offload(decoder_layers(model), torch.device("cpu"))
    pipeline.checkpointing.offload = True
    model = traced(model) if compiled else model
    assert "2 sent there and 2 brought back" in seen(pipeline, model)
    buffers = {buffer.data_ptr() for buffer in offload.pool}
    for _ in range(3):
        assert close(gradients(model), plain, 1e-5 if compiled else 0.0)
    assert {buffer.data_ptr() for buffer in offload.pool} == buffers
    assert len(buffers) == 2


def test_a_forward_pass_without_a_backward_one_gives_its_buffers_back():
    model = built(checkpointed(lora()), random_model("llama", num_hidden_layers=4))
    offload = Offload(decoder_layers(model), torch.device("cpu"))
    logits = model(**make_probe(model)).logits
    assert offload.stored == 3
    assert not offload.pool
    del logits
    assert len(offload.pool) == 3
    with torch.no_grad():
        model(**make_probe(model))
    assert offload.stored == 3


def test_longer_rows_get_larger_buffers_and_no_more_of_them():
    model = built(checkpointed(lora()), random_model("llama", num_hidden_layers=3))
    offload = Offload(decoder_layers(model), torch.device("cpu"))
    for length in (8, 32, 16):
        model(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=False).logits.sum().backward()
        assert len(offload.pool) == 2
    assert {buffer.numel() for buffer in offload.pool} == {32 * 64 * 4}


def test_a_model_that_lost_its_offload_is_noticed():
    pipeline = checkpointed(lora())
    model = built(pipeline, random_model("llama"))
    pipeline.checkpointing.offload = True
    with pytest.raises(ConfigError, match="0 sent there and 0 brought back"):
        pipeline.prove(model, make_probe(model))


# --- refusals

@pytest.mark.parametrize(("options", "reason"), [
    ({"every": 0}, "every: 0 must be"), ({"every": 3}, "every: 3 must be"),
    ({"every": 2, "policy": Policy.none}, "every: 2 is not read by policy=none"),
    ({"save": ["aten.mm"]}, "save: read by policy=selective alone, and policy is full"),
    ({"policy": Policy.selective, "save": ["aten._scaled_m"]}, "save: aten._scaled_m is no .* Did you mean aten._scaled_mm?"),
    ({"policy": Policy.selective, "recompute": ["gate_prj"]}, "recompute: gate_prj .* Did you mean gate_proj?"),
    ({"policy": Policy.selective, "save": ["matmul"]}, "save: matmul .* Did you mean matmuls?"),
    ({"policy": Policy.selective, "save": ["q_proj"], "recompute": ["q_proj"]}, "recompute: q_proj stands in save"),
    ({"policy": Policy.selective, "save": ["q_proj"], "recompute": ["o_proj"]}, "recompute: o_proj has the shape of q_proj"),
    ({"policy": Policy.budget}, "policy: budget is the compiler's"), ({"policy": Policy.budget, "budget": 1.5}, "budget: 1.5"),
    ({"offload": True}, "offload: brings tensors from a GPU to host memory, and this runs on cpu"),
    ({"offload": True, "policy": Policy.none}, "offload: policy=none keeps more"),
    ({"offload": True, "every": 2}, "offload: the last layer's input stays, and with 2 layers and every=2 there is no other"),
    ({"save": ["attention"], "policy": Policy.none}, "save: read by policy=selective alone"),
    ({"mlp_tiles": 0}, "mlp_tiles: 0 must be at least 1"), ({"mlp_tiles": 2, "every": 2}, "mlp_tiles: with every=2"),
    ({"mlp_tiles": 2, "policy": Policy.selective, "save": ["down_proj"]}, "mlp_tiles: tiles keep nothing .* names down_proj"),
])
def test_what_cannot_be_is_refused(options, reason):
    told = list(Checkpointing(enabled=True, **options).check(facts_of(random_model("llama"))))
    assert any(re.match(reason.replace("?", r"\?"), one) for one in told), told


def test_offload_is_refused_where_the_host_is_too_small_or_the_whole_model_is_one_graph():
    whole = {**TECHNIQUES, "compile": {"scope": "model"}}
    for facts, reason in ((card(40, 65536, host=16), "offload: the inputs of 32 layers take 15.5 GiB of host memory"),
                          (card(40, 65536, techniques=whole), "offload: techniques.compile.scope=model")):
        (told,) = Checkpointing(enabled=True, offload=True).check(facts)
        assert told.startswith(reason)
    assert not list(Checkpointing(enabled=True, offload=True).check(card(40, 65536)))


def test_good_names_are_not_refused():
    facts = facts_of(random_model("phi3"))
    names = {"save": ["attention", "aten.mm", "fxtune.flash4", "qkv_proj"], "recompute": ["gate_up_proj"]}
    assert not list(Checkpointing(enabled=True, policy=Policy.selective, **names).check(facts))


# --- what fits: Llama-3-8B, LoRA r=16 on all linears, bfloat16, compiled, FlashAttention

LLAMA = dict(model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, vocab_size=128256)
TECHNIQUES = {"lora": {"r": 16, "target_modules": ["all-linear"]}, "compile": {}, "attention": {"backend": "flash4"},
              "precision": {"autocast": "bfloat16"}, "liger": {"fused_linear_cross_entropy": "on"}}
GIB = 1 << 30


def card(gib: float, length: int, rows: int = 1, host: float = 256, **known) -> Facts:
    return Facts(**{"device": "cuda", "memory": int(gib * GIB), "free_memory": int(gib * GIB), "host_memory": int(host * GIB),
                    "model": LLAMA, "dtype": "bfloat16", "packing": True, "sequence_length": length, "rows": (length,),
                    "micro_batch_size": rows, "techniques": TECHNIQUES, **known})


def chosen(facts: Facts, **options) -> tuple[Checkpointing, str]:
    technique = Checkpointing(enabled=True, policy=Policy.auto, **options)
    why = technique.resolve(facts)
    assert not list(technique.check(facts)), why
    return technique, why


@pytest.mark.parametrize(("gib", "length", "rows", "said"), [
    (139, 4096, 4, "none: "), (80, 4096, 4, "selective: "), (48, 4096, 4, "selective, gate_proj and up_proj recomputed: "),
    (24, 4096, 4, "full + offload: "), (38, 4096, 1, "none: "),
    (24, 4096, 1, "selective, gate_proj and up_proj recomputed: "),
    (139, 65536, 1, "selective, gate_proj and up_proj recomputed: "), (80, 65536, 1, "selective, attention alone kept: "),
    (60, 65536, 1, "selective, attention alone kept + offload: "),
    (48, 65536, 1, "selective, attention alone kept + offload + mlp_tiles=4: "),
    (32, 65536, 1, "full + offload + mlp_tiles=4: "), (80, 262144, 1, "full + offload + mlp_tiles=4: ")])
def test_auto_takes_the_fastest_that_fits(gib, length, rows, said):
    _, why = chosen(card(gib, length, rows))
    assert why.startswith(said), why
    assert f"of {gib}.0 GiB free" in why


def test_auto_says_what_the_faster_ones_would_need():
    _, why = chosen(card(139, 65536))
    assert "none would need 31" in why
    assert "selective would need 2" in why


def test_auto_tries_the_smallest_and_says_so_where_nothing_fits():
    technique, why = chosen(card(16, 65536))
    assert (technique.policy, technique.offload, technique.mlp_tiles) == (Policy.full, True, 16)
    assert "may run out of memory" in why


def test_auto_keeps_what_is_asked_for_besides():
    assert chosen(card(139, 4096), offload=True)[0].offload
    assert chosen(card(139, 4096), mlp_tiles=2)[0].mlp_tiles == 2
    assert not chosen(card(40, 65536, host=8))[0].offload  # host memory would not hold 16 GiB


def test_auto_drops_every_where_no_layer_is_treated_and_offload_where_none_would_be_sent():
    assert chosen(card(139, 4096), every=2)[0] == Checkpointing(enabled=True, policy=Policy.none)
    assert not chosen(card(40, 65536), every=32)[0].offload


def test_more_memory_never_gives_a_slower_policy():
    order = [f"{policy}{more}: " for policy in ("none", "selective", "selective, gate_proj and up_proj recomputed",
                                                "selective, attention alone kept", "full")
             for more in ("", " + offload", " + offload + mlp_tiles=4", " + offload + mlp_tiles=16")]
    for length, rows in ((4096, 4), (65536, 1)):
        ranks = [next(rank for rank, start in enumerate(order) if chosen(card(gib, length, rows))[1].startswith(start))
                 for gib in range(16, 400, 24)]
        assert ranks == sorted(ranks, reverse=True)
        assert ranks[-1] == 0


def test_the_forecast_is_the_arithmetic_of_its_formula():
    """Bytes a token and layer: those of fxtune/memory.py, with two bytes a number."""
    facts, cells = card(139, 65536), 65536 * 32
    adapters, lse = 2 * 7 * 16, 4 * 32
    for keeping, floats in ((Keeping("none"), 4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336),
                            (Keeping("selective"), 4 * 4096 + 2 * 1024 + 2 * 14336),
                            (Keeping("narrow"), 4 * 4096 + 2 * 1024)):
        assert forecast(facts, keeping).kept == cells * (2 * floats + adapters + lse)
    assert forecast(facts, Keeping("full")).kept == cells * 2 * 4096 == 16 * GIB
    assert forecast(facts, Keeping("attention")).kept == cells * (4 * 4096 + lse)
    sent = forecast(facts, Keeping("full", offload=True))
    assert sent.kept == GIB  # two layers' inputs
    assert sent.host == 31 * GIB // 2
    assert abs(forecast(facts, Keeping("full")).weights - 8.03e9 * 2) < 0.2e9


def test_a_quantised_base_and_fewer_adapters_weigh_less():
    facts = card(24, 8192)
    small = replace(facts, techniques={**TECHNIQUES, "quantize": {"type": "nf4", "double": True}})
    assert forecast(small, Keeping()).weights < 0.4 * forecast(facts, Keeping()).weights
    full = replace(facts, techniques={"compile": {}}, dtype="float32")
    assert forecast(full, Keeping()).trained > 8e9 * 12
