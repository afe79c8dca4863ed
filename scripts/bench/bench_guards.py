"""What watching the numbers costs: the test for finite losses and gradients, the window of losses, the figures kept for the log.

    python scripts/bench/bench_guards.py [--steps 40] [+recipe=NAME key=value ...]

Two ways. Alone: what the guards do in a step is done a thousand times, and its time is divided by that of a step; this is exact,
and an upper bound on a GPU, where the host does it while the device is busy with the step. In the run: blocks of steps with
train.spikes=report and =off in turn, on one trainer; the difference of the medians, which is mostly noise on a busy machine.
Without words: LoRA on the built-in model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of a checkout that is not installed

from fxtune.config import compose as configs
from fxtune.config.root import Spikes
from fxtune.data.batches.loader import Loader
from fxtune.diagnostics.benchmark import steps_only
from fxtune.objectives.causal_lm import CausalLM
from fxtune.training.builder import RunBuilder
from fxtune.training.step import TrainStep
from fxtune.training.step_monitor import StepStatistics

ROUNDS = 1000
BLOCK = 5


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def guards(train_step: TrainStep, device: torch.device) -> tuple[float, float]:
    """Seconds a step, until the host goes on and until the device is done."""
    loss, norm, scale = torch.ones((), device=device), torch.ones((), device=device), train_step.loss_scale.scale
    statistics_, spikes = StepStatistics(), train_step.spikes
    for round_ in range(2):  # the first one warms up
        wait(device)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            finite = torch.isfinite(norm) & torch.isfinite(loss)
            limit = spikes.limit(loss)
            spikes.updates_weights(limit, loss, finite)
            metrics = dict(loss=loss, grad_norm=norm, finite=finite, loss_scale=scale, spike_limit=limit)
            statistics_.add(metrics)
        host = time.perf_counter() - began
        wait(device)
        whole = time.perf_counter() - began
        statistics_.settle()
        assert round_ or statistics_.step == ROUNDS
    return host / ROUNDS, whole / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=40, help="of each kind")
    options, words = parser.parse_known_args()
    words = words or ["+recipe=quickstart"]
    config = steps_only(configs.load(words), 2 * options.steps + 4 * BLOCK)
    builder = RunBuilder(config)
    device, plan = builder.world.device, builder.read()[1].training
    model = builder.language_model(builder.build())
    model.model.train()
    train_step = builder.train_step(model, CausalLM())
    loader = Loader(plan, config.loader, device)
    taken = (train_step(plan, step, config.optimizer.lr) for step in loader.steps())
    seconds: dict[Spikes, list[float]] = {Spikes.report: [], Spikes.off: []}
    list(islice(taken, 2 * BLOCK))
    while min(map(len, seconds.values())) < options.steps:
        for kind, found in seconds.items():
            train_step.spikes.kind = kind
            for _ in range(BLOCK):
                wait(device)
                began = time.perf_counter()
                next(taken)
                wait(device)
                found.append(time.perf_counter() - began)
    taken.close()
    loader.close()
    train_step.spikes.kind = Spikes.report
    host, whole = guards(train_step, device)
    with_, without = (statistics.median(found) for found in seconds.values())
    print(f"{device}, {' '.join(words)}: a step takes {with_ * 1e3:.1f} ms")
    print(
        f"alone: {host * 1e6:.0f} us of the host and {whole * 1e6:.0f} us until done, a step: {whole / with_:.3%} of it"
    )
    print(
        f"in the run: {with_ * 1e3:.2f} ms with the window of losses, {without * 1e3:.2f} ms without, "
        f"{with_ / without - 1:+.2%}"
    )


if __name__ == "__main__":
    main()
