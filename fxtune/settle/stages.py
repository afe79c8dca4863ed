"""The stages of a run's decisions. settle() leaves some decisions to the data, the built model and the run itself.

A stage is frozen: each decision makes a new stage. So `Settled` remains what settle() returned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fxtune.config.root import Config
from fxtune.facts.run import Facts
from fxtune.settle import determinism
from fxtune.settle.settled import Settled, renewed
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.withdrawal import Withdrawal


@dataclass(frozen=True)
class Stage:
    """The recipe, techniques and facts that are valid now, and a line on each decision so far, with the reason."""

    config: Config
    techniques: Pipeline
    facts: Facts
    notes: tuple[str, ...]
    withdrawn: tuple[Withdrawal, ...] = ()
    """The techniques and options that turned out not to act on the built model."""

    @classmethod
    def first(cls, settled: Settled) -> Stage:
        return cls(settled.config, settled.techniques, settled.facts, settled.notes)

    def decided(self, notes: Iterable[str], **groups: Any) -> Stage:
        """The next stage, with these groups of the config and with `notes` about them."""
        return replace(self, config=replace(self.config, **groups), notes=(*self.notes, *notes))

    def with_images(self, features: int, decides: bool = True) -> Stage:
        """The stage for data in which a row has at most `features` image features. `decides`: whether to decide each
        `auto` again, because images take memory."""
        facts = replace(self.facts, image_features=features)
        if features == self.facts.image_features or not decides:
            return replace(self, facts=facts)
        facts = replace(facts, techniques=self.config.techniques)
        techniques, decided = self.config.techniques.possible(facts)[0].decided(facts)
        new = [line for line in decided if line not in self.notes]
        return replace(self, notes=renewed(self.notes, new), facts=facts).with_techniques(techniques)

    def with_techniques(self, techniques: Pipeline) -> Stage:
        return replace(self, techniques=techniques, facts=replace(self.facts, techniques=techniques))

    def without(self, found: Withdrawal) -> Stage:
        """The stage in which the technique or option of `found` is off."""
        less = self.with_techniques(found.applied_to(self.techniques))
        return replace(less, notes=(*self.notes, found.line()), withdrawn=(*self.withdrawn, found))

    def without_determinism(self, operator: str) -> Stage:
        """The stage with the fastest kernels, because torch's `operator` has no deterministic kernel."""
        line = determinism.line(f"torch has no deterministic kernel for {operator}")
        return replace(self, facts=replace(self.facts, deterministic=False), notes=renewed(self.notes, [line]))
