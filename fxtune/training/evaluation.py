"""Evaluation: the loss on held-out data, without gradients and dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.loader import Loader
from fxtune.data.batches.plan import Plan
from fxtune.distributed.world import World
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.process.oom import RowsPerPass
from fxtune.techniques.precision import Precision
from fxtune.training.forecast.run_forecast import FORWARD
from fxtune.training.visits import visit
from fxtune.training.whole_step import step_parts


class HeldOutEvaluation:
    """Evaluates `model` on a run's held-out data, given by `plan`."""

    def __init__(
        self,
        plan: Plan,
        load: Callable[[Plan], Loader],
        model: LanguageModel,
        objective: Objective,
        precision: Precision,
        world: World,
    ) -> None:
        """`load`: makes the loader of a plan. Each rank of `world` evaluates its share of `plan`."""
        self.load, self.model, self.objective, self.precision, self.world = load, model, objective, precision, world
        rank_plan = plan.dealt_out(world.data_rank, world.data_ranks)
        self.loader = load(rank_plan.with_row_piece(world.context_rank, world.context_ranks))

    def measure(self, rows: int) -> dict[str, float]:
        """Call evaluate() with micro-batches of `rows` rows. If one rank runs out of memory, all ranks raise
        MemoryShortError."""
        if rows != self.loader.plan.sizes.micro_batch_size:
            self.loader.close()
            self.loader = self.load(self.loader.plan.with_micro_batch_size(rows))
        return evaluate(self.model, self.objective, self.loader, self.precision, self.world)

    def figures(self, rows_per_pass: RowsPerPass, rows: int) -> dict[str, float]:
        """The figures of measure(), named eval/loss and so on. Micro-batches have `rows` rows, or fewer if those do
        not fit in memory."""
        means = rows_per_pass.run("evaluation", rows, self.measure, self.loader.plan.stream.rows_of_group)
        return {f"eval/{name}": value for name, value in means.items()}

    def close(self) -> None:
        self.loader.close()

    @property
    def max_row_length(self) -> int:
        """Tokens in the longest row."""
        plan = self.loader.plan
        return max(map(plan.max_row_length, range(plan.steps)))


def evaluation_steps(data: PreparedData) -> float:
    """About how many training steps take as long as one evaluation on the held-out data, estimated from tokens."""
    if data.evaluation is None:
        return 0.0
    epoch = data.training.summary()
    step_tokens = epoch["tokens"] / epoch["steps_per_epoch"]
    return FORWARD * float(data.evaluation.summary()["tokens"]) / step_tokens


@torch.no_grad()
def evaluate(
    model: LanguageModel, objective: Objective, loader: Loader, precision: Precision, world: World | None = None
) -> dict[str, float]:
    """Evaluate the loader's plan without dropout. Returns the objective's mean `loss`, its mean metrics, and the
    figures that it derives from these means.

    `world`: the ranks that share the plan; None: this process evaluates the whole plan.
    """
    plan, world = loader.plan, world or World(loader.device)
    parts = iter(_step_parts(model, objective, loader, precision, world) if objective.needs.whole_step else ())

    values = list[torch.Tensor]()
    sums = dict[str, torch.Tensor]()
    """Sums over the batches of this rank, in float64 on the device."""

    def add(batch: Batch, step: int, position: int, is_counted: bool) -> None:
        loss, metrics, found = objective.measured(model, replace(batch, step_part=next(parts, None)))
        if is_counted and found is not None:
            values.append(found.float().cpu())
        for name, value in {"loss": loss, **metrics}.items():
            total = sums.setdefault(name, torch.zeros_like(value, dtype=torch.float64))
            if is_counted:
                total += value

    visit(model, loader, precision, world, "Evaluating", add)
    totals = world.sum(torch.stack(list(sums.values())), "adding up the held-out loss").tolist()
    normalizer = sum(objective.normalizer(plan, index) for index in range(plan.steps))
    means = {name: total / normalizer for name, total in zip(sums, totals, strict=True)}
    found = [part for parts in world.gather(values, "collecting the held-out documents") for part in parts]
    judged = objective.judge(torch.cat(found).numpy()) if found else {}
    return {**means, **objective.derived(means), **judged}


def _step_parts(
    model: LanguageModel, objective: Objective, loader: Loader, precision: Precision, world: World
) -> list[torch.Tensor]:
    """The part of each batch of this rank. The documents of all batches and ranks are one step."""
    values = list[torch.Tensor]()

    def collect(batch: Batch, step: int, position: int, is_counted: bool) -> None:
        of_batch = objective.step_values(model, batch)
        values.append(of_batch if is_counted else torch.zeros_like(of_batch))

    visit(model, loader, precision, world, "Evaluating", collect)
    return step_parts(objective, values, world)
