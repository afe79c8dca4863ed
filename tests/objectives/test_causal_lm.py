"""The language-model objective: its sum, its normalizer and its perplexity."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.objectives.causal_lm import CausalLM


class FakeModel:
    def summed_loss(self, batch):
        return torch.tensor(3.0) * len(batch.labels)

    def router_terms(self, batch, count):
        assert count == 1  # the supervised tokens
        return None, {}


class FakePlan:
    def supervised(self, step):
        return 10 + step


def test_loss_is_the_sum_over_supervised_tokens_without_further_metrics():
    loss, metrics = CausalLM().loss(FakeModel(), SimpleNamespace(labels=torch.tensor([5, IGNORE_INDEX])))
    assert (loss.item(), metrics) == (6.0, {})


def test_normalizer_is_the_number_of_supervised_tokens_of_the_whole_step():
    assert CausalLM().normalizer(FakePlan(), 4) == 14.0


def test_perplexity_is_the_exponential_of_the_mean_loss_and_never_overflows():
    assert CausalLM().derived({"loss": 1.5}) == {"perplexity": math.exp(1.5)}
    assert math.isfinite(CausalLM().derived({"loss": 1e9})["perplexity"])
