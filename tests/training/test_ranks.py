"""The ranks of a run before it starts: a command looks at the recipe in one process, with the facts of one rank."""

from __future__ import annotations

from dataclasses import replace

from fxtune.config.root import Config, RunConfig, TrainConfig
from fxtune.distributed.parallel import ParallelConfig
from fxtune.techniques.facts import Facts
from fxtune.training.ranks import facts_on_ranks, of_one_rank, ranks_of

TWO = Config(run=RunConfig(gpus="2"), train=TrainConfig(micro_batch_size=1, global_batch_size=4))


def test_facts_are_those_of_one_of_the_ranks(monkeypatch):
    monkeypatch.setattr("fxtune.training.ranks.ranks_to_start", lambda gpus, *_: int(gpus))
    assert ranks_of(TWO) == 2
    facts = facts_on_ranks(Facts(host_memory=8 << 30), TWO)
    assert facts.host_memory == 4 << 30
    assert facts.degrees.replicate == 2


def test_one_process_divides_nothing():
    divided = replace(TWO, parallel=replace(ParallelConfig(), context=2))
    assert of_one_rank(divided).parallel == ParallelConfig()
    assert divided.parallel.context == 2, "a copy"
