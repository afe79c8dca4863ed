"""Each rank draws the numbers of one process."""

from functools import partial

import pytest
import torch
from support.sharding import assert_same, built
from torch import nn

from fxtune.distributed.world import Device, World
from fxtune.errors import ConfigError
from fxtune.models import drawn_shards, weights
from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.models.shards import Piece

SMALL = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8
)
FAMILIES = {
    "llama": dict(model_type="llama", vocab_size=50, tie_word_embeddings=False, **SMALL),
    "tied, with biases": dict(model_type="qwen2", vocab_size=50, tie_word_embeddings=True, **SMALL),
    "gpt2": dict(model_type="gpt2", vocab_size=50, n_embd=32, n_layer=2, n_head=4),
    "experts": dict(model_type="qwen3_moe", vocab_size=50, num_experts=4, moe_intermediate_size=16, **SMALL),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_weights_are_those_of_one_process(family):
    world = World.create(Device.cpu)
    config = load_config(ModelConfig(init=Init.random, architecture=FAMILIES[family]))
    draw = partial(weights.draw, config, torch.float32, world, 3, False)
    model, pieces = built(config, world)
    drawn_shards.draw(model, pieces, draw)
    assert_same(model, draw())


def test_matrix_that_is_changed_after_another_is_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.empty(3, 2)) for _ in range(2))
            self.first.data.normal_()
            self.second.data.normal_()
            self.first.data.mul_(2)

    model = Odd()
    pieces = {name: [Piece(name, 0, (3, 2))] for name in ("first", "second")}
    with pytest.raises(ConfigError, match=r"goes back to an earlier matrix and changes it by mul_.*parallel\.shard=1"):
        drawn_shards.draw(model, pieces, Odd)
