"""Modules that run fused: what peft's own functions, hooks, generation, checkpointing and the compiler see."""

from __future__ import annotations

import pytest
import torch
from support.architectures import FAMILIES, SIZES, built, logits, lora, prepared_model, random_model
from support.lora_models import lora_pair, loss_and_gradients, require_close

from fxtune.facts.options import Policy, Switch
from fxtune.models.structure import decoder_layers
from fxtune.techniques.pipeline import make_probe


def test_disabled_and_merged_adapters_match_peft():
    plain, fused = lora_pair(random_model("llama"))
    with fused.disable_adapter():
        without = logits(fused)
    with plain.disable_adapter():
        torch.testing.assert_close(without, logits(plain))
    whole = logits(fused)
    assert (whole - without).abs().max() > 0.01
    for safe in (False, True):
        fused.merge_adapter(safe_merge=safe)
        torch.testing.assert_close(logits(fused), whole, rtol=1e-4, atol=1e-5)
        fused.unmerge_adapter()
        torch.testing.assert_close(logits(fused), whole, rtol=1e-4, atol=1e-5)


def test_adapters_chosen_per_row_match_peft():
    from peft import LoraConfig

    names, found = ["default", "other", "__base__"], []
    for model in lora_pair(random_model("llama")):
        model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if ".other." in name:
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
        ids = torch.arange(1, 9).repeat(3, 1)
        with torch.no_grad():
            found.append(model.eval()(input_ids=ids, adapter_names=names).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert (found[1][0] - found[1][2]).abs().max() > 0.01, "a row with the adapter and one without"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "compiled"),
    [
        ("self_attn.q_proj", False),
        ("mlp.up_proj", False),
        ("mlp.down_proj.base_layer", False),
        ("self_attn.o_proj", False),
        ("self_attn.o_proj.lora_A.default", False),
        ("self_attn.v_proj", True),
        ("mlp.up_proj.base_layer", True),
    ],
)
def test_hooks_on_a_linear_run(where, compiled):
    torch._dynamo.reset()
    found = []
    for model in lora_pair(random_model("llama")):
        layer, heard = decoder_layers(model)[0], []
        layer.get_submodule(where).register_forward_hook(
            lambda _, given, out, heard=heard: heard.append(tuple(out.shape))
        )
        layer.get_submodule(where).register_forward_hook(lambda _, given, out: out * 2)
        if compiled:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend="eager")
        found.append((loss_and_gradients(model), heard))
    assert found[0][1] == found[1][1] != []
    require_close(found[1][0], found[0][0], 1e-5)


def test_backward_hooks_on_a_linear_run():
    found = []
    for model in lora_pair(random_model("llama")):
        heard = []
        for layer in decoder_layers(model):
            layer.mlp.gate_proj.register_full_backward_hook(
                lambda _, given, out, heard=heard: heard.append(out[0].clone())
            )
        loss_and_gradients(model)
        found.append(heard)
    assert len(found[1]) == 2
    for result, expected in zip(*found, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


def test_generation_with_a_cache_matches_peft():
    plain, fused = (model.eval() for model in lora_pair(random_model("llama")))
    ids = torch.arange(1, 9).view(2, 4)
    made = [
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        for model in (plain, fused)
    ]
    assert torch.equal(*made)
    assert made[0].shape == (2, 10)


def test_a_second_adapter_matches_peft():
    from peft import LoraConfig

    models = lora_pair(random_model("llama"))
    for model in models:
        model.add_adapter("other", LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if ".other." in name:
                parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    found = []
    for chosen in ("default", "other", ["default", "other"]):
        for model in models:
            model.base_model.set_adapter(chosen)
        plain, fused = map(logits, models)
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
        found.append(fused)
    assert all((logits - found[0]).abs().max() > 0.01 for logits in found[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"policy": Policy.full},
        {"policy": Policy.full, "mlp_tiles": 4},
        {"policy": Policy.none, "mlp_tiles": 3},
        {"policy": Policy.selective},
        {"policy": Policy.selective, "recompute": ["gate_proj", "up_proj"]},
        {"policy": Policy.selective, "save": ["attention"]},
        {"policy": Policy.selective, "recompute": ["q_proj", "k_proj", "v_proj"]},
        {"policy": Policy.selective, "save": ["aten.mm"]},
        {"policy": Policy.selective, "recompute": ["o_proj", "fxtune.lora_mlp"]},
        {"policy": Policy.full, "every": 2},
    ],
)
def test_checkpointing_changes_no_gradient(options):
    def prepare(pipeline):
        pipeline.checkpointing.enabled = True
        for name, value in options.items():
            setattr(pipeline.checkpointing, name, value)

    plain, _ = lora_pair(random_model("llama"))
    wanted = loss_and_gradients(plain)
    pipeline = lora(fused=Switch.on)
    prepare(pipeline)
    prepared = prepared_model(pipeline, random_model("llama"))
    proven = prepared.module
    seen = pipeline.verify(prepared, make_probe(proven))
    assert all(evidence.acted for evidence in seen)
    if tiles := options.get("mlp_tiles"):
        assert [evidence.observed for evidence in seen if "tiles" in evidence.asked] == [
            f"{tiles} forward and {tiles} again"
        ], "the checkpoint does not run them a third time"
    _, fused = lora_pair(random_model("llama"), prepare=prepare)
    require_close(loss_and_gradients(fused), wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mlps"), [("llama", 1), ("olmo2", 2)])
def test_compiled_layers_share_a_graph_and_recompute_down_only_if_a_norm_reads_it(family, mlps, monkeypatch):
    """With the compiler's own cut between forward and backward, and no code generated."""
    from torch.profiler import ProfilerActivity, profile

    layers, pipeline = 4, lora(fused=Switch.on)
    pipeline.checkpointing.enabled, pipeline.checkpointing.policy = True, Policy.full
    monkeypatch.setitem(FAMILIES, "olmo2", {"model_type": "olmo2", **SIZES})
    model = built(pipeline, random_model(family, num_hidden_layers=layers)).train()
    for layer in decoder_layers(model):
        layer.forward = torch.compile(
            layer.forward, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"
        )
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            model(**make_probe(model)).logits.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2, (
        "the first layer's input needs no gradient"
    )
    names = [event.name for event in trace.events()]
    ran = {name: names.count(f"fxtune::lora_{name}") for name in ("linear", "mlp", "linear_backward", "mlp_backward")}
    assert ran == {"linear": 4 * layers, "mlp": mlps * layers, "linear_backward": 2 * layers, "mlp_backward": layers}
