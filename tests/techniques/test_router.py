"""Routers of a mixture: the auxiliary loss is transformers', in value and gradients, and the tokens of experts are counted."""

from __future__ import annotations

import functools

import pytest
import torch
from support.architectures import built, facts_of, lora, prepared_model, tiny_model
from support.cases import slow_but
from support.mixtures import batch, mixture, uneven
from torch.nn import functional as F

from fxtune.errors import ConfigError
from fxtune.models.prepared import PreparedModel
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.router import Router

FAMILIES = ["gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
"""Those with an auxiliary loss in transformers."""
COEFFICIENT = 0.5


def plain_loss(model, given) -> torch.Tensor:
    """transformers': the mean cross-entropy of a batch, and the auxiliary loss over the tokens that are not padding."""
    mask = given.is_token().view(given.input_ids.shape).long()
    if bool(mask.all()):  # packed rows: with a mask of its own transformers would not separate documents
        mask = None
    out = model(
        given.input_ids,
        position_ids=given.position_ids,
        attention_mask=mask,
        output_router_logits=True,
        use_cache=False,
    )
    own = F.cross_entropy(out.logits.flatten(0, 1), given.targets.flatten(), ignore_index=-100)
    return own + COEFFICIENT * out.aux_loss


def mine(model: PreparedModel, batches) -> torch.Tensor:
    """The mean of a step over `batches`, its gradients left in the parameters."""
    language, objective = LanguageModel(model), CausalLM()
    total = sum(batch.supervised for batch in batches)
    losses = []
    for part in batches:
        loss = objective.loss(language, part)[0] / total
        loss.backward()
        losses.append(loss.detach())
    return sum(losses)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    return found


def require_same(found, wanted, tolerance=1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-9, name


def pipeline(adapters=True, **others) -> Pipeline:
    made = lora() if adapters else Pipeline()
    made.router = Router(aux_loss_coef=COEFFICIENT)
    for name, technique in others.items():
        setattr(made, name, technique)
    return made


def pair(kind: str, adapters=True, packing=False, **others):
    """The model with fxtune's auxiliary loss, and the module as transformers and peft have it."""
    without = lora() if adapters else Pipeline()
    without.router.enabled = False
    ours = prepared_model(pipeline(adapters, **others), mixture(kind), packing=packing)
    uneven(ours.module)
    return ours, uneven(built(without, mixture(kind), packing=packing))


@pytest.mark.parametrize("adapters", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("kind", slow_but(FAMILIES, "qwen3_moe"))
def test_the_auxiliary_loss_is_that_of_transformers(kind, adapters):
    model, plain = pair(kind, adapters)
    given = batch()
    found = mine(model, [given])
    wanted = plain_loss(plain, given)
    wanted.backward()
    assert abs(found - wanted) <= 1e-5 * abs(wanted)
    theirs = gradients(plain)
    require_same(gradients(model.module), theirs)
    F.cross_entropy(plain(given.input_ids).logits.flatten(0, 1), given.targets.flatten()).backward()
    without = gradients(plain)  # the test can fail: without the auxiliary loss gradients are others
    assert any((without[name] - gradient).norm() > 1e-2 * gradient.norm() for name, gradient in theirs.items())


def test_packed_rows_and_micro_batches():
    """A step's auxiliary loss is the mean of its micro-batches', weighted by supervised tokens."""
    model, plain = pair("qwen3_moe", packing=True)
    batches = [batch((9, 14), packed=True), batch((5, 6), packed=True, seed=1)]
    found, total = mine(model, batches), sum(batch.supervised for batch in batches)
    wanted = sum(plain_loss(plain, batch) * batch.supervised / total for batch in batches)
    wanted.backward()
    assert abs(found - wanted) <= 1e-5 * abs(wanted)
    require_same(gradients(model.module), gradients(plain))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_layers_that_are_recomputed_and_compiled(compiled, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    others = {"compile": Compile(enabled=True)} if compiled else {}
    model, plain = pair("qwen3_moe", packing=True, checkpointing=Checkpointing(enabled=True), **others)
    given = batch((9, 14), packed=True)
    found, wanted = mine(model, [given]), mine(pair("qwen3_moe", packing=True)[0], [given])
    assert abs(found - wanted) <= 1e-6 * abs(wanted)
    plain_loss(plain, given).backward()
    require_same(gradients(model.module), gradients(plain))


def test_recomputed_layers_choose_the_same_experts():
    made = pipeline(checkpointing=Checkpointing(enabled=True))
    model, chosen = prepared_model(made, mixture("qwen3_moe"), packing=False), []
    uneven(model.module)
    for number, module in enumerate(model.routers.modules):
        module.register_forward_hook(lambda _, __, output, number=number: chosen.append((number, output[2].clone())))
    given = batch()
    language = LanguageModel(model)
    chosen.clear()
    loss = CausalLM().loss(language, given)[0]
    forward = dict(chosen)
    chosen.clear()
    loss.backward()
    again = dict(chosen)
    assert again.keys() == forward.keys() == {0, 1}
    assert all(torch.equal(again[number], tensor) for number, tensor in forward.items())


def decided(kind: str, **changes) -> tuple[Pipeline, list[str]]:
    return Pipeline().resolved(facts_of(mixture(kind, **changes), packing=False))


def test_the_config_switches_it_on():
    chosen, notes = decided("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.01)
    assert chosen.router.enabled
    assert chosen.router.aux_loss_coef == 0.01
    assert "router: auxiliary loss times 0.01, as the model's config says" in notes
    chosen, notes = decided("qwen3_moe")
    assert not chosen.router.enabled
    assert not any(note.startswith("router") for note in notes)


def test_a_config_that_asks_for_it_trains_without_transformers_collecting_logits():
    made = Pipeline()
    model = mixture("qwen3_moe", output_router_logits=True)
    made, _ = made.resolved(facts_of(model, packing=False))
    prepared = prepared_model(made, model, packing=False)
    adapted = prepared.module
    evidence = [
        observation
        for observation in made.prove(prepared, make_probe(adapted, packing=False))
        if observation.technique == "router"
    ]
    assert len(evidence) == 1
    assert adapted(torch.arange(5)[None]).router_logits is None


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_a_model_without_an_auxiliary_loss_refuses_a_coefficient(kind):
    made = Pipeline()
    made.router.aux_loss_coef = 0.01
    with pytest.raises(ConfigError, match=rf"techniques.router.aux_loss_coef: 0.01, but {kind} has no auxiliary loss"):
        made.resolved(facts_of(tiny_model(kind), packing=False))
