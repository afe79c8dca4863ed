"""Lightning attention of MiniMax with fxtune's operator, against transformers' layer, a document at a time."""

from __future__ import annotations

import copy

import pytest
import torch

from fxtune.techniques.attention import lightning
from fxtune.techniques.attention.linear import documents_of
from scripts.make.small_models import small

LENGTHS = (2, 65, 1, 64, 63)


@pytest.fixture
def layers():
    """The layer of transformers, and a copy with the operator."""
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    values = {key: value for key, value in small("minimax").items() if key != "model_type"}
    torch.manual_seed(0)
    plain = MiniMaxLightningAttention(MiniMaxConfig(**{**values, "block_size": 48}), layer_idx=1)
    mine = copy.deepcopy(plain)
    assert lightning.serves(mine)
    lightning.attach(mine)
    return plain, mine


def test_packed_documents_have_the_results_and_gradients_of_each_alone(layers):
    plain, mine = layers
    row = torch.randn(1, sum(LENGTHS), plain.qkv_proj.in_features)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    found = mine(row, attention_mask=None, **documents_of(bounds, sum(LENGTHS)))[0]
    expected = torch.cat([plain(document, None, None)[0] for document in row.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    seed = torch.randn_like(expected)
    gradients = (
        torch.autograd.grad(of, [*part.parameters()], seed) for of, part in ((found, mine), (expected, plain))
    )
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_padding_changes_no_document_and_a_cache_runs_transformers_layer(layers):
    plain, mine = layers
    rows, mask = torch.randn(2, 50, plain.qkv_proj.in_features), torch.ones(2, 50, dtype=torch.bool)
    mask[1, :9] = False
    found, expected = (part(rows, position_embeddings=None, attention_mask=mask)[0] for part in (mine, plain))
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)

    class Cache:
        def get_linear_cache(self, _):
            return None

        def set_linear_cache(self, _, state):
            self.state = state

    cache = Cache()
    name = "cache" if "cache" in plain.forward.__code__.co_varnames else "past_key_values"
    mine(hidden_states=rows, position_embeddings=None, attention_mask=None, **{name: cache})
    assert cache.state.shape == (2, plain.num_attention_heads, plain.head_dim, plain.head_dim)
