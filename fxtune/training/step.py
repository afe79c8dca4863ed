"""One optimizer step: forward and backward of its micro-batches, clipping, update. Training, `fxtune bench` and
`fxtune verify` share this code, so a benchmark or a proof holds for training.

Micro-batch losses are summed and divided by the objective's normalizer of the whole step, so the split into
micro-batches does not change the result. Nothing here waits for the device: a step whose loss or gradient is not
finite is skipped on the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from fxtune.config.root import TrainConfig
from fxtune.data.batches.batch import Batch
from fxtune.data.batches.loader import StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.distributed.gradients import GradientSum
from fxtune.distributed.world import World
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.optimizer import Optimizer
from fxtune.techniques.compile.cuda_graphs import Recorder
from fxtune.techniques.precision import LossScale, Precision
from fxtune.training.spikes import SpikeWindow

Metrics = dict[str, torch.Tensor]
"""float32 scalars on the device by name (`finite`: a bool)."""


class TrainStep:
    """Takes optimizer steps of `model`: whole ones, or as backward(), clip() and update(), in this order.

    `recorded`: run each pass as a CUDA graph; the optimizer then keeps its gradients. `world`: the ranks that take the
    step together, each with its own micro-batches; None means this process alone.

    Calling the object takes a whole step. Callers that do something in between call its parts, backward(),
    sum_over_ranks(), clip() and update(), in this order.
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
    ) -> None:
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.precision, self.loss_scale = precision, loss_scale
        self.max_grad_norm, self.seed = config.max_grad_norm, seed
        device = next(model.model.parameters()).device
        self.spikes = SpikeWindow(device, config.spikes, config.spike_window, config.spike_threshold)
        self.recorder = Recorder(self._pass, device, optimizer.reached) if recorded else None
        self.world = world or World(device)
        self.gradient_sum: GradientSum | None = None
        self._names: tuple[str, ...] = ("loss",)

    def __call__(self, plan: Plan, step: StepBatches, lr: float) -> Metrics:
        """Take `step` of `plan` with learning rate `lr`.

        Returns the objective's means (`loss`, ...), `grad_norm` before clipping, `finite` (if false, nothing is
        updated), `loss_scale`, and `spike_limit`, the loss above which this step is a spike.
        """
        normalizer = self.objective.normalizer(plan, step.index)
        metrics = self.sum_over_ranks(self.backward(step.micro_batches, normalizer, step.index, step.own))
        self.clip(metrics)
        self.update(metrics, lr)
        return metrics

    def backward(self, batches: Iterable[Batch], normalizer: float, index: int = 0, own: int | None = None) -> Metrics:
        """Run forward and backward: leaves the gradients of the mean in the parameters and returns the means, each of
        this rank's micro-batches only.

        `index`: of the step. Dropout depends only on it, the rank and the seed, so a resumed run repeats it exactly.
        `own`: see StepBatches; further micro-batches add zeros.
        """
        torch.manual_seed(_step_seed(self.seed, index, self.world.rank))
        totals: torch.Tensor | None = None
        for position, batch in enumerate(batches):
            share = normalizer if own is None or position < own else math.inf
            part = self.recorder(batch, share) if self.recorder else self._pass(batch, share)
            totals = part if totals is None else totals + part
        assert totals is not None, "a step has a micro-batch"
        self.loss_scale.unscale(list(self.optimizer.names))
        return dict(zip(self._names, totals.unbind() if totals.dim() else [totals], strict=True))

    def sum_over_ranks(self, metrics: Metrics) -> Metrics:
        """Replace gradients and means by their sums over the ranks. One all-reduce, which does not wait for a GPU."""
        if self.world.size == 1:
            return metrics
        totals = torch.stack([value.float() for value in metrics.values()])
        if self.gradient_sum is None:
            self.gradient_sum = GradientSum(self.world, list(self.optimizer.names), len(totals))
        gradients, totals = self.gradient_sum(self.optimizer.gradients(), totals)
        self.optimizer.set_gradients(gradients)
        return dict(zip(metrics, totals.unbind(), strict=True))

    def clip(self, metrics: Metrics) -> None:
        """Clip the gradient; adds `grad_norm`, `finite` and `spike_limit` to what backward() returned."""
        loss = metrics["loss"]
        metrics["grad_norm"] = self.optimizer.clip(self.max_grad_norm)
        metrics["finite"] = torch.isfinite(metrics["grad_norm"]) & torch.isfinite(loss)
        metrics["spike_limit"] = self.spikes.limit(loss)

    def update(self, metrics: Metrics, lr: float) -> None:
        """Update the weights unless the step is to be skipped, and drop the gradients; adds `loss_scale`."""
        finite = metrics["finite"]
        self.optimizer.step(lr, self.spikes.updates_weights(metrics["spike_limit"], metrics["loss"], finite))
        metrics["loss_scale"] = self.loss_scale.scale
        self.loss_scale.update(finite)

    def _pass(self, batch: Batch, normalizer: torch.Tensor | float) -> torch.Tensor:
        """Run a micro-batch forward and backward. Returns its share of the mean loss, or of [1 + metrics] means."""
        with self.precision.context(batch.input_ids.device):
            loss, metrics = self.objective.loss(self.model, batch)
            mean = loss / normalizer
        self.loss_scale.scaled(mean).backward()
        if not metrics:
            return mean.detach()
        self._names = ("loss", *metrics)
        return torch.stack([mean.detach(), *(metric.detach() / normalizer for metric in metrics.values())])


def _step_seed(seed: int, step: int, rank: int = 0) -> int:
    """A seed for each step and rank, unrelated to those of its neighbours."""
    text = f"{seed}/{step}" + f"/{rank}" * bool(rank)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
