"""Collects the reasons for which a run is refused before it reads data or weights. Each part of the recipe yields its
own reasons. Techniques yield their reasons in Technique.check, divided weights in techniques/divided_weights.py."""

from __future__ import annotations

from collections.abc import Iterator

from fxtune.config.root import Config
from fxtune.distributed.parallel import Compression, Degrees
from fxtune.estimate.memory import HOST_SHARE, forecast
from fxtune.facts.recomputation import RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.load import load_tokenizer
from fxtune.optim import config as optimizer_config
from fxtune.settle import freed_gradients, images, rows
from fxtune.system.terminal.units import GIB

SHOWN = 3
"""How many tokens a message names."""


def refusals(config: Config, facts: Facts) -> Iterator[str]:
    """Yield each reason, with its key, why `config` cannot run under `facts`."""
    yield from optimizer_config.refusals(config.optimizer, facts)
    yield from config.objective.refusals(facts)
    yield from _frozen_model(config)
    yield from _host_moments(facts)
    yield from _noise_scale(config, facts.degrees)
    yield from freed_gradients.refusals(config, facts)
    yield from rows.refusals(config, facts)
    yield from images.stored_refusals(config, facts)


def _host_moments(facts: Facts) -> Iterator[str]:
    """Yield why the host's memory cannot hold the moments of optimizer.offload."""
    if not facts.optimizer.slots or facts.device != "cuda":
        return
    moments, host = forecast(facts, RecomputePlan()).host_moments / GIB, facts.host_memory / GIB
    if moments > HOST_SHARE * host:
        smaller = ", or optimizer.moments to bfloat16" * (facts.optimizer.size == 4)
        yield (
            f"optimizer.offload: the moments of a rank take {moments:.1f} GiB. They may fill {HOST_SHARE:.0%} of the "
            f"host's memory, which is {host:.1f} GiB for each rank. Set it to false{smaller}, or use a larger host."
        )


def _noise_scale(config: Config, degrees: Degrees) -> Iterator[str]:
    """Yield each reason why these ranks cannot measure train.noise_scale, with what to change."""
    if not config.train.noise_scale:
        return
    off = "or set train.noise_scale=false."
    if degrees.shard > 1 or degrees.context > 1:
        yield (
            f"train.noise_scale: it compares gradients of whole rows and whole weights, and this run has {degrees}. "
            f"Set parallel.shard=1 and parallel.context=1, {off}"
        )
    parallel = config.parallel
    if degrees.ranks > 1 and (parallel.average_every > 1 or parallel.compression is Compression.powersgd):
        yield (
            "train.noise_scale: with parallel.average_every and parallel.compression=powersgd no rank sees the sum of "
            f"the gradients. Set them to their defaults, {off}"
        )


def _frozen_model(config: Config) -> Iterator[str]:
    """Yield why the frozen model of the objective does not have the tokens of the trained model. Only ids count:
    families pad their tables of tokens differently, and Qwen2.5 has 151,936 rows in small models and 152,064 in large
    ones."""
    model = config.objective.frozen_model(config.model)
    if model is None or None in (
        each.tokenizer or each.path for each in (config.model, model)
    ):  # a plan has no tokens
        return
    own, other = (load_tokenizer(each).get_vocab() for each in (config.model, model))
    different = sorted((number, token) for token, number in own.items() if other.get(token) != number)
    if different:
        shown = ", ".join(
            f"{token!r} has the id {number}, there {other.get(token, 'none')}" for number, token in different[:SHOWN]
        )
        yield (
            f"{model.key}={model.path}: its tokens are not the tokens of the trained model. {len(different):,} of "
            f"{len(own):,} tokens differ ({shown}). Use a teacher with the same tokenizer."
        )
