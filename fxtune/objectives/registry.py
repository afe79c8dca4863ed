"""The objectives by name, fxtune's own and those of plugins: dataclasses that derive from Objective (base.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from fxtune.errors import ConfigError
from fxtune.plugins import Registry, guarded_class, place_of

OBJECTIVES: Registry[type] = Registry(
    "objective",
    causal_lm="fxtune.objectives.causal_lm:CausalLM",
    classification="fxtune.objectives.classification:Classification",
    embedding="fxtune.objectives.embedding:Embedding",
    distillation="fxtune.objectives.distillation:Distillation",
    dpo="fxtune.objectives.dpo:DPO",
    ipo="fxtune.objectives.ipo:IPO",
    kto="fxtune.objectives.kto:KTO",
    orpo="fxtune.objectives.orpo:ORPO",
    ranking="fxtune.objectives.ranking:Ranking",
    policy="fxtune.objectives.policy:Policy",
    reward="fxtune.objectives.reward:Reward",
    simpo="fxtune.objectives.simpo:SimPO",
)


def objective(name: str) -> Callable[[Any], Any]:
    """Register a dataclass that derives from fxtune.Objective: `objective=NAME`. Its fields are the options."""

    def register(kind: Any) -> Any:
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise ConfigError(
                f"{place_of(kind)}: the objective `{name}` is no dataclass that derives from fxtune.Objective."
            )
        return OBJECTIVES.add(name, guarded_class(kind))

    return register
