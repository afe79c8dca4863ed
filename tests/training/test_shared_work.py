"""How the ranks of a run share its work where the recipe leaves it to the forecast."""

import pytest
import torch
from support.forecasts import LLAMA, card

from fxtune.config.root import Config
from fxtune.distributed.parallel import Degrees, ParallelConfig
from fxtune.distributed.world import World
from fxtune.training.builder import RunBuilder

LORA = {"attention": {}, "lora": {}, "checkpointing": {"policy": "full"}}
FULL = {"attention": {}, "checkpointing": {"policy": "full"}}
LARGE = LLAMA | dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)


@pytest.mark.parametrize(
    ("ranks", "given", "techniques", "model", "expected"),
    [
        (2, {}, LORA, LLAMA, Degrees(replicate=2)),
        (2, {}, FULL, LLAMA, Degrees(shard=2)),
        (4, {}, FULL, LLAMA, Degrees(replicate=2, shard=2)),
        (4, {}, LORA, LARGE, Degrees(shard=4)),
        (4, {"replicate": "4"}, FULL, LLAMA, Degrees(replicate=4)),
        (2, {}, {**LORA, "quantize": {}}, LARGE, Degrees(replicate=2)),  # quantized weights are not divided
    ],
)
def test_auto_divides_what_does_not_fit_a_card(ranks, given, techniques, model, expected):
    builder = RunBuilder.__new__(RunBuilder)
    builder.facts = card(80, 4096, techniques=techniques, model=model)
    builder.config = Config(techniques=builder.facts.techniques, parallel=ParallelConfig(**given))
    builder.world = World(torch.device("cpu"), 0, ranks)
    world, (line,) = builder._share_work()
    assert world.degrees == expected
    assert line.startswith(f"parallel: {expected}")
