"""Which adapters vLLM loads, and what the model card says."""

from __future__ import annotations

import pytest
from support.architectures import lora, prepared_model, random_model, trained
from support.sharded import NoTokenizer

from fxtune.export.save import save_model
from fxtune.export.vllm import max_rank, refusals

PLAIN = {"r": 16, "lora_alpha": 32, "bias": "none"}
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("options", "tensor", "words"),
    [
        ({"use_dora": True}, Q, "no DoRA"),
        ({"modules_to_save": ["lm_head"]}, Q, "trained in full"),
        ({"bias": "lora_only"}, Q, "no trained biases"),
        ({"rank_pattern": {"q_proj": 8}}, Q, "another rank"),
        ({"alpha_pattern": {"q_proj": 8}}, Q, "another alpha"),
        ({"r": 513}, Q, "no rank above 512"),
        ({"init_lora_weights": "pissa"}, Q, "no pissa"),
        ({"target_parameters": ["experts.down_proj"]}, Q, "target_parameters"),
        ({}, "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight", "no adapters of experts"),
        ({}, "base_model.model.model.embed_tokens.lora_embedding_A", "adapters of embed_tokens only"),
    ],
)
def test_refusal_is_named(options, tensor, words):
    (found,) = refusals({**PLAIN, **options}, [tensor])
    assert words in found


def test_plain_adapters_have_none():
    assert refusals({**PLAIN, "use_rslora": True, "init_lora_weights": True}, [Q]) == []
    assert [max_rank(r) for r in (4, 16, 257, 513)] == [8, 16, 320, None]


def test_model_card_says_whether_vllm_loads_the_adapter(tmp_path):
    plain = save_model(trained(prepared_model(lora(r=4), random_model("llama"))), NoTokenizer(), tmp_path / "plain")
    assert "Loads in vLLM: yes, with `--enable-lora --max-lora-rank 8`." in (plain / "README.md").read_text()
    dora = save_model(
        trained(prepared_model(lora(dora=True), random_model("llama"))), NoTokenizer(), tmp_path / "dora"
    )
    said = (dora / "README.md").read_text()
    assert "Loads in vLLM: no. vLLM takes no DoRA. Serve the merged model: `fxtune merge . ../merged`." in said
