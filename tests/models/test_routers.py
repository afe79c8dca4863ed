"""Routers of a mixture count the tokens of each expert, padding left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.architectures import lora, prepared_model
from support.mixtures import batch, mixture, uneven

from fxtune.models import routers
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.language_model import LanguageModel


@pytest.mark.parametrize("comparisons", [2**24, 50])
def test_metrics_count_the_tokens_of_each_expert(comparisons, monkeypatch):
    monkeypatch.setattr(routers, "COMPARISONS", comparisons)
    prepared = prepared_model(lora(), mixture("qwen3_moe"), packing=False)
    uneven(prepared.module)
    seen = []
    for module in prepared.routers.modules:
        module.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    language, given = LanguageModel(prepared), batch()
    seen.clear()
    metrics = CausalLM().loss(language, given)[1]
    assert set(metrics) == {"router_max_load", "router_entropy"}
    real = given.is_token().bool()
    shares = [torch.bincount(numbers[real].flatten(), minlength=4) / (2 * 23) for numbers in seen]
    largest = sum(4 * share.max() for share in shares) / len(shares)
    torch.testing.assert_close(metrics["router_max_load"] / given.supervised, largest)
    entropy = sum(torch.special.entr(share).sum() for share in shares) / len(shares) / np.log(4)
    torch.testing.assert_close(metrics["router_entropy"] / given.supervised, entropy.float())


def test_tokens_that_choose_no_expert_are_not_counted():
    """As Zaya's routers have it: one column more, and such a token has expert 0 with the weight 0."""
    module = torch.nn.Identity()
    observed = routers.Routers([module], 3, False, torch.device("cpu"))
    observed.mask = torch.ones(4)
    numbers, weights = torch.tensor([[0], [0], [2], [2]]), torch.tensor([[0.9], [0.0], [0.8], [0.7]])
    module((torch.zeros(4, 4), weights, numbers))
    assert module.tokens_by_expert.tolist() == [1, 0, 2]
