"""Checkpointing: equal gradients, the memory of each policy, refused options, and the choice of `auto`."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
from omegaconf import OmegaConf
from support import image_models
from support.architectures import CPU, FAMILIES, built, facts_of, lora, random_model
from support.cases import slow_but
from support.checkpointing import NARROW, checkpointed, close, gradients, seen, traced, with_random_lora_b
from support.forecasts import TECHNIQUES, card

from fxtune.estimate import step_time
from fxtune.estimate.memory import LayerBytes, forecast
from fxtune.facts.options import Offloaded, Policy, Switch
from fxtune.facts.recomputation import LEVELS
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.kinds.image_decoder.parts import encoder_layers
from fxtune.models.load import load_config
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.terminal.units import GIB
from fxtune.techniques.assemble import assemble
from fxtune.techniques.checkpointing import verify
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.pipeline import Pipeline, make_probe

EXACT = {
    "full": {},
    "selective": {"policy": Policy.selective},
    "narrow": NARROW,
    "none": {"policy": Policy.none},
    "mm": {"policy": Policy.selective, "save": ["aten.mm"]},
    "linears": {"policy": Policy.selective, "save": ["k_proj"]},
}
INPUTS, KEPT = Offloaded.inputs, Offloaded.kept


def with_dropout() -> Pipeline:
    return lora(dropout=0.3)


@pytest.mark.parametrize(
    ("family", "pipelines"),
    slow_but(
        itertools.product(FAMILIES, (with_dropout, Pipeline)),
        *((family, with_dropout) for family in ("llama", "gemma3", "phi")),
        ("llama", Pipeline),
        ("gemma2", Pipeline),
    ),
)
def test_checkpointing_does_not_change_gradients_even_with_dropout(family, pipelines):
    model = random_model(family, attention_dropout=0.2)
    plain = gradients(with_random_lora_b(built(pipelines(), model)))
    for options in ({}, {"policy": Policy.selective}):
        saved = gradients(with_random_lora_b(built(checkpointed(pipelines(), **options), model)))
        assert plain.keys() == saved.keys()
        assert all(torch.equal(plain[name], saved[name]) for name in plain), options


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("pipelines", [lora, Pipeline], ids=["lora", "full"])
def test_each_policy_acts_and_changes_no_gradient_bit(pipelines, options):
    pipeline = checkpointed(pipelines(), **options)
    model = with_random_lora_b(built(pipeline, random_model("llama", num_hidden_layers=3)))
    seen(pipeline, model)
    plain = gradients(with_random_lora_b(built(pipelines(), random_model("llama", num_hidden_layers=3))))
    assert all(torch.equal(plain[name], value) for name, value in gradients(model).items())


@pytest.mark.parametrize("fused", ["on", "off"])
def test_mix_applies_each_level_to_its_layers(fused):
    """Of five layers the first keeps its input, the last everything."""
    made = [lora(fused=Switch(fused)) for _ in range(2)]
    model = random_model("llama", num_hidden_layers=5)
    pipeline = checkpointed(made[0], policy=Policy.mix, mix={"wide": 1, "everything": 1, "attention": 1, "narrow": 1})
    mixed = with_random_lora_b(built(pipeline, model))
    told = seen(pipeline, mixed)
    assert "4 of 5 layers recomputed" in told
    assert (
        "1 layer keeps attention and 1 layer keeps narrow and 1 layer keeps wide and 1 layer keeps everything" in told
    )
    assert "flash_attention_for_cpu 5+1" in told
    if fused == "on":
        assert "fxtune.lora_mlp 5+2" in told  # a backward pass makes gate and up by itself
        assert "fxtune.lora_linear (q_proj, k_proj, v_proj) 5+2" in told
    else:
        assert "aten.mm (gate_proj, up_proj) 10+6" in told
        assert "aten.mm (k_proj, v_proj) 10+4" in told
    assert close(
        gradients(mixed), gradients(with_random_lora_b(built(made[1], model))), 0.0 if fused == "off" else 1e-6
    )


@pytest.mark.parametrize(("every", "recomputed"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_every_recomputes_one_layer_in_so_many(every, recomputed):
    for options in ({}, {"policy": Policy.selective}):
        pipeline = checkpointed(lora(), every=every, **options)
        model = built(pipeline, random_model("llama", num_hidden_layers=4))
        assert f"{recomputed} of 4 layers ran twice" in seen(pipeline, model)


# --- compiled. `aot_eager_decomp_partition` chooses what to save as Inductor does, and generates no code.


@pytest.mark.slow
def test_compiled_layers_keep_the_bytes_of_their_policy():
    """Floats per token and layer of a Llama: hidden 64, q 64, k and v 32 each, MLP 96; rank 4 on seven linears."""
    plain, kept = {}, {}
    for name, options in {
        "none": {"policy": Policy.none},
        "selective": {"policy": Policy.selective},
        "narrow": NARROW,
        "full": {},
        "tiles": {"mlp_tiles": 2},
    }.items():
        torch._dynamo.reset()
        pipeline = checkpointed(lora(), **options)
        model = traced(with_random_lora_b(built(pipeline, random_model("llama", num_hidden_layers=1))))
        told = seen(pipeline, model)
        kept[name] = [int(number.replace(",", "")) / 4 for number in re.findall(r"\| ([\d,]+) bytes", told)]
        plain = plain or gradients(model)
        assert close(gradients(model), plain, 1e-6), name
    assert close(plain, gradients(with_random_lora_b(built(lora(), random_model("llama", num_hidden_layers=1)))), 1e-5)
    small = 2 * 16 + 24 + 12  # cos and sin, which are kept once, the mask, and positions
    adapters, lse = 7 * 4, 4
    (full,), (tiles,), (narrow,), (selective,) = (kept[name] for name in ("full", "tiles", "narrow", "selective"))
    assert 64 <= full <= 64 + small
    assert 64 <= tiles <= 64 + small
    assert abs(narrow - (64 + 64 + 64 + 64 + 32 + 32 + adapters + lse)) <= small  # x, q, attention, o, k, v
    assert abs(selective - narrow - 2 * 96) < 1


@pytest.mark.slow
def test_layers_share_compiled_code_also_with_tiles():
    """One graph for the first layer, whose input needs no gradient, and one for all others."""
    model = traced(built(checkpointed(lora(), mlp_tiles=2), random_model("llama", num_hidden_layers=4)))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_compiled_layer_with_fused_adapters_keeps_exactly_the_forecast_bytes(level):
    """The bytes of the second layer: the first one's input needs no gradient. flash4 reads keys without a copy."""
    pipeline = lora(r=16, fused=Switch.on)
    pipeline.attention.backend = "flash4"
    pipeline.checkpointing = Checkpointing(True)._uniform(level, ["gate_proj", "up_proj"])
    model = random_model("llama")
    made = traced(assemble(pipeline, model, load_config(model), CPU, 0).module).train()
    kept, _ = verify.saved_bytes(made, decoder_layers(made)[1:], (1, 24), lambda: made(**make_probe(made)).logits)
    facts = replace(facts_of(model), device="cuda", techniques=replace(pipeline, compile=Compile(enabled=True)))
    # cos, sin and positions, which all layers share. Level `everything` also keeps the factors of the norms.
    tables = 24 * 4 * (2 * 16 + 2) + 24 * 8
    (kind,) = Shape.of(facts.model).kinds
    expected = LayerBytes(facts, pipeline.checkpointing.plan, kind).kept(level)
    assert 0 <= 24 * (kept - expected) <= tables, kept


@pytest.mark.slow
def test_each_level_of_a_mix_is_one_graph():
    """And one more for the first layer, whose input needs no gradient."""
    pipeline = checkpointed(lora(fused=Switch.on), policy=Policy.mix, mix={"narrow": 3, "wide": 4})
    model = traced(built(pipeline, random_model("llama", num_hidden_layers=7)))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 3


@pytest.mark.slow
def test_compiler_budget_applies_to_this_model_only():
    pipeline = checkpointed(lora(), policy=Policy.budget, budget=0.0)
    pipeline.compile = Compile(enabled=True)
    pipeline.check(facts_of(random_model("llama")))
    pipeline.compile.enabled = False
    model = random_model("llama", num_hidden_layers=1)
    plain = gradients(built(lora(), model))
    ours = traced(assemble(pipeline, model, load_config(model), CPU, 0).module)
    assert "a budget of 0 for the compiler | 0 while layers run" in seen(pipeline, ours)
    assert close(gradients(ours), plain, 1e-6)
    assert torch._functorch.config.activation_memory_budget == 1.0


# --- refusals


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"every": 3}, "every: 3 must be"),
        ({"every": 2, "policy": Policy.none}, "every: 2 is not read by policy=none"),
        ({"save": ["aten.mm"]}, "save: read only by policy=selective, and policy is full"),
        (
            {"policy": Policy.selective, "save": ["aten._scaled_m"]},
            "save: aten._scaled_m is no .* Did you mean aten._scaled_mm?",
        ),
        ({"policy": Policy.selective, "recompute": ["gate_prj"]}, "recompute: gate_prj .* Did you mean gate_proj?"),
        ({"policy": Policy.selective, "save": ["matmul"]}, "save: matmul .* Did you mean matmuls?"),
        (
            {"policy": Policy.selective, "save": ["q_proj"], "recompute": ["q_proj"]},
            "recompute: q_proj is in save",
        ),
        (
            {"policy": Policy.selective, "save": ["q_proj"], "recompute": ["o_proj"]},
            "recompute: o_proj has the shape of q_proj",
        ),
        ({"policy": Policy.budget}, "policy: budget is the compiler's"),
        *(
            (
                {"policy": policy, "budget": 0.3},
                f"budget: read only by policy=budget, and policy is {policy.value}. Leave it out",
            )
            for policy in (Policy.full, Policy.selective, Policy.auto, Policy.none)
        ),
        ({"offload": INPUTS}, "offload: copies tensors from a GPU to host memory, and the device is cpu"),
        ({"offload": INPUTS, "policy": Policy.none}, "offload: policy=none keeps more"),
        ({"offload": INPUTS, "every": 2}, "offload: the last layer's input stays, and with 2 layers and every=2"),
        ({"offload": KEPT}, "offload: kept, and policy=full keeps nothing but"),
        ({"offload": KEPT, **NARROW}, "offload: kept is what compiled layers save"),
        ({"policy": Policy.auto, "every": 2}, "every: 2 is not read by policy=auto"),
        ({"policy": Policy.mix}, "mix: counts no layer"),
        ({"mix": {"wide": 1}}, "mix: read only by policy=mix, and policy is full"),
        ({"policy": Policy.mix, "mix": {"narow": 1}}, "mix: narow is no level.* Did you mean narrow?"),
        ({"policy": Policy.mix, "mix": {"narrow": 1, "wide": 2}}, "mix: counts 3 layers, and the model has 2"),
        ({"policy": Policy.mix, "mix": {"narrow": -1, "wide": 2}}, "mix: -1 layers are less than none"),
        ({"policy": Policy.mix, "mix": {"wide": 1}, "mlp_tiles": 2}, "mix: mlp_tiles=2 keeps nothing of an MLP"),
        ({"save": ["attention"], "policy": Policy.none}, "save: read only by policy=selective"),
        ({"mlp_tiles": 2, "every": 2}, "mlp_tiles: with every=2"),
        (
            {"mlp_tiles": 2, "policy": Policy.selective, "save": ["down_proj"]},
            "mlp_tiles: tiles keep nothing .* names down_proj",
        ),
    ],
)
def test_impossible_options_are_refused(options, reason):
    told = list(Checkpointing(enabled=True, **options).check(facts_of(random_model("llama"))))
    assert any(re.match(reason.replace("?", r"\?"), line) for line in told), told


def test_offload_is_refused_if_the_host_has_no_room_or_the_model_is_one_graph():
    whole = {**TECHNIQUES, "compile": {"scope": "model"}}
    for facts, reason in (
        (card(40, 65536, host=0.1), "offload: not one layer's tensors fit into 0.1 GiB, 80% of the host's memory"),
        (card(40, 65536, techniques=whole), "offload: techniques.compile.scope=model"),
    ):
        (told,) = Checkpointing(enabled=True, offload=INPUTS).check(facts)
        assert told.startswith(reason)


def test_as_many_layers_offload_as_the_host_has_room_for():
    for host, senders in ((128, None), (16, 25)):
        technique, facts = Checkpointing(enabled=True, offload=INPUTS), card(40, 65536, host=host)
        assert not list(technique.check(facts))
        said = technique.resolve(facts)
        assert technique.senders == senders
        assert said == (
            senders
            and "every layer keeps input, inputs of the first 25 layers in host memory, as the host has room for"
        )
        assert sum(technique.plan.sending(32)) == (senders or 31)
        assert not list(technique.check(facts))


def test_known_names_are_accepted():
    facts = facts_of(random_model("phi3"))
    names = {"save": ["attention", "aten.mm", "fxtune.flash4", "qkv_proj"], "recompute": ["gate_up_proj"]}
    assert not list(Checkpointing(enabled=True, policy=Policy.selective, **names).check(facts))


# --- what fits: Llama-3-8B, LoRA r=16 on all linears, bfloat16, compiled, FlashAttention


def chosen(facts: Facts, **options) -> tuple[Checkpointing, str]:
    technique = Checkpointing(enabled=True, policy=Policy.auto, **options)
    why = technique.resolve(facts)
    assert not list(technique.check(facts)), why
    return technique, why


HOST = "kept tensors except gate and up of all layers but the last in host memory"


@pytest.mark.parametrize(
    ("gib", "length", "rows", "host", "said"),
    [
        (139, 4096, 4, 128, "every layer keeps everything: "),
        (60, 4096, 4, 128, f"every layer keeps wide, {HOST}: "),
        (44, 4096, 4, 0, "28 layers keep narrow and 4 layers keep wide: "),
        (139, 65536, 1, 128, f"4 layers keep narrow and 28 layers keep wide, {HOST}: "),
        (139, 65536, 1, 0, "24 layers keep narrow and 8 layers keep wide: "),
        (
            30,
            65536,
            1,
            128,
            "every layer keeps narrow, kept tensors of all layers but the last in host memory, MLPs in 4 tiles: ",
        ),
        (
            30,
            65536,
            1,
            40,
            "every layer keeps attention, kept tensors of the first 30 layers in host memory, MLPs in 4 tiles: ",
        ),
        (
            139,
            400000,
            1,
            128,
            "10 layers keep input and 22 layers keep attention, inputs of all layers but the last in host memory, MLPs in ",
        ),
        (139, 524288, 1, 128, "23 layers keep input and 9 layers keep attention, inputs of "),
    ],
)
def test_auto_chooses_the_fastest_plan_that_fits(gib, length, rows, host, said):
    facts = card(gib, length, rows, host=host)
    technique, why = chosen(facts)
    assert why.startswith(said), why
    need = forecast(facts, technique.plan)
    assert f"{need.device / GIB:.1f} of {gib}.0 GiB free" in why
    assert need.device <= gib * GIB
    assert need.host <= 0.8 * host * GIB


def test_auto_fills_memory_up_to_a_margin_and_reports_what_everything_would_need():
    technique, why = chosen(card(139, 65536))
    assert "everything would need 24" in why
    assert 0.9 * 139 * GIB < forecast(card(139, 65536), technique.plan).device < 0.95 * 139 * GIB
    one_more = {"narrow": technique.mix["narrow"] - 1, "wide": technique.mix["wide"] + 1}
    assert forecast(card(139, 65536), replace(technique, mix=one_more).plan).device > 0.95 * 139 * GIB


def test_auto_tries_the_smallest_plan_and_warns_if_none_fits():
    technique, why = chosen(card(16, 65536))
    assert (technique.policy, technique.offload, technique.mlp_tiles) == (Policy.full, INPUTS, 16)
    assert "may run out of memory" in why


def test_auto_keeps_options_that_the_recipe_sets():
    assert chosen(card(139, 4096), offload=INPUTS)[0].offload is not Offloaded.none
    assert chosen(card(139, 65536), offload=KEPT)[0].offload is KEPT
    assert chosen(card(139, 4096), mlp_tiles=2)[0].mlp_tiles == 2
    assert chosen(card(40, 65536, host=0))[0].offload is Offloaded.none


@pytest.mark.slow
def test_more_memory_never_gives_a_slower_plan():
    for length, rows in ((4096, 4), (65536, 1)):
        times = []
        for gib in range(24, 400, 24):
            facts = card(gib, length, rows)
            times.append(step_time.overhead(facts, chosen(facts)[0].plan))
        assert all(less >= more - 1e-9 for less, more in pairwise(times))
        assert times[0] > times[-1] == 0


@pytest.mark.parametrize(("gib", "length"), [(139, 65536), (80, 65536), (139, 131072), (16, 65536)])
def test_options_chosen_by_auto_are_valid_in_a_recipe(gib, length):
    """Written into a recipe, they pass the checks and need the memory that the line of `auto` says."""
    facts = card(gib, length)
    technique, why = chosen(facts)
    assert technique.policy is not Policy.auto
    recipe = OmegaConf.create(json.dumps(asdict(technique)))
    again = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Checkpointing), recipe))
    assert not list(again.check(facts))
    assert again.resolve(facts) is None, "nothing is left to decide"
    need = forecast(facts, again.plan)
    assert f"{need.device / GIB:.1f} of {gib}.0 GiB free" in why
    assert f"{need.host / GIB:.1f} GiB of host memory" in why


@pytest.mark.parametrize("options", [{}, {"policy": Policy.selective}, NARROW], ids=["full", "selective", "narrow"])
@pytest.mark.parametrize(
    "family", slow_but(["qwen2_5_vl", "qwen3_5", "gemma3", "smolvlm", "llava"], "qwen2_5_vl", "llava")
)
def test_a_trained_tower_is_checkpointed_too(family, options):
    model, results = image_models.recipe(family), []
    for pipeline in (lora(vision=True), checkpointed(lora(vision=True), **options)):
        adapted = with_random_lora_b(built(pipeline, model))
        image_models.draw(adapted)  # a new projector of Gemma 3 is 0
        batch = image_models.batch(adapted, [image_models.documents(family, adapted.get_base_model())])
        loss = LanguageModel(PreparedModel(adapted)).summed_loss(batch)
        results.append(image_models.gradients(adapted, loss))
    plain, saved = results
    assert any("vision" in name or "visual" in name for name in plain)
    assert plain.keys() == saved.keys()
    assert all(torch.equal(saved[name], plain[name]) for name in plain)
    evidence = [*pipeline.checkpointing.verify(PreparedModel(adapted), make_probe(adapted))]
    assert all(observation.acted for observation in evidence), evidence
    assert sum("vision encoder" in observation.asked for observation in evidence) == 1


def test_a_frozen_tower_is_not_checkpointed():
    pipeline = checkpointed(lora())
    adapted = built(pipeline, image_models.recipe("qwen2_5_vl"))
    assert not any("forward" in vars(layer) for layer in encoder_layers(adapted))
    evidence = pipeline.checkpointing.verify(PreparedModel(adapted), make_probe(adapted))
    assert not any("vision encoder" in observation.asked for observation in evidence)
