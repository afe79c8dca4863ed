"""Functions that make bad steps and interrupt a run."""

from __future__ import annotations

import pytest

from fxtune.objectives.language_model import LanguageModel
from fxtune.training import trainer as train


def interrupt_at(config, index, monkeypatch):
    """Run `config` and raise KeyboardInterrupt at step `index`, once."""
    taken, broken = train.Steps.take, []

    def dying(self, step, lr):
        if step.index == index and not broken:
            broken.append(True)
            raise KeyboardInterrupt
        return taken(self, step, lr)

    monkeypatch.setattr(train.Steps, "take", dying)
    with pytest.raises(KeyboardInterrupt):
        train.run(config)


def disturb(monkeypatch, factors: dict[int, float]) -> list[int]:
    """Multiply the loss of these steps (counted from 0).

    Returns a list to which the number of each step is appended.
    """
    real, whole_step, seen = LanguageModel.summed_loss, train.Steps.take, []

    def step(self, step, lr):
        seen.append(step.index)
        outcome = whole_step(self, step, lr)
        seen.append(-1)
        return outcome

    monkeypatch.setattr(train.Steps, "take", step)
    monkeypatch.setattr(
        LanguageModel, "summed_loss", lambda *given: real(*given) * factors.get(seen[-1] if seen else -1, 1.0)
    )
    return seen
