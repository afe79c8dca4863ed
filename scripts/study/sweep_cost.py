"""Compares a sweep that stops the losers with one that runs every configuration to its end, on the quickstart's task.

    python scripts/study/sweep_cost.py --seeds 0 1 2 --json sweep_cost.json

Both draw the same eight configurations. Printed are the ratio of the processor time, of the steps, and how far the
held-out loss of the winner is above the lowest one of all. Each is a process of its own on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

RECIPE = ["+recipe=quickstart", "data.eval_fraction=0.1", "train.eval_every=10", "data.questions.path=null"]
"""Both evaluate at the same steps, so that a configuration has the same bits in both."""
SPACE = ["sweep.lr=loguniform(5e-4,5e-2)", "sweep.r=choice(4,8,16,32)"]


def measure(folder: Path, method: str, seed: int, trials: int, words: list[str]) -> dict[str, Any]:
    """The results of one sweep, and its processor time in seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    before = _seconds()
    options = [
        f"--seed={seed}",
        f"--method={method}",
        f"--trials={trials}",
        "--sampler=spread",
        f"--output={folder}.yaml",
    ]
    places = [f"run.seed={seed}", f"run.dir={folder}"]
    subprocess.run(
        [sys.executable, "-m", "fxtune", "sweep", *RECIPE, *words, *SPACE, *places, *options],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads((folder / "sweep.json").read_text())
    return {**found, "seconds": _seconds() - before}


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(halving: dict[str, Any], every: dict[str, Any]) -> dict[str, Any]:
    """What the first sweep saved against the second, and what that cost."""
    losses = {run["trial"]: run["loss"] for run in every["runs"] if run["state"] == "done"}
    best = min(losses, key=losses.__getitem__)
    winner = halving["winner"]
    return {
        "runs": halving["whole_runs"],
        "time": halving["seconds"] / every["seconds"],
        "winner": winner,
        "best": best,
        "rank": sorted(losses.values()).index(losses[winner]) + 1,
        "loss": losses[winner],
        "best_loss": losses[best],
        "worse_by": losses[winner] / losses[best] - 1,
        "same_bits": next(run["loss"] for run in halving["runs"] if run["trial"] == winner) == losses[winner],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("build/sweep_cost"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("words", nargs="*", help="more keys of the recipe")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in options.seeds:
        halving, every = (
            measure(options.out.resolve() / f"{method}-{seed}", method, seed, options.trials, options.words)
            for method in ("halving", "none")
        )
        rows.append({"seed": seed, **compare(halving, every)})
        row = rows[-1]
        print(
            f"seed {seed}: {row['runs']:.3g} of {options.trials} runs, {row['time']:.2f} of the processor time; the "
            f"winner is number {row['rank']} of {options.trials}, its loss {row['loss']:.4f} is {row['worse_by']:+.1%} "
            f"from the best ({row['best_loss']:.4f})",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps({"trials": options.trials, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
