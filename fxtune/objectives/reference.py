"""Chooses a preference objective's reference model, and the time at which its log-probabilities are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from fxtune.facts.run import Facts
from fxtune.objectives.base import Objective
from fxtune.objectives.needs import Needs


class Reference(str, Enum):
    auto = "auto"
    base = "base"
    start = "start"
    stored = "stored"

    def describe(self) -> str:
        """A description of the reference for the log."""
        return {
            Reference.auto: "decided when the data is read",
            Reference.base: "the model with its adapters off, in each step",
            Reference.start: "the model as it was at the start, in each step",
            Reference.stored: "the model as it was at the start, its log-probabilities computed once and stored",
        }[self]


@dataclass
class WithReference(Objective):
    """An objective that compares the trained model with its reference."""

    needs: ClassVar[Needs] = Needs(reference=True)
    reference: Reference = Reference.auto
    """The model with which the trained model is compared. `start`: the model at the start of training, with the
    adapter of model.adapter; its log-probabilities are computed in each step. `stored`: the same model; its
    log-probabilities are computed once before the first step and kept beside the tokens. `base`: the model without any
    adapter, computed in each step. `auto`: `stored` for full fine-tuning and for more than one epoch, else `start`."""

    @property
    def forward_passes(self) -> int:
        """The trained model's passes without gradient, and a pass of the reference for each pass of the trained model
        unless the reference is stored."""
        own = super().forward_passes
        return own if self.reference is Reference.stored else 2 * own + 1

    def settle_reference(self, adapters: bool, epochs: float) -> Reference:
        """The reference of a run, with `auto` decided. `adapters`: whether adapters are trained."""
        if self.reference is Reference.auto:
            return Reference.stored if not adapters or epochs > 1 else Reference.start
        return self.reference

    def keeps_start(self, adapters: bool, epochs: float) -> bool:
        return adapters and self.settle_reference(adapters, epochs) is Reference.start

    def refusals(self, facts: Facts) -> Iterator[str]:
        yield from super().refusals(facts)
        lora = facts.techniques.lora
        if not lora.enabled and self.reference not in (Reference.auto, Reference.stored):
            yield (
                f"objective.reference={self.reference.value}: full fine-tuning has no adapters to switch off, and a "
                "second copy of all weights would take too much memory. Set objective.reference=stored (or auto)."
            )
        if lora.enabled and lora.factored and self.reference is Reference.base:
            yield (
                "objective.reference=base: techniques.lora.init moves a part of the base's weights into the adapters, "
                "so training does not start from the model without them. Set objective.reference=start."
            )
