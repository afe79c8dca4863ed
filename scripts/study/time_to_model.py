"""Measures how soon a good model stands: the time until a run has the held-out loss that a default run ends with.

    python scripts/study/time_to_model.py --json time_to_model.json              # every run; again: continues
    python scripts/study/time_to_model.py --json time_to_model.json --table      # only the table of what is there
    python scripts/study/time_to_model.py --json /tmp/t.json --smoke             # a short test

A lever is a list of overrides (LEVERS). Each task is trained with each lever and seed, every run in a process of its
own, on one thread of the CPU, from the built-in tiny model:

    orders       the quickstart: a sentence to JSON
    sentences    the same rows turned round: JSON to a sentence

The default is the cosine schedule over the epochs that a user asks for. It evaluates once, at its end, and its loss
there is the target. A lever's run counts from its first step to the end of its export, evaluations and dropped steps
included, because nobody knows the target while it trains. `reached`: when an evaluation first had the target's loss, for
those who would watch it. Seconds are processor time of the run's process, so that other work on the machine does not
change them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "fxtune" / "assets" / "data" / "quickstart_train.jsonl"
STOP = ["train.stop.patience=3", "checkpoint.keep_best=true"]
DEFAULT = "cosine"
LEVERS = {
    DEFAULT: [],
    "cosine, early stop": STOP,
    "wsd, early stop": [*STOP, "schedule.name=wsd"],
    "lr auto": ["optimizer.lr=auto"],
    **{f"lr {rate}": [f"optimizer.lr={rate}"] for rate in ("1e-3", "2e-3", "8e-3")},
}
"""Name of a lever -> its overrides of the default run, whose rate is 4e-3. A new one is a line here."""
TASKS = ("orders", "sentences")


def words(task: str, lever: str, seed: int, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    return [
        "+recipe=quickstart",
        f"data.sources=[{{path: {folder / f'{task}.jsonl'}, limit: {options.rows}}}]",
        "data.eval_fraction=0.1",
        "data.sequence_length=256",
        f"data.cache_dir={folder / 'cache'}",
        f"train.epochs={options.epochs}",
        f"run.seed={seed}",
        f"run.dir={folder / f'{task}-{list(LEVERS).index(lever)}-{seed}'}",
        "checkpoint.every=0",
        "tracking.display=none",
        *LEVERS[lever],
    ]


def write_rows(folder: Path) -> None:
    """The rows of each task."""
    rows = [json.loads(line)["messages"] for line in ROWS.read_text(encoding="utf-8").splitlines()]
    for task in TASKS:
        with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
            for system, user, assistant in rows:
                turns = [system, user, assistant]
                if task == "sentences":
                    turns = [
                        {"role": "system", "content": "Answer with the order as a sentence."},
                        {"role": "user", "content": assistant["content"]},
                        {"role": "assistant", "content": user["content"]},
                    ]
                file.write(json.dumps({"messages": turns}) + "\n")


def train(overrides: list[str]) -> dict[str, Any]:
    """Run one training in this process. Returns its steps, seconds, evaluations and held-out loss."""
    import torch

    from fxtune.config import compose
    from fxtune.training import trainer
    from fxtune.training.run_log import RunLog

    torch.set_num_threads(1)
    began: list[tuple[float, float]] = []
    evaluations: list[dict[str, float]] = []
    loop, log = trainer.Trainer._loop, RunLog.log

    def timed_loop(self: Any) -> None:
        began.append((time.process_time(), time.monotonic()))
        loop(self)

    def noted(self: Any, figures: dict[str, Any]) -> None:
        log(self, figures)
        if "eval/loss" in figures:
            seconds = time.process_time() - began[0][0]
            evaluations.append({"step": self.state.step, "seconds": seconds, "loss": figures["eval/loss"]})

    trainer.Trainer._loop, RunLog.log = timed_loop, noted  # type: ignore[method-assign]
    result = trainer.run(compose.load(overrides))
    return {
        "steps": result["train/step"],
        "dropped": result.get("train/dropped_steps", 0),
        "seconds": time.process_time() - began[0][0],
        "wall_seconds": time.monotonic() - began[0][1],
        "loss": result["eval/best_loss"],
        "evaluations": evaluations,
    }


def measure(file: Path, options: argparse.Namespace) -> None:
    """Train what the JSON file lacks, and add it there."""
    found = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory(prefix="fxtune-time-") as name:
        folder = Path(name)
        write_rows(folder)
        for seed in options.seeds:
            for task in options.tasks:
                for lever in options.levers:
                    key = f"{task} | {lever} | {seed} | {options.epochs} epochs of {options.rows} rows"
                    if key in found:
                        continue
                    command = [sys.executable, __file__, "--run", *words(task, lever, seed, folder, options)]
                    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
                    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
                    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
                    if done.returncode:
                        sys.exit(f"{key}: {done.stderr[-2000:]}")
                    found[key] = json.loads(done.stdout.splitlines()[-1])
                    file.write_text(json.dumps(found, indent=1))
                    one = found[key]
                    print(f"{key}: loss {one['loss']:.4f}, {one['steps']} steps, {one['seconds']:.0f} s", flush=True)


def table(found: dict[str, Any]) -> str:
    """Means over the seeds, each run against the default run of its seed."""
    runs: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for key, one in found.items():
        task, lever, seed, size = key.split(" | ")
        runs.setdefault((task, size, lever), {})[seed] = one
    lines = [
        "| task | lever | seeds | steps (dropped) | seconds | of the default | held-out loss | against the default | "
        "reached after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (task, size, lever), by_seed in runs.items():
        default = runs.get((task, size, DEFAULT), {})
        seeds = [seed for seed in by_seed if seed in default]
        if not seeds:
            continue

        def mean(name: str, of: dict[str, Any], seeds: list[str] = seeds) -> float:
            return statistics.mean(of[seed][name] for seed in seeds)

        ratios = [by_seed[seed]["seconds"] / default[seed]["seconds"] for seed in seeds]
        losses = [by_seed[seed]["loss"] / default[seed]["loss"] - 1 for seed in seeds]
        when = [
            next(
                (each["seconds"] for each in by_seed[seed]["evaluations"] if each["loss"] <= default[seed]["loss"]),
                None,
            )
            for seed in seeds
        ]
        shares = [at / default[seed]["seconds"] for at, seed in zip(when, seeds, strict=True) if at is not None]
        reached = f"{statistics.mean(shares):.2f}x" if len(shares) == len(seeds) else f"{len(shares)} of {len(seeds)}"
        lines.append(
            f"| {task}, {size} | {lever} | {len(seeds)} | {mean('steps', by_seed):.0f} ({mean('dropped', by_seed):.0f}) | "
            f"{mean('seconds', by_seed):.1f} | {statistics.mean(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{mean('loss', by_seed):.4f} | {statistics.mean(losses):+.1%} ({min(losses):+.1%} to {max(losses):+.1%}) | "
            f"{reached} |"
        )
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(train(sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the file of finished runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS))
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--rows", type=int, default=240, help="rows of the data, a tenth of them held out")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--smoke", action="store_true", help="one seed and a few rows")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.rows, options.epochs, options.tasks = [0], 40, 1, ["orders"]
        options.levers = list(LEVERS)[:3]
    if not options.table:
        measure(options.json, options)
    print(table(json.loads(options.json.read_text())))


if __name__ == "__main__":
    main()
