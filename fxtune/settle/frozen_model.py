"""The frozen model of an objective, such as the teacher of distillation. It gets the rows of the trained model, and
runs with the same attention, kernels and precision, without adapters."""

from __future__ import annotations

from dataclasses import replace

from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.objectives.causal_lm import CausalLM
from fxtune.settle.settled import Settled, settle

KEPT = ("attention", "precision", "liger", "apex", "compile")
"""The techniques that also act on a frozen model."""


def settle_frozen_model(config: Config, facts: Facts) -> Settled | None:
    """The frozen model of the objective of `config`, with its techniques decided; None if there is none. `facts`: the
    facts of the trained model.

    Raises ConfigError if the model cannot run with the rows of `config`, and the errors of load_config().
    """
    model = config.objective.frozen_model(config.model)
    if model is None:
        return None
    off = {
        name: replace(technique, enabled=False) for name, technique in config.techniques.enabled() if name not in KEPT
    }
    alone = replace(config, model=model, objective=CausalLM(), techniques=replace(config.techniques, **off))
    settled = settle(alone, facts, facts.degrees.ranks, checks=False)
    reasons = [
        f"{model.key}={model.path}: techniques.{name}.{reason}"
        for name, technique in settled.techniques.enabled()
        for reason in technique.check(settled.facts)
    ]
    if reasons:
        raise ConfigError("\n".join(reasons))
    return settled
