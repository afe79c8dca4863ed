"""Evaluation of a run with rollouts: the mean reward of one answer to each held-out prompt."""

from __future__ import annotations

from fxtune.data.batches.plan import Plan
from fxtune.system.process.oom import RowsPerPass
from fxtune.training.rollouts.collector import Collector


class RewardEvaluation:
    """Evaluates the model of `collector` on the prompts of `plan`. It stands in the place of a HeldOutEvaluation."""

    def __init__(self, plan: Plan, collector: Collector) -> None:
        self.plan, self.collector = plan, collector

    def figures(self, rows_per_pass: RowsPerPass, rows: int) -> dict[str, float]:
        """eval/reward and other figures. eval/loss is the reward times -1, so that the best weights have the lowest
        loss. Without rewards there is no loss, because equal losses would make the first weights the best."""
        means = self.collector.evaluate(self.plan)
        loss = {"loss": -means["reward"]} if self.collector.objective.judges_held_out else {}
        return {f"eval/{name}": value for name, value in {**loss, **means}.items()}

    def close(self) -> None:
        self.collector.close()

    @property
    def max_row_length(self) -> int:
        """Tokens in the longest prompt."""
        return max(map(self.plan.max_row_length, range(self.plan.steps)))
