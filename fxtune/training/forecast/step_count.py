"""Decides whether a run has enough steps to learn, and names settings that give more steps.

Thinking Machines' guide, which optimizer.lr=auto also follows, aims at 100 steps or more, reports the best results
with 1,000 or more, and finds that smaller batches give better models (docs/supervised-learning/sl-hyperparams.mdx of
tinker-cookbook). Even batches of one document train stably (arXiv 2507.07101). So the settings named here use smaller
batches, and more epochs if that is not enough. In up to 4 epochs, repeated rows are almost equal to new rows (arXiv
2305.16264)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fxtune.config.root import Config
from fxtune.system.terminal.units import counted

FEW = 50
"""A run of fewer steps gets a line that says so. The quickstart learns its task in 87 steps."""
ENOUGH = 100
"""The number of steps that the named settings aim at."""
EPOCHS = 4


def few_steps(config: Config, steps: int | None, epoch_rows: float, group: int = 1) -> Iterator[str]:
    """Yield a line if `steps` are too few to learn from. `epoch_rows`: the rows of the run's data; `group`: how many
    of them must be in one micro-batch, such as the two rows of a pair without packing. Yields nothing if the user
    chose the number of steps (train.max_steps) or a batch that grows. The batch stays if the objective compares
    documents with the others of their step (Needs.whole_step)."""
    train = config.train
    if steps is None or steps >= FEW or train.max_steps is not None or train.batch_ramp:
        return
    epochs, rows = train.epochs or 1.0, train.global_batch_size
    group = rows if config.objective.needs.whole_step else group
    sizes = [size for size in range(rows, 0, -1) if rows % size == size % group == 0]
    size = next((size for size in sizes if epochs * epoch_rows / size >= ENOUGH), group)
    if (needed := epochs * epoch_rows / size) < ENOUGH and epochs < EPOCHS:
        epochs = float(min(EPOCHS, math.ceil(epochs * ENOUGH / needed)))
    keys = {
        "train.micro_batch_size": (math.gcd(size, train.micro_batch_size), train.micro_batch_size),
        "train.global_batch_size": (size, rows),
        "train.epochs": (epochs, train.epochs or 1.0),
    }
    changed = " ".join(f"{key}={new:g}" for key, (new, now) in keys.items() if new != now)
    found = round(epochs * epoch_rows / size)
    few = counted(steps, f"steps of {counted(rows, 'rows')} are too few to learn from")
    if not changed:
        yield f"{few}: 100 or more are a common rule. More rows of data are needed."
        return
    more = "" if found >= ENOUGH else f". That is still less than {ENOUGH}: more rows of data would help, too"
    yield f"{few} (100 or more are a common rule): {changed} gives {found} steps{more}."
