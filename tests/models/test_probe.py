"""Distances between the answers of two models."""

from __future__ import annotations

import math

import pytest
import torch
from support.architectures import built, random_model, tiny_model

from fxtune.distributed.world import Device, World
from fxtune.models import shards
from fxtune.models.load import load_config
from fxtune.models.probe import Answer, kl, probe_logits
from fxtune.techniques.pipeline import Pipeline


def test_kl_is_the_mean_over_tokens():
    one = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]]).log()
    other = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]]).log()
    assert kl(one, one) == 0
    assert kl(one, other + 3) == pytest.approx((0.9 * math.log(1.8) + 0.1 * math.log(0.2)) / 2)
    assert math.isnan(kl(one, other * math.nan))


def test_model_without_memory_has_logits_without_memory():
    """Of a family whose routers have biases as buffers, which have memory."""
    model = shards.empty(load_config(tiny_model("deepseek_v3")), torch.float32, World.create(Device.cpu), False)
    assert probe_logits(model).is_meta
    (bias,) = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert not bias.is_meta


def test_noise_is_small_and_not_zero():
    answer = Answer.of(built(Pipeline(), random_model("llama")))
    assert answer.logits.shape == (1, 8, 128)
    assert 0 < answer.noise < 1e-9
