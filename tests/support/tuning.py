"""A tiny recipe with its search context, and fake trials, for tests of `fxtune tune`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.settle.settled import settle
from fxtune.system.machine.facts import MachineFacts
from fxtune.training.builder import RunBuilder
from fxtune.tuning.search_space import SearchContext
from fxtune.tuning.trial import Outcome, TrialResult

QUICKSTART = "+recipe=quickstart"
TINY = [
    QUICKSTART,
    "model.init=random",
    "model.architecture={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 1}",
    "data.sequence_length=256",
]
"""The quickstart with a model whose steps take milliseconds."""
LLAMA = ["+recipe=llama_lora", "train.micro_batch_size=4", "train.global_batch_size=32"]
SPEED = 1000.0
LOSSES = (3.0, 2.9)


@lru_cache
def tiny_config() -> Config:
    return load(TINY)


@lru_cache
def tiny_context() -> SearchContext:
    """The search context of TINY on this machine, with a fake data fingerprint."""
    settled = RunBuilder(tiny_config()).settled
    return SearchContext(settled.facts, "float32", "fingerprint", 64, settled.hf_config)


def h200(overrides: list[str], gib: float = 139.0) -> tuple[Config, SearchContext]:
    """A recipe, and the context of a search on an H200 with an 8B model. It needs neither the GPU nor the model."""
    config = load([*overrides, "model=llama_8b_shape", "model.dtype=bfloat16"])
    machine = MachineFacts(
        device="cuda",
        device_name="NVIDIA H200",
        capability=(9, 0),
        memory=int(gib * 2**30),
        free_memory=int(gib * 2**30),
        host_memory=128 * 2**30,
        cores=16,
        packages={"torch": "2.11.0", "liger-kernel": "0.8.5", "flash-attn-4": "4.0.0b36"},
    )
    settled = settle(config, machine, 1)
    return config, SearchContext(settled.facts, "bfloat16", "fingerprint", hf_config=settled.hf_config)


class FakeTrials:
    """Replaces trial.measure() and starts no process.

    `rules` maps an override to its effect on a trial: a factor of the speed, losses (then the speed doubles), an
    outcome of failure, or an exception to raise. The rule "all" holds for every trial. `now` is the clock of the
    search.
    """

    def __init__(self) -> None:
        self.rules: dict[str, Any] = {}
        self.calls: list[list[str]] = []
        self.seconds = 1.0
        self.waited = 0.0
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def measure(self, overrides: list[str], steps: int, limit: float) -> TrialResult:
        self.calls.append(overrides)
        speed, losses = SPEED, LOSSES
        for rule, effect in self.rules.items():
            same_key = [text for text in overrides if text.startswith(rule.partition("=")[0] + "=")]
            if rule != "all" and same_key[-1:] != [rule]:
                continue
            if isinstance(effect, Outcome):
                self.now += limit if effect is Outcome.hung else 0.0
                return TrialResult(effect, self.seconds, reason="illegal instruction")
            if isinstance(effect, type) and issubclass(effect, BaseException):
                raise effect
            if isinstance(effect, tuple):
                speed, losses = 2 * speed, effect
            else:
                speed *= effect
        return TrialResult(Outcome.measured, self.seconds, speed, 1.5, losses, self.waited)
