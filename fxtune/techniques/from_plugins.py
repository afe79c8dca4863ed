"""Runs the techniques of plugins (docs/plugins.md) as one technique, after the adapters and before recomputation and
compilation, which must see the final layers.

    techniques.plugins.use.noisy_embeddings={alpha: 5}

A plugin's technique answers the same questions as fxtune's techniques (base.py). It must yield evidence: without
evidence it counts as a technique that did not act. Its apply(model, world) gets the Hugging Face model, not a
PreparedModel. It changes this model or returns another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.facts.options import PluginOptions
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel
from fxtune.plugins import TECHNIQUES
from fxtune.techniques.base import Evidence, Technique


@dataclass
class PluginTechniques(PluginOptions, Technique):
    def __post_init__(self) -> None:
        self._made: dict[str, Any] = {}

    def schema(self, name: str) -> type[Technique]:
        """The dataclass of the technique `name`. Raises ConfigError if no plugin has this technique."""
        kind = TECHNIQUES[name]
        if not (dataclasses.is_dataclass(kind) and issubclass(kind, Technique)):
            plugin = TECHNIQUES.added()[name]
            raise ConfigError(
                f"{plugin.file}: the technique `{name}` is no dataclass that derives from fxtune.Technique."
            )
        return kind

    def techniques(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each used technique and the technique, made from its checked options."""
        for name, options in self.use.items():
            if name not in self._made:
                values = {**(options or {}), "enabled": True}
                self._made[name] = OmegaConf.to_object(
                    OmegaConf.merge(OmegaConf.structured(self.schema(name)), values)
                )
            yield name, self._made[name]

    def check(self, facts: Facts) -> Iterator[str]:
        for name, technique in self.techniques():
            yield from (f"use.{name}.{reason}" for reason in technique.check(facts))

    def packages(self, facts: Facts) -> Iterator[str]:
        for _, technique in self.techniques():
            yield from technique.packages(facts)

    def resolve(self, facts: Facts) -> str | None:
        notes = []
        self.enabled = bool(self.use)
        for name, technique in self.techniques():
            if note := technique.resolve(facts):
                notes.append(f"{name}: {note}")
        self.use = {name: dataclasses.asdict(technique) for name, technique in self.techniques()}
        return "; ".join(notes) or None

    def configure(self, hf_config: Any) -> None:
        for _, technique in self.techniques():
            technique.configure(hf_config)

    def apply(self, model: PreparedModel, world: World) -> None:
        for name, technique in self.techniques():
            changed = technique.apply(model.module, world)
            model.module = model.module if changed is None else changed
            if not isinstance(model.module, nn.Module):
                raise ConfigError(f"{TECHNIQUES.added()[name].file}: apply() of `{name}` returns no model.")

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        for name, technique in self.techniques():
            seen = list(technique.verify(model.module, probe))
            yield from seen or [Evidence(name, "evidence that it acts", "verify() yields none", False)]
