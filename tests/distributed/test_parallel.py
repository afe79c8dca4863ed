"""What the config group `parallel` means for a number of ranks."""

import pytest

from fxtune.config import compose
from fxtune.config.root import Config, RunConfig, TrainConfig
from fxtune.distributed.parallel import Degrees, ParallelConfig, decide
from fxtune.distributed.world import Device, World
from fxtune.errors import ConfigError
from fxtune.settle.ranks import ranks_of


@pytest.mark.parametrize(
    ("given", "ranks", "shards", "expected"),
    [
        ({}, 1, False, Degrees()),
        ({}, 8, False, Degrees(replicate=8)),
        ({}, 8, True, Degrees(shard=8)),
        ({"shard": "4"}, 8, False, Degrees(replicate=2, shard=4)),
        ({"replicate": "2"}, 8, True, Degrees(replicate=2, shard=4)),
        ({"replicate": "2"}, 8, False, Degrees(replicate=2, shard=4)),
        ({"context": "2"}, 4, False, Degrees(replicate=2, context=2)),
        ({"context": "2"}, 4, True, Degrees(shard=2, context=2)),
        ({"replicate": "1", "shard": "2", "context": "2"}, 4, False, Degrees(shard=2, context=2)),
    ],
)
def test_degrees_fill_the_ranks(given, ranks, shards, expected):
    assert decide(ParallelConfig(**given), ranks, shards) == expected


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        ({"shard": "3"}, 4, r"parallel\.shard=3 needs a multiple of 3 ranks, and this run has 4\. Change it"),
        ({"shard": "2"}, 1, r"parallel\.shard=2 needs a multiple of 2 ranks, and this run has 1"),
        (
            {"replicate": "1", "shard": "2"},
            4,
            r"parallel\.replicate=1 and parallel\.shard=2 need 2 ranks, and this run has 4\. Change them",
        ),
    ],
)
def test_impossible_degrees_are_one_message(given, ranks, message):
    with pytest.raises(ConfigError, match=message):
        decide(ParallelConfig(**given), ranks)


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_degree_is_auto_or_a_number(value):
    with pytest.raises(ConfigError, match=rf"`parallel\.shard={value}` must be `auto` or a whole number from 1 on"):
        compose.load(["+recipe=quickstart", f"parallel.shard={value}"])


def test_ranks_of_a_context_group_have_the_same_rows():
    worlds = [World(World.create(Device.cpu).device, rank, 8).divided(Degrees(2, 2, 2)) for rank in range(8)]
    assert [world.data_rank for world in worlds] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [world.context_rank for world in worlds] == [0, 1] * 4
    assert {(world.data_ranks, world.context_ranks) for world in worlds} == {(4, 2)}


def test_without_degrees_all_ranks_replicate():
    world = World(World.create(Device.cpu).device, 1, 2)
    assert (world.degrees, world.data_rank, world.data_ranks, world.context_rank) == (Degrees(replicate=2), 1, 2, 0)


def test_started_ranks_fit_the_degrees():
    def started(micro_batches: int) -> int:
        run, train = RunConfig(gpus="4", device=Device.cpu), TrainConfig(global_batch_size=micro_batches)
        return ranks_of(Config(run=run, train=train, parallel=ParallelConfig(context="2")))

    assert started(2) == 4
    with pytest.raises(
        ConfigError, match=r"run\.gpus=4 needs a number that 2 divides \(parallel\.context=2 ranks share their rows\)"
    ):
        started(3)
