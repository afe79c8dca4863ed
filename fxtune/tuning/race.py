"""The race of a sweep: which configuration runs next and how far, and which ones are stopped.

A run has equal parts, and a rung is a number of parts. A configuration runs to a rung and pauses there. Once all
configurations of its bracket have come to the rung, the best 1/eta go on to the next rung, which is eta times as far.
The others are stopped.

- Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) has one bracket: eight configurations with rungs
  at 1/8, 1/4, 1/2 and 1 cost 2.5 runs.
- Hyperband (Li et al. 2018, arXiv 1603.06560) has several brackets: the first has many configurations and early rungs,
  the last has few configurations, which run to their end. Hyperband suits tasks whose early losses say little about
  the final loss.
- A pruner of Optuna judges each configuration when it comes to a rung, against the earlier losses at that rung.

A race knows nothing of processes and files: it is a function of the reported losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


class EntrantState(str, Enum):
    waiting = "waiting"
    running = "running"
    paused = "paused"
    stopped = "stopped"
    done = "done"
    failed = "failed"


@dataclass(frozen=True)
class Bracket:
    count: int
    """Configurations that begin in the bracket."""
    rungs: tuple[int, ...]
    """In parts of a run, ascending; the last rung is the end of the run."""

    @property
    def cost(self) -> float:
        """The cost of the bracket in parts of a run, if each rung keeps 1/eta."""
        eta = self.rungs[1] / self.rungs[0] if len(self.rungs) > 1 else 1
        before, count, cost = 0, self.count, 0.0
        for rung in self.rungs:
            cost += count * (rung - before)
            before, count = rung, max(1, int(count / eta))
        return cost


@dataclass
class Entrant:
    """One configuration in the race."""

    number: int
    bracket: int
    state: EntrantState = EntrantState.waiting
    losses: dict[int, float] = field(default_factory=dict)
    """Rung -> held-out loss there."""
    reason: str = ""
    """Why the configuration failed."""

    @property
    def reached(self) -> int:
        return max(self.losses, default=0)

    @property
    def loss(self) -> float:
        return self.losses[self.reached] if self.losses else math.inf


def halving(count: int, eta: int, parts: int) -> list[Bracket]:
    """Successive halving of `count` configurations in runs of `parts` parts."""
    return [Bracket(count, _rungs(1, eta, parts))]


def hyperband(eta: int, parts: int) -> list[Bracket]:
    """One round of Hyperband in runs of `parts` parts, a power of eta."""
    s_max = round(math.log(parts, eta))  # s and s_max as in the paper
    return [
        Bracket(math.ceil((s_max + 1) / (s + 1) * eta**s), _rungs(parts // eta**s, eta, parts))
        for s in range(s_max, -1, -1)
    ]


def limited(brackets: Sequence[Bracket], count: int) -> list[Bracket]:
    """The first `count` configurations of `brackets`."""
    shortened = []
    for bracket in brackets:
        if count > 0:
            shortened.append(Bracket(min(bracket.count, count), bracket.rungs))
        count -= bracket.count
    return shortened


def _rungs(first: int, eta: int, parts: int) -> tuple[int, ...]:
    rungs = []
    while first < parts:
        rungs.append(first)
        first *= eta
    return (*rungs, parts)


class Race:
    """A race of `entrants`, in the order of their numbers. The caller adds an entrant when next() says so.

    `prunes`: whether an entrant stops at the rung that it has just reached. None: each rung keeps the best 1/eta.
    """

    def __init__(self, brackets: Sequence[Bracket], eta: int, prunes: Callable[[Entrant], bool] | None = None) -> None:
        self.brackets, self.eta, self.prunes = list(brackets), eta, prunes
        self.entrants: list[Entrant] = []

    @property
    def total(self) -> int:
        return sum(bracket.count for bracket in self.brackets)

    def bracket_of(self, number: int) -> int:
        for index, bracket in enumerate(self.brackets):
            if number < bracket.count:
                return index
            number -= bracket.count
        raise AssertionError("there are no more configurations")

    def limit_rungs(self, bracket: int, count: int) -> None:
        """Keep only the last `count` rungs of a bracket: its runs have only `count` evaluations."""
        self.brackets[bracket] = replace(self.brackets[bracket], rungs=self.brackets[bracket].rungs[-count:])

    def add(self, entrant: Entrant) -> None:
        assert entrant.number == len(self.entrants)
        self.entrants.append(entrant)

    def next(self) -> tuple[Entrant, int] | int | None:
        """What to do next: (an entrant, the rung to run it to); the number of an entrant to draw; or None until the
        next report.

        A pruner judges in the order of arrival, so a configuration runs on until the pruner stops it. Otherwise all
        configurations of a bracket come to a rung before the first goes on. A new bracket begins once the brackets
        before it leave nothing to do.
        """
        ready = [entrant for entrant in self.entrants if entrant.state in (EntrantState.waiting, EntrantState.paused)]
        jobs = [(entrant, rung) for entrant in ready if (rung := self._next_rung(entrant)) is not None]
        if self.prunes is not None:
            jobs.sort(key=lambda job: (-job[0].reached, job[0].number))
        else:
            jobs.sort(key=lambda job: (job[0].bracket, job[1], job[0].number))
        if jobs:
            return jobs[0]
        return len(self.entrants) if len(self.entrants) < self.total else None

    def _next_rung(self, entrant: Entrant) -> int | None:
        """The rung that `entrant` may run to; None if `entrant` must wait for others."""
        rungs = self.brackets[entrant.bracket].rungs
        if entrant.reached and self.prunes is None and self._undecided(entrant.bracket, entrant.reached):
            return None
        return next((rung for rung in rungs if rung > entrant.reached), None)

    def _undecided(self, bracket: int, rung: int) -> bool:
        """Whether some configurations of the bracket have not reached the rung."""
        drawn = [entrant for entrant in self.entrants if entrant.bracket == bracket]
        return len(drawn) < self.brackets[bracket].count or any(
            entrant.reached < rung
            for entrant in drawn
            if entrant.state not in (EntrantState.stopped, EntrantState.failed)
        )

    def report(self, entrant: Entrant, rung: int, loss: float) -> list[Entrant]:
        """`entrant` has come to `rung` with a held-out loss of `loss`. Returns the entrants that this loss stops."""
        entrant.losses[rung] = loss
        last = rung == self.brackets[entrant.bracket].rungs[-1]
        entrant.state = EntrantState.done if last else EntrantState.paused
        if last:
            return []
        if self.prunes is not None:
            return self._stop([entrant]) if self.prunes(entrant) else []
        return self._judge_rung(entrant.bracket, rung)

    def fail(self, entrant: Entrant, reason: str) -> list[Entrant]:
        """`entrant` cannot go on. Returns the entrants that stop, because their rung waited only for `entrant`."""
        entrant.state, entrant.reason = EntrantState.failed, reason
        if self.prunes is not None:
            return []
        rungs = self.brackets[entrant.bracket].rungs
        return [stopped for rung in rungs[:-1] for stopped in self._judge_rung(entrant.bracket, rung)]

    def judge_all(self) -> list[Entrant]:
        """Stop the entrants that the losses so far rule out, and return the stopped entrants. Called after a restart,
        because a killed sweep may have recorded a loss and not the stops that follow from the loss."""
        if self.prunes is not None:
            paused = [entrant for entrant in self.entrants if entrant.state is EntrantState.paused]
            return self._stop([entrant for entrant in paused if self.prunes(entrant)])
        return [
            entrant
            for index, bracket in enumerate(self.brackets)
            for rung in bracket.rungs[:-1]
            for entrant in self._judge_rung(index, rung)
        ]

    def _judge_rung(self, bracket: int, rung: int) -> list[Entrant]:
        """Stop all but the best 1/eta once all entrants of the bracket are at `rung`. Returns the stopped entrants."""
        if rung not in self.brackets[bracket].rungs or self._undecided(bracket, rung):
            return []
        arrived = [entrant for entrant in self.entrants if entrant.bracket == bracket and rung in entrant.losses]
        keep = max(1, self._expected(bracket, rung) // self.eta)
        # By the losses at this rung, not by later losses, so that the verdict after a restart is the same.
        arrived.sort(key=lambda entrant: (_nan_last(entrant.losses[rung]), entrant.number))
        losers = arrived[keep:]
        return self._stop([loser for loser in losers if loser.state is EntrantState.paused and loser.reached == rung])

    def _expected(self, bracket: int, rung: int) -> int:
        """How many configurations of the bracket come to `rung` if none fails."""
        count = self.brackets[bracket].count
        for _ in range(self.brackets[bracket].rungs.index(rung)):
            count = max(1, count // self.eta)
        return count

    def _stop(self, entrants: list[Entrant]) -> list[Entrant]:
        for entrant in entrants:
            entrant.state = EntrantState.stopped
        return entrants

    @property
    def over(self) -> bool:
        ended = (EntrantState.stopped, EntrantState.done, EntrantState.failed)
        return len(self.entrants) == self.total and all(entrant.state in ended for entrant in self.entrants)

    def winner(self) -> Entrant | None:
        """The entrant with the lowest loss at the end of its run; None if no entrant ended its run."""
        return next(iter(self.ranking(EntrantState.done)), None)

    def ranking(self, *states: EntrantState) -> list[Entrant]:
        """The entrants in these states, or all: the farthest first, then the lowest loss; failed entrants last."""
        ranked = [entrant for entrant in self.entrants if not states or entrant.state in states]
        ranked.sort(
            key=lambda entrant: (
                entrant.state is EntrantState.failed,
                -entrant.reached,
                _nan_last(entrant.loss),
                entrant.number,
            )
        )
        return ranked


def _nan_last(loss: float) -> float:
    """A loss to sort by: NaN comes last."""
    return math.inf if math.isnan(loss) else loss
