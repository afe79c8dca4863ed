"""A point of the search of `fxtune tune`: what it changes in the recipe, what is known of it, and how that is said."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Optional

from fxtune.tuning.search_space import Candidate, Deltas
from fxtune.tuning.trial_process import Outcome, TrialResult


@dataclass
class Row:
    """A point of the search and what is known of it."""

    deltas: Deltas
    """What it changes in the recipe."""
    outlook: Candidate
    answers: list[TrialResult] = field(default_factory=list)
    verdict: str = ""
    """In words, where it did not run, or may not win."""
    loss_off: Optional[float] = None
    """The relative distance from the first trial's losses, as search.py takes it."""

    @property
    def speeds(self) -> list[float]:
        """Tokens a second, of each measurement."""
        return [answer.tokens_per_second for answer in self.answers if answer.outcome is Outcome.measured]

    @property
    def speed(self) -> float:
        """Their median; 0 where it may not win."""
        return statistics.median(self.speeds) if self.speeds and not self.verdict else 0.0

    @property
    def title(self) -> str:
        return told(self.deltas) or "the recipe as it is"


def told(deltas: Deltas) -> str:
    """What a point changes, in a few words."""
    return ", ".join(f"{key.partition('.')[2]}={hydra(value)}" for key, value in deltas.items())


def hydra(value: Any) -> str:
    """A plain value as Hydra's command line takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(hydra, value))}]"
    return f"'{value}'" if value in ("on", "off") else "null" if value is None else str(value)
