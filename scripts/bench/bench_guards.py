"""What watching the numbers costs: the test for finite losses and gradients, the window of losses, the figures kept for the log.

    python scripts/bench/bench_guards.py [--steps 40] [+recipe=NAME key=value ...]

Two ways. Alone: what the guards do in a step is done a thousand times, and its time is divided by that of a step; this is exact,
and an upper bound on a GPU, where the host does it while the device is busy with the step. In the run: blocks of steps with
train.spikes=report and =off in turn, on one trainer; the difference of the medians, which is mostly noise on a busy machine.
Without words: LoRA on the built-in model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of a checkout that is not installed

from fxtune.checkpoint.run_folder import RunFolder
from fxtune.config import compose as configs
from fxtune.config.root import Spikes
from fxtune.diagnostics.benchmark import alone
from fxtune.tracking.display import Display
from fxtune.training.interval import Interval
from fxtune.training.trainer import Trainer

ROUNDS = 1000
BLOCK = 5


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def guards(trainer: Trainer) -> tuple[float, float]:
    """Seconds a step, until the host goes on and until the device is done."""
    device = trainer.world.device
    loss, norm, scale = torch.ones((), device=device), torch.ones((), device=device), trainer.loss_scale.scale
    interval = Interval()
    for round_ in range(2):  # the first one warms up
        wait(device)
        began = time.perf_counter()
        for _ in range(ROUNDS):
            finite = torch.isfinite(norm) & torch.isfinite(loss)
            limit = trainer.spikes.limit(loss)
            trainer.spikes.taken_up(limit, loss, finite)
            interval.add(loss, norm, finite, scale, limit)
        host = time.perf_counter() - began
        wait(device)
        whole = time.perf_counter() - began
        interval.settle()
        assert round_ or interval.step == ROUNDS
    return host / ROUNDS, whole / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=40, help="of each kind")
    options, words = parser.parse_known_args()
    words = words or ["+recipe=quickstart"]
    config = alone(configs.load(words), 2 * options.steps + 4 * BLOCK)
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch), resumed=False, lock=FileLock(Path(scratch) / ".lock"))
        trainer = Trainer(config, folder, Display(), json.loads(json.dumps(dataclasses.asdict(config))))
        device, taken = trainer.world.device, trainer.steps()
        seconds: dict[Spikes, list[float]] = {Spikes.report: [], Spikes.off: []}
        list(islice(taken, 2 * BLOCK))
        while min(map(len, seconds.values())) < options.steps:
            for kind, found in seconds.items():
                trainer.spikes.kind = kind
                for _ in range(BLOCK):
                    wait(device)
                    began = time.perf_counter()
                    next(taken)
                    wait(device)
                    found.append(time.perf_counter() - began)
        taken.close()
        trainer.close()
        trainer.spikes.kind = Spikes.report
        host, whole = guards(trainer)
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
