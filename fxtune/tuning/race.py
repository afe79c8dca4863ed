"""The race of a sweep: which configuration runs next and how far, and which ones are stopped.

A configuration runs to a rung, a share of its run, and is paused there. Once all of its bracket have come as far, the
best 1/eta of them go on to the next rung, which is eta times as far, and the others are stopped.

- Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943) has one bracket: eight configurations with rungs
  at 1/8, 1/4, 1/2 and 1 cost 2.5 runs.
- Hyperband (Li et al. 2018, arXiv 1603.06560) has several, from many configurations that are judged early to few that
  run to their end, for tasks where the first losses say little about the last.
- With a pruner of Optuna each configuration is judged as soon as it comes to a rung, by those that came before.

A race knows nothing of processes and files: it is a function of the losses that were reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum


class State(str, Enum):
    waiting = "waiting"
    running = "running"
    paused = "paused"
    stopped = "stopped"
    done = "done"
    failed = "failed"


@dataclass(frozen=True)
class Bracket:
    count: int
    """Configurations that begin in it."""
    rungs: tuple[int, ...]
    """Where they are judged, in parts of a run; the last one is the end of the run."""

    @property
    def cost(self) -> float:
        """The cost of the race in whole runs, if each rung keeps 1/eta."""
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
    state: State = State.waiting
    losses: dict[int, float] = field(default_factory=dict)
    """Rung -> held-out loss there."""
    reason: str = ""
    """Why it failed."""

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
    most = round(math.log(parts, eta))
    return [
        Bracket(math.ceil((most + 1) / (early + 1) * eta**early), _rungs(parts // eta**early, eta, parts))
        for early in range(most, -1, -1)
    ]


def limited(brackets: Sequence[Bracket], count: int) -> list[Bracket]:
    """The first `count` configurations of `brackets`."""
    found = []
    for bracket in brackets:
        if count > 0:
            found.append(Bracket(min(bracket.count, count), bracket.rungs))
        count -= bracket.count
    return found


def _rungs(first: int, eta: int, parts: int) -> tuple[int, ...]:
    rungs = []
    while first < parts:
        rungs.append(first)
        first *= eta
    return (*rungs, parts)


class Race:
    """`entrants` in the order of their numbers; the caller adds one when next() says so.

    `prunes`: judges one entrant at its last rung by those that came before; None: rungs keep the best 1/eta.
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
        """Keep only the last `count` rungs of a bracket, whose runs have `count` evaluations."""
        one = self.brackets[bracket]
        self.brackets[bracket] = Bracket(one.count, one.rungs[-count:])

    def add(self, entrant: Entrant) -> None:
        assert entrant.number == len(self.entrants)
        self.entrants.append(entrant)

    def next(self) -> tuple[Entrant, int] | int | None:
        """What to do next: (an entrant, the rung to run it to); the number of an entrant that is to be drawn; or None
        until another report.

        A pruner judges in the order of arrival, so one configuration runs on as long as it may. Otherwise all of a
        bracket come to a rung before the first goes on. A new bracket begins once there is nothing left to do in the
        ones before.
        """
        ready = [one for one in self.entrants if one.state in (State.waiting, State.paused)]
        running = [(self._next_rung(one), one) for one in ready]
        order = sorted(running, key=lambda pair: (pair[1].bracket, pair[0] or 0, pair[1].number))
        if self.prunes is not None:
            order.sort(key=lambda pair: (-pair[1].reached, pair[1].number))
        for rung, one in order:
            if rung is not None:
                return one, rung
        return len(self.entrants) if len(self.entrants) < self.total else None

    def _next_rung(self, entrant: Entrant) -> int | None:
        """The rung that `entrant` may run to; None if it must wait for others."""
        rungs = self.brackets[entrant.bracket].rungs
        if entrant.reached and self.prunes is None and self._undecided(entrant.bracket, entrant.reached):
            return None
        return next((rung for rung in rungs if rung > entrant.reached), None)

    def _undecided(self, bracket: int, rung: int) -> bool:
        """Whether configurations of the bracket have yet to come to the rung."""
        drawn = [one for one in self.entrants if one.bracket == bracket]
        return len(drawn) < self.brackets[bracket].count or any(
            one.reached < rung for one in drawn if one.state not in (State.stopped, State.failed)
        )

    def reach(self, entrant: Entrant, rung: int, loss: float) -> list[Entrant]:
        """`entrant` has come to `rung` with a held-out loss of `loss`. Returns those that are stopped now."""
        entrant.losses[rung] = loss
        last = rung == self.brackets[entrant.bracket].rungs[-1]
        entrant.state = State.done if last else State.paused
        if last:
            return []
        if self.prunes is not None:
            return self._stop([entrant]) if self.prunes(entrant) else []
        return self._judge(entrant.bracket, rung)

    def fail(self, entrant: Entrant, reason: str) -> list[Entrant]:
        """`entrant` cannot go on. Returns those that are stopped now, because their rung no longer waits for it."""
        entrant.state, entrant.reason = State.failed, reason
        if self.prunes is not None:
            return []
        rungs = self.brackets[entrant.bracket].rungs
        return [one for rung in rungs[:-1] for one in self._judge(entrant.bracket, rung)]

    def judge(self) -> list[Entrant]:
        """Stop the configurations that the losses so far rule out. After a restart this completes what was being
        decided when the sweep was killed."""
        if self.prunes is not None:
            paused = [one for one in self.entrants if one.state is State.paused]
            return self._stop([one for one in paused if self.prunes(one)])
        return [
            one
            for index, bracket in enumerate(self.brackets)
            for rung in bracket.rungs[:-1]
            for one in self._judge(index, rung)
        ]

    def _judge(self, bracket: int, rung: int) -> list[Entrant]:
        """Stop all but the best 1/eta of those that came to `rung`, once all have."""
        if rung not in self.brackets[bracket].rungs or self._undecided(bracket, rung):
            return []
        came = [one for one in self.entrants if one.bracket == bracket and rung in one.losses]
        keep = max(1, self._begin(bracket, rung) // self.eta)
        # The losses at this rung, not later ones: after a restart the verdict is the same.
        came.sort(key=lambda one: (_last(one.losses[rung]), one.number))
        return self._stop([one for one in came[keep:] if one.state is State.paused and one.reached == rung])

    def _begin(self, bracket: int, rung: int) -> int:
        """How many configurations of the bracket were to come to `rung`."""
        count = self.brackets[bracket].count
        for other in self.brackets[bracket].rungs:
            if other == rung:
                break
            count = max(1, count // self.eta)
        return count

    def _stop(self, entrants: list[Entrant]) -> list[Entrant]:
        for one in entrants:
            one.state = State.stopped
        return entrants

    @property
    def over(self) -> bool:
        ended = (State.stopped, State.done, State.failed)
        return len(self.entrants) == self.total and all(one.state in ended for one in self.entrants)

    def winner(self) -> Entrant | None:
        """The best of those that ran to their end; None if none did."""
        return next(iter(self.ranking(State.done)), None)

    def ranking(self, *states: State) -> list[Entrant]:
        """The entrants, of these states if any are given: the farthest first, then the lowest loss."""
        found: Iterator[Entrant] = (one for one in self.entrants if not states or one.state in states)
        return sorted(found, key=lambda one: (one.state is State.failed, -one.reached, _last(one.loss), one.number))


def _last(loss: float) -> float:
    """A loss to sort by: one that is not a number comes last."""
    return math.inf if math.isnan(loss) else loss
