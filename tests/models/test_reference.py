"""The reference model: the base or the adapter's start, whatever training has made of the adapter."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from fxtune.models.prepared import PreparedModel
from fxtune.models.reference import ReferenceModel

IDS = torch.arange(12)[None]


@pytest.fixture
def model():
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8
        )
    )
    adapted = get_peft_model(base, LoraConfig(target_modules="all-linear", lora_dropout=0.5))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted.train()


def train(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)


@pytest.mark.parametrize("keeps_start", [False, True])
def test_reference_stays_while_the_adapter_is_trained(model, keeps_start):
    reference = ReferenceModel(PreparedModel(model), keeps_start)
    model.eval()
    if keeps_start:
        wanted = model(IDS).logits
    else:
        with model.disable_adapter():
            wanted = model(IDS).logits
    model.train()
    train(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with reference.active():
        found = model(IDS).logits  # with dropout it would differ from call to call
    assert torch.equal(found, wanted)
    assert not found.requires_grad
    assert model.training
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_autocast_mixes_up_neither_the_weights_nor_the_gradients(model):
    """Autocast keeps the casts of trained weights, which it would use for the reference and the policy alike."""
    reference = ReferenceModel(PreparedModel(model.eval()), keeps_start=True)
    found = []
    for first in ("reference", "policy"):
        train(model)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            policy = model(IDS).logits if first == "policy" else None
            with reference.active():
                found.append(model(IDS).logits)
            policy = model(IDS).logits if policy is None else policy
        assert not torch.equal(policy, found[-1])
        policy.float().logsumexp(-1).sum().backward()
        assert all(parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)
    assert torch.equal(*found)


def test_weights_come_back_after_an_error(model):
    reference = ReferenceModel(PreparedModel(model), keeps_start=True)
    train(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError, match="short"), reference.active():
        raise RuntimeError("memory is short")
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert torch.is_grad_enabled()
