"""The ranks that a recipe's run will have, before they are started. Commands that look at a recipe in one process use
this."""

from __future__ import annotations

from dataclasses import replace

from fxtune.config.root import Config
from fxtune.distributed.launch import ranks_to_start
from fxtune.distributed.parallel import ParallelConfig, decide
from fxtune.techniques.facts import Facts


def ranks_of(config: Config) -> int:
    """How many ranks `fxtune` starts for a run of `config` on this machine. Raises as ranks_to_start()."""
    micro_batches = config.train.global_batch_size // config.train.micro_batch_size
    return ranks_to_start(config.run.gpus, config.run.device.value == "cpu", micro_batches, config.parallel)


def of_one_rank(config: Config) -> Config:
    """`config` for a process that looks at it alone: `parallel` divides nothing."""
    return replace(config, parallel=ParallelConfig())


def facts_on_ranks(facts: Facts, config: Config) -> Facts:
    """The facts that one of these ranks will have. `facts`: those of this process alone. Raises as ranks_of()."""
    ranks = ranks_of(config)
    return replace(facts, degrees=decide(config.parallel, ranks), host_memory=facts.host_memory // ranks)
