"""Compares a sweep that stops the losers with one that runs every configuration to its end, on the quickstart's task.

    python scripts/study/sweep_cost.py --json sweep_cost.json --jobs 6 --minutes 9      # again: continues
    python scripts/study/sweep_cost.py --json /tmp/sweep.json --smoke                   # a short test

Both draw the same eight configurations. The script prints two figures of the first sweep. One is its time in runs: a
run is the time of the second sweep divided by the number of configurations. The other is how far the held-out loss of
its winner is above the lowest loss of all configurations. Each sweep has a core of its own and trains one configuration
at a time, with one thread (pinned_jobs.py). Seconds are from the start of the command to its end. The folder of a sweep
stays in --out until the sweep is done, so that the next call can continue it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from pinned_jobs import Job, add_arguments, again, done, run_jobs

RECIPE = [
    "+recipe=quickstart",
    "data.eval_fraction=0.1",
    "train.eval_every=10",
    "data.questions.path=null",
    "run.report=false",
]
"""Both sweeps evaluate at the same steps, so that a configuration gets the same weights in both, bit for bit."""
SPACE = ["sweep.lr=loguniform(5e-4,5e-2)", "sweep.r=choice(4,8,16,32)"]
METHODS = ("none", "halving")
"""The one that takes longest first."""
SMOKE = ["data.sources.0.limit=60", "train.eval_every=2", "data.sequence_length=256"]


def sweep(folder: Path, method: str, seed: str, trials: str, words: list[str]) -> dict[str, Any]:
    """The results of one sweep, with a digest of each adapter that was trained to its end."""
    options = [f"--seed={seed}", f"--method={method}", f"--trials={trials}", "--sampler=spread"]
    places = [f"--output={folder}.yaml", f"run.seed={seed}", f"run.dir={folder}"]
    signal.signal(signal.SIGTERM, lambda *_: None)  # the sweep gets it too, and saves its runs
    command = [sys.executable, "-m", "fxtune", "sweep", *RECIPE, *words, *SPACE, *places, *options]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
        sys.exit(code)
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    found["startup"] = startup([Path(run["folder"], "metrics.jsonl") for run in found["runs"]])
    for run in found["runs"]:
        if run["state"] == "done":
            adapter = Path(run["folder"], "adapter", "adapter_model.safetensors")
            run["adapter"] = hashlib.sha256(adapter.read_bytes()).hexdigest()
    shutil.rmtree(folder)
    return found


def startup(files: list[Path]) -> dict[str, float]:
    """Seconds before the first step of all starts of all runs, by stage. Their process has loaded the libraries."""
    seconds: dict[str, float] = {}
    for file in files:
        for line in file.read_text().splitlines():
            for key, value in json.loads(line).items():
                if key.startswith("startup/") and key not in (
                    "startup/imports_seconds",
                    "startup/first_steps_seconds",
                ):
                    stage = key.removeprefix("startup/").removesuffix("_seconds")
                    seconds[stage] = seconds.get(stage, 0.0) + value
    return seconds


def compare(halving: dict[str, Any], every: dict[str, Any]) -> dict[str, Any]:
    """What the first sweep saved against the second, and what that cost."""
    trained = {run["trial"]: run for run in every["runs"] if run["state"] == "done"}
    losses = {number: run["loss"] for number, run in trained.items()}
    best = min(losses, key=losses.__getitem__)
    winner = halving["winner"]
    return {
        "runs": halving["whole_runs"],
        "runs_time": halving["wall_seconds"] / every["wall_seconds"] * len(every["runs"]),
        "runs_processor": halving["processor_seconds"] / every["processor_seconds"] * len(every["runs"]),
        "winner": winner,
        "best": best,
        "rank": sorted(losses.values()).index(losses[winner]) + 1,
        "loss": losses[winner],
        "best_loss": losses[best],
        "worse_by": losses[winner] / losses[best] - 1,
        "same_bits": all(
            run["adapter"] == trained[run["trial"]]["adapter"] for run in halving["runs"] if run["state"] == "done"
        ),
    }


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        folder, method, seed, trials, *words = sys.argv[2:]
        print(json.dumps(sweep(Path(folder), method, seed, trials, words)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, default=Path("build/sweep_cost"), help="folder of the sweeps (%(default)s)"
    )
    parser.add_argument("--smoke", action="store_true", help="one seed, four configurations, a few rows")
    parser.add_argument("words", nargs="*", help="more keys of the recipe")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.trials, options.words = [0], 4, SMOKE
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    def key(method: str, seed: int) -> str:
        return " | ".join([method, str(seed), f"{options.trials} configurations", *options.words])

    jobs = [
        Job(
            key(method, seed),
            again(__file__, str(out / f"{method}-{seed}"), method, str(seed), str(options.trials), *options.words),
            resumes=True,
        )
        for method in METHODS
        for seed in options.seeds
    ]
    found = run_jobs(jobs, options, lambda one: f"{one['whole_runs']:.3g} runs, {one['wall_seconds']:.0f} s")
    rows = []
    for seed in options.seeds:
        every, halving = (done(found, key(method, seed)) for method in METHODS)
        if not every or not halving:
            continue
        rows.append(row := compare(halving, every))
        print(
            f"seed {seed}: {row['runs']:.3g} runs trained in the time of {row['runs_time']:.2f} (of the processor: "
            f"{row['runs_processor']:.2f}); the winner is number {row['rank']} of {options.trials}, its loss "
            f"{row['loss']:.4f} is {row['worse_by']:+.1%} from the best ({row['best_loss']:.4f}); survivors have the "
            f"{'same' if row['same_bits'] else 'OTHER'} bits as unpaused runs"
        )
        stages, whole = halving["startup"], halving["wall_seconds"]
        print(
            f"  start-up of its runs, libraries loaded: {sum(stages.values()):.1f} of {whole:.0f} s, of which "
            + ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.items())
        )
    if rows:
        time = statistics.mean(row["runs_time"] for row in rows)
        worst = max(row["worse_by"] for row in rows)
        print(f"{len(rows)} seeds: the time of {time:.2f} runs; the winner is at most {worst:+.2%} from the best")


if __name__ == "__main__":
    main()
