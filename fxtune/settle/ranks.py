"""Decides how many ranks a run has and how they share its work. Training and the commands that only look at a recipe
take the same decision. The commands do so in one process, before ranks exist.

`run.gpus` gives the number of ranks, `parallel` gives their degrees. If both leave a choice, the forecast of memory
decides. Each rank has a copy of the weights if a copy fits a card; otherwise weights are divided. Rows are divided
only if no card can hold a step with whole rows.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from fxtune.config.root import Config
from fxtune.distributed.launch import ranks_here, require_equal_parts
from fxtune.distributed.parallel import AUTO, Degrees, agrees, decide
from fxtune.distributed.ranks import process_rank
from fxtune.distributed.world import Device, World
from fxtune.facts.run import Facts
from fxtune.models.load import load_config
from fxtune.plugins import load_all
from fxtune.settle.degrees import choose, fits, memory_need, possible
from fxtune.settle.refusals import refusals
from fxtune.settle.rows import decide_rows
from fxtune.system.terminal.units import GIB

SHORT = 8192
"""Micro-batches with at most this many tokens fit any card, so their rows need not be divided."""


def ranks_of(config: Config) -> int:
    """How many ranks `fxtune` starts for a run of `config` on this machine; 1 in a process that is a rank. If the
    forecast has to choose, another process collects the facts for it: in this process CUDA would keep GPU memory.

    Raises ConfigError, HardwareError, and the errors of load_config().
    """
    counts = open_counts(config)
    return counts[0] if len(counts) == 1 else share(config, _facts_of_another_process(config), counts)[0].ranks


def open_counts(config: Config) -> list[int]:
    """The numbers of ranks among which the forecast chooses for a run on this machine, the largest first. One number
    if there is no choice."""
    if process_rank().size > 1:
        return [1]
    counts = ranks_here(config.run.gpus, config.run.device is Device.cpu)
    if len(counts) == 1:
        has_card = config.run.device is not Device.cpu and torch.cuda.is_available()
        require_possible(config, counts[0], has_card, f"run.gpus={counts[0]}")
        return counts
    most = next((count for count in counts if ways(config, count, cut=False)), counts[0])
    short = config.train.micro_batch_size * config.data.sequence_length <= SHORT
    return [most] if most == counts[0] or short or config.parallel.context != AUTO else counts


def require_possible(config: Config, ranks: int, cuda: bool, subject: str = "") -> None:
    """Raise ConfigError if `ranks` ranks cannot share a step of `config`. `cuda`: whether the ranks have cards;
    `subject`: the key that gave their number, for the message."""
    if not ways(config, ranks, cut=cuda):
        require_equal_parts(decide(config.parallel, ranks), config.train.micro_batches, subject)


def ways(config: Config, ranks: int, cut: bool) -> list[Degrees]:
    """The degrees that divide a step and that `config.parallel` allows for `ranks` ranks, the least traffic first.
    `cut`: whether rows may be divided if the config leaves this open."""
    return [
        degrees
        for degrees in possible(ranks)
        if agrees(config.parallel, degrees)
        and not config.train.micro_batches % degrees.data_ranks
        and (cut or degrees.context == 1 or config.parallel.context != AUTO)
    ]


def share(config: Config, facts: Facts, counts: Sequence[int]) -> tuple[Degrees, str]:
    """Choose how the ranks of a run of `config` share its work. Returns the degrees, and a line about them with the
    reason.

    `counts`: the possible numbers of ranks, the largest first. `facts`: the facts of this process. If no degrees
    divide a step, the returned degrees do not divide it, and require_equal_parts() refuses them. Ranks on one CPU
    share its memory, so nothing is divided on a CPU unless the config asks for it.
    """
    techniques, parallel = config.techniques, config.parallel
    facts = replace(facts, techniques=techniques)
    if facts.device != "cuda" or max(counts) == 1:
        chosen = decide(parallel, counts[0])
        return chosen, str(chosen)

    def can(degrees: Degrees) -> bool:
        shared = replace(facts, degrees=degrees)
        return not [*techniques.sharing_refusals(shared), *refusals(config, shared)]

    uncut = replace(parallel, context="1") if parallel.context == AUTO else parallel
    whole = [degrees for count in counts for degrees in possible(count) if agrees(uncut, degrees) and can(degrees)]
    whole_rows_fit = any(fits(techniques, facts, degrees) for degrees in whole)
    candidates = [
        degrees for count in counts for degrees in ways(config, count, cut=not whole_rows_fit) if can(degrees)
    ]
    if not candidates:
        chosen = decide(parallel, counts[0])
        return chosen, str(chosen)
    chosen, need = choose(techniques, facts, candidates)
    why = f"{need.device / GIB:.1f} of {facts.free_memory / GIB:.1f} GiB a card by the forecast"
    if chosen != candidates[0]:
        why += f"; {candidates[0]} would need {memory_need(techniques, facts, candidates[0]).device / GIB:.1f}"
    return chosen, f"{chosen} ({why})"


def _facts_of_another_process(config: Config) -> Facts:
    # The config may hold a plugin's objective. The other process finds its class only after it has loaded plugins.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), load_all) as pool:
        return pool.submit(_facts_here, config).result()


def _facts_here(config: Config) -> Facts:
    machine = World.create(config.run.device, config.run.memory_gib).facts(config.run.strict)
    return decide_rows(config, machine, load_config(config.model, config.objective.needs.head))[2]
