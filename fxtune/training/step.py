"""One optimizer step: forward and backward passes of its micro-batches, clipping, update. Training, `fxtune bench` and
`fxtune verify` share this code, so their results hold for training.

Micro-batch losses are summed and divided by the objective's normalizer of the whole step, so the split into
micro-batches does not change the result. Nothing here waits for the device: a step whose loss or gradient is not
finite is skipped on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fxtune.config.root import TrainConfig
from fxtune.data.batches.batch import Batch
from fxtune.data.batches.loader import StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.distributed.averaging import WeightAverage
from fxtune.distributed.gradients import GradientSum
from fxtune.distributed.parallel import ParallelConfig
from fxtune.distributed.world import World
from fxtune.models.structure import device_of
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.optimizer import Optimizer
from fxtune.techniques.compile.cuda_graphs import Recorder
from fxtune.techniques.precision import LossScale, Precision
from fxtune.training.in_backward import InBackward
from fxtune.training.monitors import noise_scale
from fxtune.training.monitors.rank_report import UPDATE, RankReport
from fxtune.training.monitors.spikes import THRESHOLD, WINDOW, SpikeWindow
from fxtune.training.whole_step import step_parts
from fxtune.upstream import torch as upstream

Metrics = dict[str, torch.Tensor]
"""Scalars on the device by name: float32, except that `finite` is a bool."""


class TrainStep:
    """Takes optimizer steps of `model`.

    `recorded`: run each pass as a CUDA graph; the optimizer then keeps its gradient tensors. `world`: the ranks that
    take the step together, each with its own micro-batches; None: this process alone. `parallel`: how the ranks add up
    their gradients. `bucket_bytes`: the size of the buckets in which they do so (0: one bucket).

    Calling the object takes a whole step. A caller that acts between the parts of a step calls backward(),
    start_sums(), sum_over_ranks(), clip() and update() in this order. To abandon an incomplete step it calls drop().
    """

    def __init__(
        self,
        model: LanguageModel,
        objective: Objective,
        optimizer: Optimizer,
        precision: Precision,
        loss_scale: LossScale,
        config: TrainConfig,
        seed: int = 0,
        recorded: bool = False,
        world: World | None = None,
        parallel: ParallelConfig | None = None,
        bucket_bytes: int = 0,
    ) -> None:
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.precision, self.loss_scale = precision, loss_scale
        self.max_grad_norm, self.seed = config.max_grad_norm, seed
        device = device_of(model.model)
        self.norms = noise_scale.MicroBatchNorms(optimizer.names) if config.noise_scale else None
        self.spikes = SpikeWindow(device, config.spikes, WINDOW, THRESHOLD)
        self.recorder = Recorder(self._pass, device, optimizer.reached) if recorded else None
        self.world = world or World(device)
        parallel = parallel or ParallelConfig()
        self.rank_report = RankReport(self.world)
        self.sharding = model.prepared.sharding
        self.in_backward = InBackward(optimizer) if optimizer.one_by_one else None
        self.gradient_sum: GradientSum | None = None
        self.weight_average: WeightAverage | None = None
        """With parallel.average_every, ranks average weights instead of adding up gradients."""
        if self.world.size > 1 and parallel.average_every > 1:
            self.weight_average = WeightAverage(self.world, list(optimizer.names), parallel.average_every)
        elif self.world.size > 1:
            final = self.recorder is None and not loss_scale.active  # whether hooks see final gradients
            overlap = final and self.world.context_ranks == 1 and self.sharding is None
            self.gradient_sum = GradientSum(self.world, optimizer.whole, parallel, bucket_bytes, overlap)
        self._names: tuple[str, ...] = ("loss",)
        """The names of the means that a pass returns. They are kept here because a recorded pass returns only a
        tensor."""

    def __call__(self, plan: Plan, step: StepBatches, lr: float) -> Metrics:
        """Take `step` of `plan` with learning rate `lr`.

        Returns the objective's means (`loss`, ...), `grad_norm` before clipping, `finite` (if false, nothing is
        updated), `loss_scale`, and `spike_limit`, the loss above which this step is a spike.
        """
        normalizer = self.objective.normalizer(plan, step.index)
        backward = partial(self.backward, step.micro_batches, normalizer, step.data_step, step.counted, lr)
        metrics = self.sum_over_ranks(self.rank_report.timed(backward))
        with self.rank_report.timer.part(UPDATE):
            self.clip(metrics)
            self.update(metrics, lr, step.data_step)
        return metrics

    def backward(
        self,
        batches: Iterable[Batch],
        normalizer: float,
        index: int = 0,
        counted: int | None = None,
        lr: float | None = None,
    ) -> Metrics:
        """Run forward and backward over this rank's micro-batches. Leaves the gradients of the mean loss in the
        parameters, and returns the objective's means.

        `index`: StepBatches.data_step. Dropout depends only on this index, the micro-batch's place in the step and the
        seed. So a resumed run draws the same dropout on any number of ranks. `counted`: see StepBatches. Micro-batches
        beyond this number add zeros. `lr`: with optimizer.in_backward, the passes update the weights at this rate and
        leave no gradients, and the means include `spike_limit`. None: gradients are left.
        """
        totals: torch.Tensor | None = None
        if self.objective.needs.whole_step:
            batches = self._with_step_parts(batches, index, counted)
        sums = self.gradient_sum if self.gradient_sum and self.gradient_sum.overlaps else None
        armed = sums or self.sharding  # in the last pass these sum gradients over the ranks
        for position, batch in enumerate(armed.arming(batches) if armed else batches):
            self._seed_dropout(index, position)
            share = normalizer if counted is None or position < counted else math.inf
            part = self.recorder(batch, share) if self.recorder else self._pass(batch, share, index, lr)
            totals = part if totals is None else totals + part
        assert totals is not None, "a step has a micro-batch"
        self.optimizer.collect()
        self.loss_scale.unscale(list(self.optimizer.names))
        metrics = dict(zip(self._names, totals.unbind() if totals.dim() else [totals], strict=True))
        if self.norms:
            metrics[noise_scale.PARTS] = metrics[noise_scale.PARTS] / self.loss_scale.scale.square()
        return metrics

    def _seed_dropout(self, index: int, position: int) -> None:
        """Seed the dropout of this rank's micro-batch number `position` of step `index`. The seed depends on the place
        in the step and not on the rank, so N ranks draw the same dropout as one rank. Each piece of a row draws its
        own dropout."""
        place = position * self.world.data_ranks + self.world.data_rank
        torch.manual_seed(_seed(self.seed, index, place, self.world.context_rank))

    def _with_step_parts(self, batches: Iterable[Batch], index: int, counted: int | None) -> list[Batch]:
        """`batches`, each with its part of Objective.step_parts(). An extra pass without gradient computes the values
        of all documents, with the dropout of the training pass."""
        found, values, failed = list[Batch](), list[torch.Tensor](), None
        try:
            with torch.no_grad():
                for position, batch in enumerate(batches):
                    self._seed_dropout(index, position)
                    with self.precision.context(batch.input_ids.device):
                        of_batch = self.objective.step_values(self.model, batch)
                    # Ranks that share weights make equally many passes, so batches that do not count make one, too.
                    is_counted = counted is None or position < counted
                    found.append(batch)
                    values.append(of_batch if is_counted else torch.zeros_like(of_batch))
        except Exception as error:  # noqa: BLE001  raised by step_parts(): the other ranks wait for this rank
            failed = error
        parts = step_parts(self.objective, values, self.world, failed)
        return [replace(batch, step_part=part) for batch, part in zip(found, parts, strict=True)]

    def start_sums(self) -> None:
        """Start the sums over ranks that need no agreement on this step, unless backward() has started them. A rank
        calls this even if its backward() has failed."""
        if self.gradient_sum:
            self.gradient_sum.start_remaining()

    def sum_over_ranks(self, metrics: Metrics) -> Metrics:
        """Replace gradients and means by their sums over the ranks, without waiting for a GPU. In a local step
        (parallel.average_every) the gradient stays the mean over this rank's rows, and clip() sums the means over the
        ranks."""
        if self.weight_average:
            gradients = [gradient for gradient in self.optimizer.gradients() if gradient is not None]
            upstream.foreach("mul_", gradients, float(self.world.size))
        if self.gradient_sum is None:
            return metrics
        totals = torch.stack([value.float() for value in metrics.values()])
        sums, totals = self.gradient_sum.finish(self.optimizer.gradients(), totals)
        self.optimizer.set_gradients(sums)
        return dict(zip(metrics, totals.unbind(), strict=True))

    def clip(self, metrics: Metrics) -> None:
        """Clip the gradient, and add `grad_norm`, `finite` and `spike_limit` to the `metrics` of backward().

        In a local step `grad_norm` is the mean of the ranks' norms. So all ranks skip a step that is not finite on one
        rank.
        """
        updated = self.in_backward if self.in_backward and self.in_backward.armed else None
        metrics["grad_norm"] = updated.norm() if updated else self.optimizer.clip(self.max_grad_norm)
        if self.weight_average:
            metrics["grad_norm"] = metrics["grad_norm"] / self.world.size
            totals = self.world.sum(torch.stack([value.float() for value in metrics.values()]), "adding up losses")
            metrics.update(zip(list(metrics), totals.unbind(), strict=True))
        loss = metrics["loss"]
        metrics["finite"] = torch.isfinite(metrics["grad_norm"]) & torch.isfinite(loss)
        if updated is None:
            metrics["spike_limit"] = self.spikes.limit(loss)

    def update(self, metrics: Metrics, lr: float, index: int = 0) -> None:
        """Update the weights unless the step is skipped, drop the gradients, and add `loss_scale` to `metrics`.
        `index`: as in backward()."""
        finite = metrics["finite"]
        if self.in_backward and self.in_backward.armed:
            self.in_backward.end()
            self.optimizer.drop()
        else:
            updates = self.spikes.updates_weights(metrics["spike_limit"], metrics["loss"], finite)
            self.optimizer.step(lr, updates, _seed(self.seed, index))  # one seed for any number of ranks
        if self.gradient_sum and self.gradient_sum.compression:
            self.gradient_sum.compression.keep(updates)
        if self.weight_average:
            self.weight_average.stepped()
        metrics["loss_scale"] = self.loss_scale.scale
        self.loss_scale.update(finite)

    def drop(self) -> None:
        """Drop the gradients of an incomplete step. The step must not have updated any weight."""
        assert not self.torn
        if self.in_backward:
            self.in_backward.end()
        if self.gradient_sum:
            self.gradient_sum.drop()
        self.optimizer.drop()

    @property
    def torn(self) -> bool:
        """Whether a backward pass has updated some weights in a step that has not ended."""
        return self.in_backward is not None and self.in_backward.torn

    @property
    def keeps_rank_state(self) -> bool:
        """Whether a resumed run needs state that differs from rank to rank."""
        compresses = self.gradient_sum is not None and self.gradient_sum.compression is not None
        return compresses or self.weight_average is not None

    def all_rank_bytes(self, moments: int) -> int:
        """Bytes of the optimizer's `moments` on one rank and of rank_state() on all ranks."""
        if self.weight_average:
            return moments * self.world.size
        errors = 4 * sum(parameter.numel() for parameter in self.optimizer.names) * self.world.size
        return moments + errors * self.keeps_rank_state

    def rank_state(self) -> dict[str, torch.Tensor]:
        """State that differs from rank to rank, by name: PowerSGD's errors, or the optimizer's moments in local
        steps."""
        if self.gradient_sum and self.gradient_sum.compression:
            return self.gradient_sum.compression.state()
        return self.optimizer.state()[0] if self.weight_average else {}

    def load_rank_states(self, ranks: Sequence[Mapping[str, torch.Tensor]], scalars: dict[str, Any]) -> None:
        """Restore what rank_state() returned on each rank. `scalars`: the numbers in the optimizer's state, which all
        ranks share. If the number of ranks has changed, all ranks keep the moments of rank 0."""
        if not ranks:
            return
        if self.gradient_sum and self.gradient_sum.compression:
            self.gradient_sum.compression.load(ranks)
        elif self.weight_average and len(ranks) == self.world.size:
            self.optimizer.load(dict(ranks[self.world.rank]), scalars)

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks have the same weights. Between two averages they differ."""
        return self.weight_average is None or self.weight_average.steps == 0

    def average(self) -> None:
        """Give all ranks the same weights."""
        if self.weight_average:
            self.weight_average.average()

    def _pass(
        self, batch: Batch, normalizer: torch.Tensor | float, index: int = 0, lr: float | None = None
    ) -> torch.Tensor:
        """Run a micro-batch forward and backward. Returns its share of the mean loss, or of all means if there are
        several: [1 + metrics]. `index`, `lr`: as in backward(). A recorded pass updates no weights and needs
        neither."""
        with self.precision.context(batch.input_ids.device):
            loss, metrics = self.objective.loss(self.model, batch)
            mean = loss / normalizer
        if self.norms:
            self.norms.begin()
        values = {"loss": mean.detach(), **{name: metric.detach() / normalizer for name, metric in metrics.items()}}
        if self.in_backward and lr is not None:
            loss, limit = values["loss"], self.spikes.limit(values["loss"])
            updates = self.spikes.updates_weights(limit, loss, torch.isfinite(loss))
            self.in_backward.begin(lr, updates, _seed(self.seed, index))
            values["spike_limit"] = limit
        self.loss_scale.scaled(mean).backward()
        if self.norms:
            values |= self.norms.read(batch.labels, len(batch.input_ids), normalizer)
        self._names = tuple(values)
        return torch.stack(list(values.values())) if len(values) > 1 else values["loss"]


def _seed(seed: int, step: int, micro_batch: int = 0, piece: int = 0) -> int:
    """A seed for one micro-batch and one piece of its rows (see parallel.context). Seeds of neighbours are
    unrelated."""
    text = f"{seed}/{step}" + f"/{micro_batch}" * bool(micro_batch) + f"/piece {piece}" * bool(piece)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
