"""Each private part of transformers is there and does what fxtune takes it for; and what is said where it is not."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from support.architectures import random_model
from support.mixtures import mixture
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from fxtune.errors import UnavailableError
from fxtune.models.load import load_config
from fxtune.upstream import transformers as upstream

SIZES = dict(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8
)


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def test_attention_of_a_config_is_set_and_acts(model):
    config = LlamaConfig(**SIZES)
    for name in ("eager", "sdpa"):
        upstream.set_attention(config, name)
        assert upstream.attention_of(config) == name
        assert upstream.attention_of(LlamaForCausalLM(config).model.layers[0].self_attn.config) == name


def rotated(attention, forward):
    hidden, cos, sin = (torch.randn(1, 3, size, generator=torch.manual_seed(0)) for size in (16, 8, 8))
    return forward(attention, hidden, position_embeddings=(cos, sin), attention_mask=None)[0]


def test_rotation_is_replaced_in_a_copy(model):
    attention, calls = model.model.layers[0].self_attn, []

    def rotation(q, k, cos, sin, unsqueeze_dim=1):
        calls.append(cos)
        return q, k

    assert upstream.rotates_by_name(LlamaAttention)
    copy = upstream.with_rotation(LlamaAttention.forward, rotation)
    before = rotated(attention, LlamaAttention.forward)
    assert not calls
    assert not torch.equal(rotated(attention, copy), before)
    assert len(calls) == 1
    assert torch.equal(rotated(attention, LlamaAttention.forward), before)


def test_rotation_below_another_wrapper_is_not_touched():
    """A wrapper may compute something; only the one that renames keywords does not."""

    class Wrapped(LlamaAttention):
        @functools.wraps(LlamaAttention.forward)
        def forward(self, *given, **options):
            return super().forward(*given, **options)

    for kind in (Wrapped, LlamaMLP):
        assert not upstream.rotates_by_name(kind)


def test_eager_attention_is_the_family_s_own():
    assert upstream.eager_attention(LlamaAttention).__module__ == LlamaAttention.__module__
    with pytest.raises(UnavailableError, match="eager_attention_forward"):
        upstream.eager_attention(torch.nn.Linear)


def test_routers_of_a_mixture_and_its_loss():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(load_config(mixture("olmoe")))
    kind = upstream.recorded_outputs(model.model)["router_logits"]
    kind = getattr(kind, "target_class", kind)
    assert sum(isinstance(module, kind) for module in model.modules()) == model.config.num_hidden_layers
    loss = upstream.router_loss(model)((torch.zeros(6, 4),), 4, 2)
    assert loss.item() == pytest.approx(2.0)
    model.__class__ = type("FSDPModel", (type(model),), {})  # as fully_shard() does
    assert upstream.router_loss(model) is not None
    dense = AutoModelForCausalLM.from_config(load_config(random_model("llama")))
    assert upstream.router_loss(dense) is None
    assert "router_logits" not in upstream.recorded_outputs(dense.model)
    assert not upstream.recorded_outputs(torch.nn.Linear(1, 1))


def test_names_in_files(model, tmp_path):
    state = model.state_dict(keep_vars=True)
    assert set(state) - set(upstream.saved_names(model, state)) == {"lm_head.weight"}
    assert any(re.search(pattern, "lm_head.weight") for pattern in upstream.not_in_files(model))
    assert not any(re.search(pattern, "model.norm.weight") for pattern in upstream.not_in_files(model))
    model.save_pretrained(tmp_path)
    read = LlamaForCausalLM.from_pretrained(tmp_path)
    upstream.forget_conversions(read)
    assert {*upstream.as_stored(read, {"model.norm.weight": torch.ones(16)})} == {"model.norm.weight"}


def test_experts_are_stored_by_the_names_of_their_family():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**SIZES, num_local_experts=2, num_key_value_heads=2)
    layer = {name: value for name, value in MixtralForCausalLM(config).state_dict().items() if ".layers.0." in name}
    stored = upstream.as_stored(MixtralForCausalLM(config), layer)
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in stored


def test_code_of_models_can_be_imported():
    upstream.import_code_of_models()
