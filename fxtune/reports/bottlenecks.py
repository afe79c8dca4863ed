"""Finds where the time of a run goes, and which keys would save time. _findings() has a part for each cause.

It reads only figures that the run recorded. A share is a share of the run's whole time, so the change that saves
most can come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxtune.reports.run_files import RunFiles
from fxtune.reports.time_shares import TimeShare, startup_stages, time_shares
from fxtune.system.terminal.startup import OTHER


@dataclass(frozen=True)
class Bottleneck:
    share: float
    """Share of the run's time, 0 to 1."""
    sentence: str
    keys: list[str]
    """The keys to change, as a user types them."""


class Times:
    """The figures that the findings are made from."""

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


def find_bottlenecks(run: RunFiles) -> list[Bottleneck]:
    """The findings, the largest share first; empty if no change is worth it, or if the run recorded no times."""
    times = Times(run)
    return sorted(_findings(times) if times.total else (), key=lambda finding: -finding.share)


def _findings(times: Times) -> Iterator[Bottleneck]:
    """Yield a finding for each cause whose share of the time is worth a change."""
    option, larger_batch = times.option, "a larger train.global_batch_size"
    if (share := times.share("startup")) >= 0.25:
        stages = startup_stages(times.run)
        longest = max(stages, key=lambda stage: stages[stage])
        part = "the recipe, the run's files and other work outside of the timed parts" if longest == OTHER else longest
        said = f"The start of this short run took {share:.0%} of the time, most of it for: {part}"
        yield Bottleneck(share, said, ["data.questions.limit=N"] if "questions" in longest else [])
    if (share := times.share("data")) >= 0.03:
        workers = option("loader.num_workers")
        workers = (2 if times.on_gpu else 0) if workers is None else workers
        said = f"The steps waited for data for {share:.0%} of the time"
        yield Bottleneck(share, said, [f"loader.num_workers={2 * workers or 2}"])
    padding = float((times.run.about.get("training") or {}).get("padding_share") or 0.0)
    is_packed = (times.run.setting.get("rows") or {}).get("packing")
    # As if a padded token took as long as any other token.
    if (share := 0.0 if is_packed else times.share("passes") * padding) >= 0.05:
        said = f"{padding:.0%} of the tokens in the rows are padding, which took {share:.0%} of the time"
        yield Bottleneck(share, said, ["data.packing=true"])
    behind = times.mean("train/slowest_behind")
    if (share := times.share("passes") * behind / (1 + behind)) >= 0.03:
        rank = f"Rank {times.last('train/slowest_rank'):.0f} takes {behind:.0%} longer than the others"
        said = f"{rank}, which wait for it for {share:.0%} of the time (is its card hot, slow, or shared?)"
        yield Bottleneck(share, said, ["`fxtune doctor` on its machine"])
    if times.ranks > 1 and (share := times.share("rest")) >= 0.10:
        said = f"Sums over the ranks, and waiting for each other, took {share:.0%} of the time"
        yield Bottleneck(share, said, [larger_batch, "parallel.compression=bfloat16"])
    if (share := times.share("sampling")) >= 0.30:
        servers = "more of sampler.url" if option("sampler.url") else "a vLLM server in sampler.url"
        yield Bottleneck(share, f"The model wrote answers for {share:.0%} of the time", [servers])
    if (share := times.share("rewards")) >= 0.10:
        workers = 2 * int(option("sampler.reward_workers") or 1)
        yield Bottleneck(share, f"Rewards took {share:.0%} of the time", [f"sampler.reward_workers={workers}"])
    if (share := times.share("evaluation")) >= 0.10:
        rarer = [f"train.eval_every={2 * every}"] if (every := option("train.eval_every")) else []
        keys = [*rarer, "train.eval_share=0.05", "data.eval_limit=N"]
        yield Bottleneck(share, f"Evaluations took {share:.0%} of the time", keys)
    if (share := times.share("saving")) >= 0.03:
        every = option("checkpoint.every")
        key = f"checkpoint.every={2 * every}" if every else "checkpoint.keep_best=false"
        yield Bottleneck(share, f"The steps stopped for checkpoints for {share:.0%} of the time", [key])
    if (share := times.share("update")) >= 0.15:
        said = f"Clipping and the optimizer took {share:.0%} of the time"
        yield Bottleneck(share, said, [f"{larger_batch}, which updates less often"])
    if (share := times.last("compile/seconds") / times.total) >= 0.15:
        said = f"The compiler took {share:.0%} of the time of this short run"
        yield Bottleneck(share, said, ["techniques.compile.enabled=false"])
    if times.ranks == 1 and option("train.log_every") == 1 and (share := times.share("rest")) >= 0.10:
        said = f"The loop logs each step, and took {share:.0%} of the time between the parts of the steps"
        yield Bottleneck(share, said, ["train.log_every=10"])
    # The card ran no kernel, and no part above explains it.
    used = times.run.last.get("energy/gpu_utilization")
    known = sum(map(times.share, ("startup", "data", "evaluation", "other", "saving", "rest")))
    if isinstance(used, (int, float)) and (share := 1.0 - used - known) >= 0.10:
        said = f"The card had nothing to do for {share:.0%} of the time, mostly between small kernels"
        yield Bottleneck(share, said, ["a larger train.micro_batch_size", "techniques.compile.cuda_graphs=true"])


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
