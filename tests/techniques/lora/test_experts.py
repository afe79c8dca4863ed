"""Adapted experts as grouped matmuls: the same numbers as plain transformers and peft, one graph, evidence, saving."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from support.architectures import built, enable, logits, lora, on_disk, trained
from support.cases import slow_but
from support.lora_models import loss_and_gradients, require_close
from support.mixtures import mixture, uneven

from fxtune.cli.merge import merge
from fxtune.errors import ConfigError
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.models.save import save_model
from fxtune.techniques.base import Switch
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.lora.experts import grouped, observe_experts
from fxtune.techniques.pipeline import make_probe

LAYERS = {
    "deepseek_v3": 1,
    "glm4_moe": 1,
    "gpt_oss": 2,
    "granitemoe": 2,
    "mixtral": 2,
    "olmoe": 2,
    "qwen2_moe": 2,
    "qwen3_moe": 2,
}
"""Layers with experts of the tiny models."""


@pytest.mark.parametrize("kind", slow_but(LAYERS, "gpt_oss", "qwen3_moe"))
def test_experts_as_plain_transformers_and_peft(kind):
    plain, mine = (
        uneven(built(lora(grouped_experts=switch), mixture(kind), packing=False))
        for switch in (Switch.off, Switch.auto)
    )
    assert (len(grouped(plain)), len(grouped(mine))) == (0, LAYERS[kind])
    require_close(loss_and_gradients(mine), loss_and_gradients(plain), 1e-5)


@pytest.mark.parametrize("rank", [3, 16])
def test_any_rank_and_another_scaling(rank):
    options = {"r": rank, "alpha": 5.0, "rslora": True}
    plain, mine = (
        uneven(built(lora(grouped_experts=switch, **options), mixture("qwen3_moe"), packing=False))
        for switch in (Switch.off, Switch.on)
    )
    require_close(loss_and_gradients(mine), loss_and_gradients(plain), 1e-5)


def test_recomputed_layers_route_as_before():
    """A recomputation that chose other experts would change the gradients."""
    pipelines = lora(), lora()
    pipelines[1].checkpointing = Checkpointing(enabled=True)
    plain, again = (uneven(built(one, mixture("qwen3_moe"), packing=False)) for one in pipelines)
    wanted, found = loss_and_gradients(plain), loss_and_gradients(again)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())


def test_layers_with_experts_are_one_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    pipeline = enable(lora={"r": 4}, compile={})
    model = uneven(built(pipeline, mixture("qwen3_moe"), packing=True))
    evidence = list(pipeline.compile.verify(model, make_probe(model)))
    assert all(one.acted for one in evidence), evidence
    plain = uneven(built(lora(), mixture("qwen3_moe"), packing=True))
    require_close(loss_and_gradients(model), loss_and_gradients(plain), 1e-5)


def test_the_evidence_counts_experts_that_learn():
    model = built(lora(), mixture("qwen3_moe"), packing=False)
    seen = observe_experts(model, make_probe(model))
    assert (seen.layers, seen.grouped, seen.experts) == (2, 2, 8)
    assert 0 < seen.reached == seen.learning <= 8


def test_experts_without_a_gradient_are_an_error(monkeypatch):
    """As in a library that trained none of 1,536 experts, silently."""
    from fxtune.techniques.lora import experts

    own = experts.run_experts
    monkeypatch.setattr(experts, "run_experts", lambda one, adapters, *rest: own(one, {}, *rest))
    pipeline = lora()
    model = built(pipeline, mixture("qwen3_moe"), packing=False)
    with pytest.raises(ConfigError, match=r"experts that a small row reaches, 0 have a gradient"):
        pipeline.prove(model, make_probe(model, packing=False))


@pytest.mark.parametrize("kind", slow_but(LAYERS, "gpt_oss"))
def test_plain_peft_and_merge_give_the_same_model(kind, tmp_path):
    """The saved adapter in plain transformers and peft: logits and gradients; merged: logits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", model=mixture(kind))
    uneven(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(base)
    config = ModelConfig(path=str(base))
    mine = trained(built(lora(), config, packing=False))
    assert len(grouped(mine)) == LAYERS[kind]
    folder = save_model(mine, load_tokenizer(config), tmp_path / "adapter")
    assert json.loads(Path(folder, "adapter_config.json").read_text())["target_parameters"]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder, is_trainable=True)
    require_close(loss_and_gradients(mine), loss_and_gradients(plain), 1e-5)
    wanted = logits(mine)
    torch.testing.assert_close(logits(plain), wanted, atol=1e-5, rtol=1e-5)
    merged = merge(folder, tmp_path / "merged")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=2e-5, rtol=1e-4)
    with mine.disable_adapter():
        torch.testing.assert_close(
            logits(mine), logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(("kind", "shared"), [("qwen2_moe", "shared_expert"), ("deepseek_v3", "shared_experts")])
def test_shared_experts_have_adapters_and_routers_only_if_named(kind, shared):
    def adapted(**options) -> set[str]:
        model = built(lora(**options), mixture(kind), packing=False)
        return {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_A" in name}

    names = adapted()
    assert not any(name.endswith((".gate", ".router")) for name in names)
    assert {name.rpartition(".")[2] for name in names if f".{shared}." in name} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }
