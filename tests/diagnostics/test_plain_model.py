"""The plain model gives objectives what transformers computes for each document alone."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import batch, mixture, uneven

from fxtune.diagnostics.plain_model import PlainModel, RouterCounts
from fxtune.distributed.world import World
from fxtune.models import load as models
from fxtune.models.prepared import PreparedModel
from fxtune.models.routers import observe_routers
from fxtune.upstream.transformers import router_loss

WORLD = World(torch.device("cpu"))


def built(kind: str = "qwen3_moe") -> PreparedModel:
    config = mixture(kind)
    prepared = models.build(config, models.load_config(config), WORLD, seed=0)
    uneven(prepared.module)
    prepared.routers = observe_routers(prepared.module, WORLD.device)
    return prepared


def test_log_probs_are_those_of_each_document_alone_in_the_order_of_the_labels():
    prepared, given = built(), batch((9, 14, 5), packed=True)
    found = PlainModel(prepared).log_probs(given)
    expected = []
    for begin, end in ((0, 9), (9, 23), (23, 28)):
        logits = prepared.module(input_ids=given.input_ids[:, begin:end]).logits[0].log_softmax(-1)
        targets = given.targets[0, begin:end]
        expected += [logits[at, target] for at, target in enumerate(targets) if target >= 0]
    assert len(found) == len(given.labels)
    assert torch.allclose(found, torch.stack(expected), atol=1e-6)
    assert PlainModel(prepared).summed_loss(given).item() == pytest.approx(-found.sum().item())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_router_loss_of_groups_adds_up_to_that_of_transformers(checkpointed):
    """Value and gradient of a micro-batch of three groups."""
    given = [batch((length,), packed=True, seed=seed) for seed, length in enumerate((9, 14, 7))]
    prepared = built()
    module = prepared.module.train()
    routers = [parameter for name, parameter in module.named_parameters() if "gate.weight" in name]
    logits = [module(input_ids=one.input_ids, output_router_logits=True).router_logits for one in given]
    experts, used = module.config.num_experts, module.config.num_experts_per_tok
    expected = router_loss(module)(tuple(map(torch.cat, zip(*logits, strict=True))), experts, used)
    wanted = torch.autograd.grad(expected, routers)

    plain = PlainModel(prepared, checkpointed, balanced=True)
    counts, labels = RouterCounts(experts, WORLD.device), 0
    for one in given:
        plain.log_probs(one)
        assert plain.router_terms(one, len(one.labels)) == (None, {})
        counts.add(plain.counts)
        labels += len(one.labels)
    assert counts.weight == labels
    total = sum(plain.router_loss(one, counts) for one in given)
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    total.backward()
    found = [parameter.grad for parameter in routers]
    assert all(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-7) for mine, theirs in zip(found, wanted, strict=True))


def test_change_is_the_norm_of_what_each_log_probability_adds():
    given, plain = batch((9, 14), packed=True), PlainModel(built())
    weights = torch.linspace(-1, 1, len(given.labels))
    for order in (1, 2):
        log_probs = plain.log_probs(given)
        (weights * log_probs).sum().backward()
        expected = (weights * log_probs.detach()).norm(order).item()
        assert plain.take_change(order).item() ** (1 / order) == pytest.approx(expected, rel=1e-6)
    assert plain.take_change(1).item() == 0
