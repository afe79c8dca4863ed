"""Finds where the time of a run goes, and which keys would save time. RULES has an entry for each cause.

A rule reads only figures that the run recorded. A share is a share of the run's whole time, so the change that saves
most can come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxtune.reports.run_files import RunFiles
from fxtune.reports.time_shares import TimeShare, startup_stages, time_shares


@dataclass(frozen=True)
class Bottleneck:
    share: float
    """Share of the run's time, 0 to 1."""
    sentence: str
    keys: list[str]
    """The keys to change, as a user types them."""


class Times:
    """The figures that the rules read."""

    def __init__(self, run: RunFiles) -> None:
        self.run = run

    @cached_property
    def parts(self) -> dict[str, TimeShare]:
        return {part.key: part for part in time_shares(self.run)}

    @cached_property
    def total(self) -> float:
        return sum(part.seconds for part in self.parts.values())

    def share(self, key: str) -> float:
        """The share of the run's time that a part took; 0 for a part that was not recorded."""
        return self.parts[key].seconds / self.total if key in self.parts else 0.0

    def option(self, key: str) -> Any:
        """A value of the recipe; None if the recipe lacks the key."""
        value: Any = self.run.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def mean(self, metric: str) -> float:
        """The mean of a metric over the log lines; 0 if no line has it."""
        values = [value for value in self.run.curves.get(metric, {}).values() if isinstance(value, (int, float))]
        return sum(values) / len(values) if values else 0.0

    def last(self, metric: str) -> float:
        value = self.run.last.get(metric)
        return float(value) if isinstance(value, (int, float)) else 0.0

    @property
    def ranks(self) -> int:
        return int(self.last("train/ranks")) or 1

    @property
    def on_gpu(self) -> bool:
        return "train/memory_reserved_gib" in self.run.last


@dataclass(frozen=True)
class Rule:
    least: float
    """The smallest share that is reported."""
    share: Callable[[Times], float]
    sentence: Callable[[Times], str]
    """The sentence with the placeholder {share}."""
    keys: Callable[[Times], list[str]]


def _workers(times: Times) -> list[str]:
    now = times.option("loader.num_workers")
    now = (2 if times.on_gpu else 0) if now is None else now
    return [f"loader.num_workers={2 * now or 2}"]


def _slowest(times: Times) -> float:
    """The share of the time that the run would save if the slowest rank were as fast as the others."""
    behind = times.mean("train/slowest_behind")
    return times.share("passes") * behind / (1 + behind)


def _evaluations(times: Times) -> list[str]:
    every = times.option("train.eval_every")
    rarer = [f"train.eval_every={2 * every}"] if every else []
    return [*rarer, "train.eval_share=0.05", "data.eval_limit=N"]


def _padding(times: Times) -> float:
    """The share of the run's time that padding took, if a padded token takes as long as any other token."""
    training = times.run.about.get("training") or {}
    rows = times.run.setting.get("rows") or {}
    return 0.0 if rows.get("packing") else times.share("passes") * float(training.get("padding_share") or 0.0)


def _checkpoints(times: Times) -> list[str]:
    every = times.option("checkpoint.every")
    return [f"checkpoint.every={2 * every}"] if every else ["checkpoint.keep_best=false"]


def _idle_card(times: Times) -> float:
    """The share of the time in which the card ran no kernel, less the shares that other rules explain."""
    used = times.run.last.get("energy/gpu_utilization")
    known = sum(map(times.share, ("startup", "data", "evaluation", "other", "saving", "rest")))
    return max(1.0 - used - known, 0.0) if isinstance(used, (int, float)) else 0.0


def _longest_stage(times: Times) -> str:
    stages = startup_stages(times.run)
    return max(stages, key=lambda stage: stages[stage])


RULES: dict[str, Rule] = {
    "start": Rule(
        0.25,
        lambda times: times.share("startup"),
        lambda times: (
            f"The start of this short run took {{share}} of the time, most of it for: {_longest_stage(times)}"
        ),
        lambda times: ["data.questions.limit=N"] if "questions" in _longest_stage(times) else [],
    ),
    "data": Rule(
        0.03,
        lambda times: times.share("data"),
        lambda times: "The steps waited for data for {share} of the time",
        _workers,
    ),
    "padding": Rule(
        0.05,
        _padding,
        lambda times: (
            f"{times.run.about['training']['padding_share']:.0%} of the tokens in the rows are padding, which took "
            "{share} of the time"
        ),
        lambda times: ["data.packing=true"],
    ),
    "slowest rank": Rule(
        0.03,
        _slowest,
        lambda times: (
            f"Rank {times.last('train/slowest_rank'):.0f} takes {times.mean('train/slowest_behind'):.0%} longer than "
            "the others, which wait for it for {share} of the time (is its card hot, slow, or shared?)"
        ),
        lambda times: ["`fxtune doctor` on its machine"],
    ),
    "between ranks": Rule(
        0.10,
        lambda times: times.share("rest") if times.ranks > 1 else 0.0,
        lambda times: "Sums over the ranks, and waiting for each other, took {share} of the time",
        lambda times: ["a larger train.global_batch_size", "parallel.compression=bfloat16"],
    ),
    "sampling": Rule(
        0.30,
        lambda times: times.share("sampling"),
        lambda times: "The model wrote answers for {share} of the time",
        lambda times: ["a vLLM server in sampler.url" if not times.option("sampler.url") else "more of sampler.url"],
    ),
    "rewards": Rule(
        0.10,
        lambda times: times.share("rewards"),
        lambda times: "Rewards took {share} of the time",
        lambda times: [f"sampler.reward_workers={2 * int(times.option('sampler.reward_workers') or 1)}"],
    ),
    "evaluations": Rule(
        0.10,
        lambda times: times.share("evaluation"),
        lambda times: "Evaluations took {share} of the time",
        _evaluations,
    ),
    "checkpoints": Rule(
        0.03,
        lambda times: times.share("saving"),
        lambda times: "The steps stopped for checkpoints for {share} of the time",
        _checkpoints,
    ),
    "optimizer": Rule(
        0.15,
        lambda times: times.share("update"),
        lambda times: "Clipping and the optimizer took {share} of the time",
        lambda times: ["a larger train.global_batch_size, which updates less often"],
    ),
    "compiler": Rule(
        0.15,
        lambda times: times.last("compile/seconds") / times.total,
        lambda times: "The compiler took {share} of the time of this short run",
        lambda times: ["techniques.compile.enabled=false"],
    ),
    "log lines": Rule(
        0.10,
        lambda times: times.share("rest") if times.ranks == 1 and times.option("train.log_every") == 1 else 0.0,
        lambda times: "The loop logs each step, and took {share} of the time between the parts of the steps",
        lambda times: ["train.log_every=10"],
    ),
    "idle card": Rule(
        0.10,
        _idle_card,
        lambda times: "The card had nothing to do for {share} of the time, mostly between small kernels",
        lambda times: ["a larger train.micro_batch_size", "techniques.compile.cuda_graphs=true"],
    ),
}


def find_bottlenecks(run: RunFiles) -> list[Bottleneck]:
    """The findings, the largest share first; empty if no change is worth it, or if the run recorded no times."""
    times = Times(run)
    found = []
    for rule in RULES.values():
        if times.total and (share := rule.share(times)) >= rule.least:
            found.append(Bottleneck(share, rule.sentence(times).replace("{share}", f"{share:.0%}"), rule.keys(times)))
    return sorted(found, key=lambda finding: -finding.share)


def sentences(run: RunFiles) -> Iterator[str]:
    """Yield sentences about the parts of the time and about the findings."""
    parts, found = time_shares(run), find_bottlenecks(run)
    total = sum(part.seconds for part in parts)
    if not parts:
        yield "This run has recorded no times: it has no log line yet."
        return
    largest = sorted(parts, key=lambda part: -part.seconds)
    made_of = ", ".join(f"{part.seconds / total:.0%} {part.name}" for part in largest if part.seconds / total >= 0.005)
    yield f"{duration(total)}: {made_of}."
    if not found:
        yield "Nothing to change: no other part takes long enough to matter."
    for finding in found:
        change = f": {' or '.join(finding.keys)}" if finding.keys else ""
        yield f"{finding.sentence}{change}."


def duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
