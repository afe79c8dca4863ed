"""The search of `fxtune tune`: from the recipe as it is, one axis at a time, each time from the best so far.

It goes round until a round changes nothing or the time is up, and then measures the two fastest again, if they are near each
other. A point that the forecast or a check rules out, that fails, or whose loss is not the first trial's, is a row with a
verdict and never wins. What lies within the spread of repeated measurements (at least NOISE) is a tie, and of tied points the
one that changes the fewest keys wins: the search never trades the user's recipe for one that is only luckier.

A bigger micro-batch and less recomputation are rivals for the same memory, so what does not fit at the micro-batch of the best
point is tried with the largest one at which it does.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from fxtune import __version__
from fxtune.errors import ConfigError
from fxtune.system import code_digest
from fxtune.tuning import search_space, trial_process
from fxtune.tuning.point import Row, hydra, told
from fxtune.tuning.search_space import AXES, Candidate, Deltas, SearchContext
from fxtune.tuning.trial_process import Cache, Outcome, TrialResult

if TYPE_CHECKING:
    from fxtune.config.root import Config

NOISE = 0.01
"""Speeds that are closer than this are not told apart by one measurement each."""
FAR = 0.2
"""Speeds that are further apart than this are told apart by one measurement each."""
REPEATS = 2
"""Further measurements of the two fastest, where they are nearer."""
TOLERANCE = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 1e-2, "float16": 1e-2}
"""Relative; how far the first step's loss, and the mean of all, may be from the first trial's."""
SINGLE = 5
"""How many times as far any single step's may be: training, most of all of a random model, amplifies how it was rounded."""
LEAST_LIMIT, TIMES = 600.0, 4.0
"""A trial may take this many seconds, or so many times what the first one took where that is more."""
ROUNDS = 3
GIB = 1 << 30
MICRO = "train.micro_batch_size"


class Search:
    """The rows so far and the way to the next one. `rows[0]` is the recipe as it is."""

    def __init__(
        self,
        config: Config,
        overrides: list[str],
        ground: SearchContext,
        names: list[str],
        seconds: float,
        steps: int,
        cache: Cache,
        tell: Callable[[str], None],
    ) -> None:
        self.config, self.overrides, self.ground, self.names, self.steps = config, overrides, ground, names, steps
        self.cache, self.tell, self.seconds, self.deadline = cache, tell, seconds, time.monotonic() + seconds
        self.rows: list[Row] = []
        self.untried: list[str] = []
        """What there was no time for."""
        self.best: Row | None = None
        self._first: dict[str, tuple[float, ...]] = {}

    def go(self) -> None:
        """Search until nothing gets better or the time is up. Afterwards `best` is None if nothing runs."""
        try:
            self._start()
        except _TimeIsUp:
            raise ConfigError(
                f"--minutes {self.seconds / 60:g}: over before the first trial had a figure. Give more, or fewer "
                "--steps."
            ) from None
        for _ in range(ROUNDS if self.best else 0):
            before = self.best
            for name in self.names:
                self._along(name)
            if self.best is before or self.untried:
                break
        try:
            self._repeat()
        except _TimeIsUp:
            self.untried.append("more measurements of the fastest")

    def planned(self) -> Iterator[tuple[str, Row]]:
        """(axis, point) of the first round, as far as it can be told without a trial."""
        self.best = self._row({})
        yield "", self.best
        for name in self.names:
            for deltas in self._points(name):
                if self._known(self._outlook(deltas)) is None:
                    yield name, self._row(deltas)

    def winner(self) -> tuple[Row, str]:
        """The row that wins, and why in a sentence."""
        ranked = sorted((row for row in self.rows if row.speed), key=lambda row: -row.speed)
        spread = max((max(row.speeds) - min(row.speeds)) / row.speed for row in ranked[:2])
        margin = max(spread, NOISE)
        tied = [row for row in ranked if row.speed >= ranked[0].speed * (1 - margin)]
        winner, base = min(tied, key=lambda row: (len(row.deltas), -row.speed)), self.rows[0]
        why = f"{winner.title}: {winner.speed:,.0f} tokens/s"
        if base.speed and winner is not base:
            why += f", {winner.speed / base.speed - 1:+.1%} against the recipe as it is ({base.speed:,.0f})"
        repeated = any(len(row.speeds) > 1 for row in ranked[:2])
        within = (
            f"{margin:.1%}, {'the spread of repeated measurements' if spread > NOISE else 'what is taken for noise'}"
        )
        within += "" if repeated else " (there was no repetition)"
        others = [row.title for row in tied if row is not winner]
        return winner, f"{why}. Within {within}: {'; '.join(others) or 'no other'}" + (
            ". Of tied settings the one that changes the fewest keys wins." if others else "."
        )

    def _start(self) -> None:
        """The recipe as it is, or else the first that runs of those that take less memory."""
        base = self._try({})
        if base.speed:
            self.best = base
            return
        self.tell(f"The recipe as it is gives no figure ({base.verdict}). Looking for settings that do.")
        for deltas in self._smaller():
            row = self._try(deltas)
            if row.speed:
                self.best = row
                return

    def _smaller(self) -> Iterator[Deltas]:
        """From what keeps much to what keeps little: checkpointing that fits, then the same one row at a time."""
        least: Deltas = {MICRO: 1} if "micro_batch" in self.names else {}
        ways = list(search_space.checkpointing(self.config, self.ground)) if "checkpointing" in self.names else []
        fitting = [search_space.fitting(self.config, way, self.ground) if least else way for way in [{}, *ways]]
        for deltas in [*fitting, *({**way, **least} for way in [{}, *ways])]:
            yield search_space.differing(self.config, deltas)

    def _along(self, name: str) -> None:
        """Try each value on one axis and go on from the best of them. Where a step in one direction did not pay, no further one
        in that direction is tried. When the time is up the rest goes by as it would have been tried, so that `untried` is what
        time cut off, and not what had been given up.
        """
        assert self.best is not None
        if name == "workers" and self.best.answers[0].waited < NOISE:
            self.tell(
                f"workers: the loop waits for its data {self.best.answers[0].waited:.1%} of the time, so none is tried"
            )
            return
        given_up: set[str] = set()
        for deltas in list(self._points(name)):
            way = self._way(name, deltas)
            if way in given_up:
                continue
            try:
                row = self._try(deltas)
            except _TimeIsUp:
                self.untried.append(told(deltas))
                continue
            if self._better(row):
                self.best = row
                given_up |= {"fewer rows"} if way == "more rows" else set()
            elif row.speed < self.best.speed:
                given_up.add(way)

    def _way(self, name: str, deltas: Deltas) -> str:
        """In which direction from the best point this one lies, on the axes that have directions."""
        assert self.best is not None
        here, there = (self._at(point).train.micro_batch_size for point in (self.best.deltas, deltas))
        if name == "micro_batch":
            return "more rows" if there > here else "fewer rows"
        if name == "checkpointing" and here == there and self._outlook(deltas).need < self.best.outlook.need:
            return "keeping less"  # which takes more time, and here buys nothing for it
        return str(deltas)

    def _points(self, name: str) -> Iterator[Deltas]:
        """The values of an axis, from the best point."""
        assert self.best is not None
        config = self._at(self.best.deltas)
        for step in AXES[name](config, self.ground):
            if "micro_batch" in self.names and name != "micro_batch":
                step = search_space.fitting(config, step, self.ground)
            deltas = search_space.differing(self.config, {**self.best.deltas, **step})
            if deltas != self.best.deltas:
                yield deltas

    def _better(self, row: Row) -> bool:
        """Faster than the best beyond noise; or as fast, and simpler."""
        assert self.best is not None
        simpler = len(row.deltas) < len(self.best.deltas)
        return row.speed > self.best.speed * (1 - NOISE if simpler else 1 + NOISE)

    def _try(self, deltas: Deltas) -> Row:
        """The row of a point: one that is there, or a new one, measured if it can run. Raises _TimeIsUp."""
        row = self._row(deltas)
        if row.verdict or row.answers:
            return row
        try:
            answer = self._measured(row)
        except BaseException:
            self.rows.remove(row)  # no answer yet
            raise
        row.answers.append(answer)
        if answer.outcome is Outcome.measured:
            self._compare(row, answer)
        else:
            row.verdict = f"{answer.outcome.value}: {answer.reason}"
        where = "from the cache, --again measures anew" if answer.cached else f"{answer.seconds:.0f} s"
        figures = f"{answer.tokens_per_second:,.0f} tokens/s, peak {answer.peak:.2f} GiB"
        self.tell(f"  {row.verdict or figures} ({where})")
        return row

    def _row(self, deltas: Deltas) -> Row:
        """The row that is there for this point, or a new one with what is known before a trial."""
        seen = self._outlook(deltas)
        if (known := self._known(seen)) is not None:
            return known
        row = Row(deltas, seen)
        if seen.refused:
            row.verdict = f"{Outcome.refused.value}: {seen.refused}"
        elif not seen.fits:
            row.verdict = (
                f"left out: needs some {seen.need / GIB:.1f} GiB by the forecast, and "
                f"{self.ground.facts.free_memory / GIB:.1f} are free"
            )
        self.rows.append(row)
        return row

    def _known(self, seen: Candidate) -> Row | None:
        same = (
            row for row in self.rows if (row.outlook.identity, row.outlook.refused) == (seen.identity, seen.refused)
        )
        return next(same, None)

    def _measured(self, row: Row, repeat: int = 0) -> TrialResult:
        """From the cache, or by a trial in what is left of the time. Raises _TimeIsUp."""
        key, title = self._key(row), f"{row.title}{f', again ({repeat} of {REPEATS})' if repeat else ''}"
        if found := self.cache.find(key, repeat):
            self.tell(title)
            return found
        took = [other.seconds for known in self.rows for other in known.answers if other.outcome is Outcome.measured]
        usual = statistics.median(took) if took else 0.0
        left = self.deadline - time.monotonic()
        kept_back = 0 if repeat else len(self._rivals())  # for one more measurement of each
        if left <= usual * (1 + kept_back):
            raise _TimeIsUp
        limit = max(LEAST_LIMIT, TIMES * took[0]) if took else LEAST_LIMIT
        self.tell(f"{title} (forecast {row.outlook.need / GIB:.1f} GiB) ...")
        words = [*self.overrides, *(f"{name}={hydra(value)}" for name, value in row.deltas.items())]
        answer = replace(trial_process.measure(words, self.steps, min(limit, left)), data=self.ground.data)
        if answer.outcome is Outcome.hung and left < limit:
            raise _TimeIsUp  # not its own fault, so no answer
        self.cache.keep(key, answer, repeat)
        return answer

    def _compare(self, row: Row, answer: TrialResult) -> None:
        """Hold the losses against those of the first trial on the same data."""
        first = self._first.setdefault(answer.data, answer.losses)
        tolerance = TOLERANCE[self.ground.precision]
        if len(first) != len(answer.losses) or not first:
            row.verdict = f"another loss: of {len(answer.losses)} steps, and the first trial took {len(first)}"
            return
        pairs = [(statistics.fmean(answer.losses), statistics.fmean(first)), *zip(answer.losses, first, strict=True)]
        mean, begin, *later = (abs(mine - other) / max(abs(other), 1e-12) for mine, other in pairs)
        offs = [mean, begin, *(off / SINGLE for off in later)]
        row.loss_off = math.nan if any(map(math.isnan, offs)) else max(offs)
        if not row.loss_off <= tolerance:
            row.verdict = f"another loss: off by {row.loss_off:.1e}, more than {tolerance:g}"

    def _rivals(self) -> list[Row]:
        """The two fastest, if it takes more than one measurement to tell them apart."""
        fastest = sorted((row for row in self.rows if row.speed), key=lambda row: -row.speed)[:2]
        return fastest if len(fastest) == 2 and fastest[1].speed > fastest[0].speed * (1 - FAR) else []

    def _repeat(self) -> None:
        """Measure rivals again, in turn, so that a machine that grows warm or busy is so for both."""
        rivals = self._rivals()
        for repeat in range(1, REPEATS + 1):
            for row in (row for row in rivals if row.speed):
                answer = self._measured(row, repeat)
                row.answers.append(answer)
                if answer.outcome is not Outcome.measured:
                    row.verdict = f"not each time; {answer.outcome.value}: {answer.reason}"
                self.tell(f"  {row.verdict or f'{answer.tokens_per_second:,.0f} tokens/s'}")

    def _outlook(self, deltas: Deltas) -> Candidate:
        return search_space.outlook(self._at(deltas), self.ground)

    def _at(self, deltas: Deltas) -> Config:
        return search_space.applied(self.config, deltas)

    def _key(self, row: Row) -> dict[str, Any]:
        """All that a trial's answer depends on."""
        facts, config = self.ground.facts, self.config
        model = {
            name: value for name, value in facts.model.items() if name not in ("_name_or_path", "transformers_version")
        }
        return {
            "code": f"{__version__} {code_digest.digest()}",
            "model": model,
            "card": [facts.device_name, facts.capability, round(facts.memory / GIB, 1), facts.cores],
            "packages": {**facts.packages, "python": sys.version.split()[0]},
            "data": [facts.packing, facts.sequence_length, facts.rows, self.ground.document],
            "run": [
                facts.dtype,
                facts.deterministic,
                config.train.global_batch_size,
                asdict(config.optimizer),
                self.steps,
                trial_process.WARM_UP,
            ],
            "point": row.outlook.identity,
        }


class _TimeIsUp(Exception):
    pass
