"""Measures the cost of step monitoring: the check for finite losses and gradients, the loss window, the statistics for
the log.

    python scripts/bench/bench_guards.py [--steps 40] [+recipe=NAME key=value ...]

It measures in two ways. Alone: it runs the monitoring of one step ROUNDS times and divides its time by the time of a
step. This is exact on a CPU and an upper bound on a GPU, where the host does this work while the device computes the
step. In the run: it alternates blocks of steps with train.spikes=report and train.spikes=off in one trainer and
compares the medians; on a busy machine the difference is mostly noise. Without a recipe it trains LoRA on the built-in
model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for a checkout that is not installed

from fxtune.config import compose as configs
from fxtune.config.root import Spikes
from fxtune.data.batches.loader import Loader
from fxtune.objectives.causal_lm import CausalLM
from fxtune.training.builder import RunBuilder, steps_only
from fxtune.training.noise_scale import MicroBatchNorms
from fxtune.training.step import TrainStep
from fxtune.training.step_monitor import StepStatistics

ROUNDS = 1000
BLOCK = 5


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def monitoring_seconds(train_step: TrainStep, device: torch.device) -> tuple[float, float]:
    """Seconds per step: until the host continues, and until the device has finished."""
    loss, norm, scale = torch.ones((), device=device), torch.ones((), device=device), train_step.loss_scale.scale
    statistics_, spikes = StepStatistics(), train_step.spikes
    for round_ in range(2):  # the first one warms up
        synchronize(device)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            finite = torch.isfinite(norm) & torch.isfinite(loss)
            limit = spikes.limit(loss)
            spikes.updates_weights(limit, loss, finite)
            metrics = dict(loss=loss, grad_norm=norm, finite=finite, loss_scale=scale, spike_limit=limit)
            statistics_.add(metrics)
        host = time.perf_counter() - began
        synchronize(device)
        device_done = time.perf_counter() - began
        statistics_.settle()
        assert round_ or statistics_.step == ROUNDS
    return host / ROUNDS, device_done / ROUNDS


def noise_seconds(train_step: TrainStep, device: torch.device) -> tuple[float, float]:
    """What train.noise_scale adds to a micro-batch: seconds until the host continues, and until the device is done."""
    weights = [torch.ones_like(weight) for weight in train_step.optimizer.names]
    norms, labels = MicroBatchNorms([]), torch.zeros(1000, dtype=torch.int64, device=device)
    for _ in range(2):  # the first one warms up
        synchronize(device)
        began = time.perf_counter()
        for _ in range(ROUNDS // 10):
            norms.begin()
            for weight in weights:
                norms._arrived(weight)
            norms.read(labels, 1, 1000.0)
        host = time.perf_counter() - began
        synchronize(device)
        device_done = time.perf_counter() - began
    return host / (ROUNDS // 10), device_done / (ROUNDS // 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=40, help="measured steps with each setting of train.spikes")
    options, words = parser.parse_known_args()
    words = words or ["+recipe=quickstart"]
    config = steps_only(configs.load(words), 2 * options.steps + 4 * BLOCK)
    builder = RunBuilder(config)
    device, plan = builder.world.device, builder.read()[1].training
    model = builder.language_model(builder.build())
    model.model.train()
    train_step = builder.train_step(model, CausalLM())
    loader = Loader(plan, config.loader, device)
    taken = (train_step(plan, step, builder.config.optimizer.lr) for step in loader.steps())
    seconds: dict[Spikes, list[float]] = {Spikes.report: [], Spikes.off: []}
    list(islice(taken, 2 * BLOCK))
    while min(map(len, seconds.values())) < options.steps:
        for kind, found in seconds.items():
            train_step.spikes.kind = kind
            for _ in range(BLOCK):
                synchronize(device)
                began = time.perf_counter()
                next(taken)
                synchronize(device)
                found.append(time.perf_counter() - began)
    taken.close()
    loader.close()
    train_step.spikes.kind = Spikes.report
    host, device_done = monitoring_seconds(train_step, device)
    noise_host, noise_done = noise_seconds(train_step, device)
    with_, without = (statistics.median(found) for found in seconds.values())
    print(f"{device}, {' '.join(words)}: a step takes {with_ * 1e3:.1f} ms")
    print(
        f"alone: {host * 1e6:.0f} us/step on the host, {device_done * 1e6:.0f} us/step until the device has finished: "
        f"{device_done / with_:.3%} of a step"
    )
    micro_batches = plan.micro_batches(0)
    print(
        f"train.noise_scale, alone: {noise_host * 1e6:.0f} us for a micro-batch on the host, {noise_done * 1e6:.0f} us "
        f"until the device has finished: {noise_done * micro_batches / with_:.3%} of a step of {micro_batches}"
    )
    print(
        f"in the run: {with_ * 1e3:.2f} ms/step with the loss window, {without * 1e3:.2f} ms/step without, "
        f"{with_ / without - 1:+.2%}"
    )


if __name__ == "__main__":
    main()
