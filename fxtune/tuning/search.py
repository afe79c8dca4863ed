"""The search of `fxtune tune`: coordinate descent, one axis at a time, that starts from the recipe as it is.

The axes are repeated until a round changes nothing or the time is up. Then the two fastest candidates are measured
again if they are close. A candidate gets a verdict and cannot win if a check or the memory forecast rules it out, if
it fails, or if its losses differ from the losses of the first trial. If speeds differ by no more than the spread of
repeated measurements (at least NOISE), the candidate with the fewest changed keys wins. So noise alone never replaces
the recipe.

The search takes a few dozen trials of minutes each. A sampler such as Optuna's needs many more.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fxtune import __version__
from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.system.files import code_digest
from fxtune.system.terminal.units import GIB
from fxtune.tuning import search_space, trial
from fxtune.tuning.search_space import AXES, MICRO_BATCH, Candidate, Deltas, SearchContext, hydra_value
from fxtune.tuning.trial import Outcome, TrialCache, TrialResult

NOISE = 0.01
"""Relative difference of two speeds that may be noise."""
CLEAR = 0.2
"""If two speeds differ by this share, one measurement of each speed is enough."""
REPEATS = 2
"""Further measurements of the two fastest candidates, if their speeds are closer than CLEAR."""
TOLERANCE = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 1e-2, "float16": 1e-2}
"""The first step's loss and the mean loss may differ from the first trial's by this share."""
STEP_TOLERANCE = 5
"""The losses of later steps may differ by this many times TOLERANCE, because training amplifies rounding errors."""
MIN_LIMIT, LIMIT_FACTOR = 600.0, 4.0
"""A trial's time limit: MIN_LIMIT seconds, or LIMIT_FACTOR times the first trial, whichever is longer."""
ROUNDS = 3


class _TimeIsUp(Exception):
    pass


@dataclass
class Search:
    """A search in progress. `candidates[0]` is the recipe as it is; the search continues from `best`."""

    config: Config
    overrides: list[str]
    context: SearchContext
    axes: list[str]
    seconds: float
    steps: int
    cache: TrialCache
    tell: Callable[[str], None]
    candidates: list[Candidate] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    best: Candidate = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def run(self) -> None:
        """Search until nothing improves or the time is up. Afterwards `best.speed` is 0 if no candidate runs."""
        try:
            self._find_start()
        except _TimeIsUp:
            raise ConfigError(
                f"--minutes {self.seconds / 60:g}: the time was up before the first trial ended. Give more --minutes "
                "or fewer --steps."
            ) from None
        for _ in range(ROUNDS if self.best.speed else 0):
            before = self.best
            for axis in self.axes:
                self._search_axis(axis)
            if self.best is before or self.untried:
                break
        try:
            self._repeat()
        except _TimeIsUp:
            self.untried.append("more measurements of the fastest")

    def planned(self) -> Iterator[tuple[str, Candidate]]:
        """Yield (axis, candidate) for each candidate of the first round that is known before a trial."""
        self.best, _ = self._add({})
        yield "", self.best
        for axis in self.axes:
            for deltas in self._values(axis):
                candidate, new = self._add(deltas)
                if new:
                    yield axis, candidate

    def winner(self) -> tuple[Candidate, str]:
        """The winner, and the reason in a sentence."""
        ranked = self._ranked()
        fastest = ranked[:2]
        spread = max((max(candidate.speeds) - min(candidate.speeds)) / candidate.speed for candidate in fastest)
        margin = max(spread, NOISE)
        tied = [candidate for candidate in ranked if candidate.speed >= ranked[0].speed * (1 - margin)]
        winner = min(tied, key=lambda candidate: (len(candidate.deltas), -candidate.speed))
        base = self.candidates[0]
        why = f"{winner.title}: {winner.speed:,.0f} tokens/s"
        if base.speed and winner is not base:
            why += f", {winner.speed / base.speed - 1:+.1%} against the recipe as it is ({base.speed:,.0f})"
        kind = "the spread of repeated measurements" if spread > NOISE else "the assumed noise"
        if all(len(candidate.speeds) == 1 for candidate in fastest):
            kind += ", as nothing was measured twice"
        others = "; ".join(candidate.title for candidate in tied if candidate is not winner)
        rule = ". The candidate that changes the fewest keys wins" if others else ""
        return winner, f"{why}. Tied with it, within {margin:.1%} ({kind}): {others or 'none'}{rule}."

    def _find_start(self) -> None:
        """Start with the recipe as it is or, if it does not run, the first setting that runs with less memory."""
        self.best = base = self._try({})
        if base.speed:
            return
        self.tell(f"The recipe as it is gives no measurement ({base.verdict}). Looking for settings that do.")
        policies = list(AXES["checkpointing"](self.config, self.context)) if "checkpointing" in self.axes else []
        settings: list[Deltas] = [{}, *policies]
        if "micro_batch" in self.axes:
            shrunk = [search_space.shrink_to_fit(self.config, deltas, self.context) for deltas in settings]
            settings = [*shrunk, *({**deltas, MICRO_BATCH: 1} for deltas in settings)]
        for deltas in settings:
            candidate = self._try(search_space.changed_keys(self.config, deltas))
            if candidate.speed:
                self.best = candidate
                return

    def _search_axis(self, axis: str) -> None:
        """Try the values of one axis, and make the best candidate `best`. A direction is given up after a slower
        candidate.

        When the time is up, the loop goes on without trials, so that `untried` lists all candidates that got none.
        """
        if axis == "workers" and (waited := self.best.results[0].waited) < NOISE:
            self.tell(f"workers: the loop waits for data {waited:.1%} of the time, so no other number is tried")
            return
        given_up: set[str] = set()
        for deltas in list(self._values(axis)):
            direction = self._direction(axis, deltas)
            if direction in given_up:
                continue
            try:
                candidate = self._try(deltas)
            except _TimeIsUp:
                self.untried.append(Candidate(deltas, {}).title)
                continue
            # A candidate with fewer changes than the best must be as fast. Others must be faster by more than noise.
            simpler = len(candidate.deltas) < len(self.best.deltas)
            if candidate.speed > self.best.speed * (1 - NOISE if simpler else 1 + NOISE):
                self.best = candidate
                given_up |= {"fewer rows"} if direction == "more rows" else set()
            elif candidate.speed < self.best.speed:
                given_up.add(direction)

    def _values(self, axis: str) -> Iterator[Deltas]:
        """For each value of an axis, yield the best candidate's deltas with this value."""
        best = self.best.deltas
        for value in AXES[axis](search_space.apply_deltas(self.config, best), self.context):
            deltas = {**best, **value}
            if "micro_batch" in self.axes and axis != "micro_batch":
                deltas = search_space.shrink_to_fit(self.config, deltas, self.context)
            deltas = search_space.changed_keys(self.config, deltas)
            if deltas != best:
                yield deltas

    def _direction(self, axis: str, deltas: Deltas) -> str:
        """The direction from the best candidate to `deltas`; the deltas as text if the axis has no directions."""
        present = self.config.train.micro_batch_size
        here, there = (point.get(MICRO_BATCH, present) for point in (self.best.deltas, deltas))
        if axis == "micro_batch":
            return "more rows" if there > here else "fewer rows"
        need = search_space.candidate(self.config, deltas, self.context).need
        if axis == "checkpointing" and here == there and need < self.best.need:
            return "less memory"  # recomputation takes time, and the micro-batch is no larger for it
        return str(deltas)

    def _add(self, deltas: Deltas) -> tuple[Candidate, bool]:
        """(the candidate of these deltas, True), or (the earlier candidate of the same setting, False)."""
        new = search_space.candidate(self.config, deltas, self.context)
        for earlier in self.candidates:
            if earlier.identity == new.identity:
                return earlier, False
        self.candidates.append(new)
        return new, True

    def _try(self, deltas: Deltas) -> Candidate:
        """The candidate of these deltas, measured if it can run. Raises _TimeIsUp."""
        candidate, _ = self._add(deltas)
        if candidate.verdict or candidate.results:
            return candidate
        try:
            result = self._measure(candidate)
        except BaseException:
            self.candidates.remove(candidate)  # it has no result
            raise
        if result.outcome is Outcome.measured:
            self._compare_losses(candidate, result)
        else:
            candidate.verdict = f"{result.outcome.value}: {result.reason}"
        measured = f"{result.tokens_per_second:,.0f} tokens/s, peak {result.peak:.2f} GiB"
        source = "from the cache, --again measures anew" if result.cached else f"{result.seconds:.0f} s"
        self.tell(f"  {candidate.verdict or measured} ({source})")
        return candidate

    def _measure(self, candidate: Candidate, repeat: int = 0) -> TrialResult:
        """A result from the cache, or from a trial in the time that is left. Raises _TimeIsUp."""
        key = self._cache_key(candidate, repeat)
        title = f"{candidate.title}, again ({repeat} of {REPEATS})" if repeat else candidate.title
        if cached := self.cache.find(key):
            self.tell(title)
            candidate.results.append(cached)
            return cached
        times = [result.seconds for result in self._measured()]
        reserved = 0 if repeat else len(self._rivals())  # one more trial for each rival
        left = self.deadline - time.monotonic()
        if left <= (statistics.median(times) if times else 0.0) * (1 + reserved):
            raise _TimeIsUp
        limit = max(MIN_LIMIT, LIMIT_FACTOR * times[0]) if times else MIN_LIMIT
        self.tell(f"{title} (forecast {candidate.need / GIB:.1f} GiB) ...")
        ranks = f"run.gpus={self.context.facts.degrees.ranks}"  # `auto` might choose other ranks for this candidate
        overrides = [
            *self.overrides,
            ranks,
            *(f"{name}={hydra_value(value)}" for name, value in candidate.deltas.items()),
        ]
        result = replace(trial.measure(overrides, self.steps, min(limit, left)), data=self.context.data)
        if result.outcome is Outcome.hung and left < limit:
            raise _TimeIsUp  # the deadline cut the trial short, which says nothing about the candidate
        self.cache.keep(key, result)
        candidate.results.append(result)
        return result

    def _measured(self) -> Iterator[TrialResult]:
        results = (result for candidate in self.candidates for result in candidate.results)
        return (result for result in results if result.outcome is Outcome.measured)

    def _compare_losses(self, candidate: Candidate, result: TrialResult) -> None:
        """Give the candidate a verdict if its losses differ from the losses of the first trial on the same data."""
        first = next(measured.losses for measured in self._measured() if measured.data == result.data)
        if not first or len(first) != len(result.losses):
            candidate.verdict = f"another loss: {len(result.losses)} steps, and the first trial took {len(first)}"
            return
        pairs = [(statistics.fmean(result.losses), statistics.fmean(first)), *zip(result.losses, first, strict=True)]
        mean, start, *later = (abs(loss - other) / max(abs(other), 1e-12) for loss, other in pairs)
        errors = [mean, start, *(error / STEP_TOLERANCE for error in later)]
        candidate.loss_error = math.nan if any(map(math.isnan, errors)) else max(errors)
        tolerance = TOLERANCE[self.context.precision]
        if not candidate.loss_error <= tolerance:
            candidate.verdict = f"another loss: off by {candidate.loss_error:.1e}, more than {tolerance:g}"

    def _ranked(self) -> list[Candidate]:
        ran = [candidate for candidate in self.candidates if candidate.speed]
        return sorted(ran, key=lambda candidate: -candidate.speed)

    def _rivals(self) -> list[Candidate]:
        """The two fastest candidates, if one measurement of each cannot tell them apart; otherwise none."""
        fastest = self._ranked()[:2]
        return fastest if len(fastest) == 2 and fastest[1].speed > fastest[0].speed * (1 - CLEAR) else []

    def _repeat(self) -> None:
        """Measure the rivals again, alternately, so that a GPU that heats up or a busy host slows down both."""
        rivals = self._rivals()
        for repeat in range(1, REPEATS + 1):
            for candidate in rivals:
                if not candidate.speed:
                    continue
                result = self._measure(candidate, repeat)
                if result.outcome is not Outcome.measured:
                    candidate.verdict = f"failed when repeated: {result.outcome.value}: {result.reason}"
                self.tell(f"  {candidate.verdict or f'{result.tokens_per_second:,.0f} tokens/s'}")

    def _cache_key(self, candidate: Candidate, repeat: int) -> dict[str, Any]:
        facts, config = self.context.facts, self.config
        unimportant = ("_name_or_path", "transformers_version")
        return {
            "code": f"{__version__} {code_digest.digest()}",
            "model": {name: value for name, value in facts.model.items() if name not in unimportant},
            "device": [facts.device_name, facts.capability, round(facts.memory / GIB, 1), facts.cores],
            "packages": {**facts.packages, "python": sys.version.split()[0]},
            "data": [facts.packing, facts.shares_prompts, facts.sequence_length, facts.rows, self.context.document],
            "run": [facts.dtype, facts.deterministic, config.train.global_batch_size, asdict(config.optimizer)],
            "steps": [self.steps, trial.WARM_UP],
            "candidate": candidate.identity,
            "repeat": repeat,
        }
