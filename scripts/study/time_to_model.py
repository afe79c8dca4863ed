"""Measures how soon a run has a good model: the time until its held-out loss is the one that a default run ends with.

    python scripts/study/time_to_model.py --json time_to_model.json --jobs 14 --minutes 9    # again: continues
    python scripts/study/time_to_model.py --json time_to_model.json --table      # only the table of what is there
    python scripts/study/time_to_model.py --json /tmp/t.json --smoke             # a short test

A lever is a list of overrides (LEVERS). Each task is trained with each lever and seed from the built-in tiny model,
every run in a process of its own, pinned to its own core, with one thread (pinned_jobs.py):

    orders       the quickstart: a sentence to JSON
    sentences    the same rows turned round: JSON to a sentence

The default is the cosine schedule over the epochs that a user asks for. It evaluates once, at its end, and its loss
there is the target. The time of a lever is that of its whole run, from the first step to the end of the export, with
evaluations and steps that early stopping drops: while it trains, nobody knows the target. `reached` is the time at
which an evaluation first had the target's loss. Seconds are wall clock; the table also has the ratio of processor
seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pinned_jobs import ROOT, Job, add_arguments, again, read, run_jobs

ROWS = ROOT / "fxtune" / "assets" / "data" / "quickstart_train.jsonl"


@dataclass(frozen=True)
class Lever:
    keys: tuple[str, ...] = ()
    """Overrides of the default run."""
    epochs: float = 1.0
    """A share of the default's epochs."""


STOP = ("train.stop.patience=3", "checkpoint.keep_best=true")
WSD, AUTO = "schedule.name=wsd", "optimizer.lr=auto"


def batch(rows: int) -> tuple[str, ...]:
    return f"train.micro_batch_size={rows}", f"train.global_batch_size={rows}"


DEFAULT = "cosine"
LEVERS = {
    DEFAULT: Lever(),
    "cosine, early stop": Lever(STOP),
    "wsd, early stop": Lever((*STOP, WSD)),
    "lr auto": Lever((AUTO,)),
    **{f"lr {rate}": Lever((f"optimizer.lr={rate}",)) for rate in ("2e-4", "1e-3", "2e-3", "8e-3")},
    **{f"batch of {rows}": Lever(batch(rows)) for rows in (2, 1)},
    **{f"batch of {rows}, half the epochs": Lever(batch(rows), 0.5) for rows in (2, 1)},
    "batch that grows": Lever((*batch(1), "train.batch_ramp=[[0.5, 4]]"), 0.6),
    "everything": Lever((AUTO, WSD, *STOP, *batch(1)), 0.4),
    "everything, half the epochs": Lever((AUTO, WSD, *STOP, *batch(1)), 0.5),
    "everything, a third of the epochs": Lever((AUTO, WSD, *STOP, *batch(1)), 1 / 3),
}
"""By name. The default's rate is 4e-3, its batch 4 rows, and train.noise_scale advises one row. A new lever is a line
here."""
TASKS = ("orders", "sentences")


def words(task: str, lever: str, seed: int, epochs: float, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    run = f"{task}-{list(LEVERS).index(lever)}-{seed}-{epochs:g}"
    return [
        "+recipe=quickstart",
        f"data.sources=[{{path: {folder / f'{task}.jsonl'}, limit: {options.rows}}}]",
        "data.questions.path=null",
        "data.eval_fraction=0.1",
        "data.sequence_length=256",
        f"data.cache_dir={folder / f'cache-{run}'}",
        f"train.epochs={epochs * LEVERS[lever].epochs}",
        f"run.seed={seed}",
        f"run.dir={folder / run}",
        "checkpoint.every=0",
        "tracking.display=none",
        "run.report=false",
        *LEVERS[lever].keys,
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
    began: list[tuple[float, float]] = []  # wall clock, processor
    evaluations: list[dict[str, float]] = []
    loop, log = trainer.Trainer._loop, RunLog.log

    def timed_loop(self: Any) -> None:
        began.append((time.monotonic(), time.process_time()))
        loop(self)

    def noted(self: Any, figures: dict[str, Any]) -> None:
        log(self, figures)
        if "eval/loss" in figures:
            seconds = time.monotonic() - began[0][0]
            evaluations.append({"step": self.state.step, "seconds": seconds, "loss": figures["eval/loss"]})

    trainer.Trainer._loop, RunLog.log = timed_loop, noted  # type: ignore[method-assign]
    result = trainer.run(compose.load(overrides))
    return {
        "steps": result["train/step"],
        "dropped": result.get("train/dropped_steps", 0),
        "seconds": time.monotonic() - began[0][0],
        "processor": time.process_time() - began[0][1],
        "loss": result["eval/best_loss"],
        "evaluations": evaluations,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train what the JSON file lacks, and add it there."""
    with tempfile.TemporaryDirectory(prefix="fxtune-time-") as name:
        folder = Path(name)
        write_rows(folder)
        jobs = [
            Job(
                f"{task} | {lever} | {seed} | {epochs:g} epochs of {options.rows} rows",
                again(__file__, *words(task, lever, seed, epochs, folder, options)),
            )
            for seed in options.seeds
            for epochs in options.epochs
            for task in options.tasks
            for lever in options.levers
        ]
        return run_jobs(
            jobs, options, lambda one: f"loss {one['loss']:.4f}, {one['steps']} steps, {one['seconds']:.1f} s"
        )


def table(found: dict[str, Any], against: str) -> str:
    """Means over the seeds, each run against the run of the lever `against` with its seed."""
    runs: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for key, one in found.items():
        task, lever, seed, size = key.split(" | ")
        runs.setdefault((task, size, lever), {})[seed] = one
    lines = [
        "| task | lever | seeds | steps (dropped) | seconds | of the default | processor | held-out loss | "
        "against the default | reached after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (task, size, lever), by_seed in sorted(
        runs.items(), key=lambda run: (*run[0][:2], list(LEVERS).index(run[0][2]))
    ):
        default = runs.get((task, size, against), {})
        seeds = [seed for seed in by_seed if seed in default]
        if not seeds:
            continue

        def mean(name: str, of: dict[str, Any], seeds: list[str] = seeds) -> float:
            return statistics.mean(of[seed][name] for seed in seeds)

        busy = [by_seed[seed]["processor"] / default[seed]["processor"] for seed in seeds]
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
            f"{statistics.mean(busy):.2f}x | {mean('loss', by_seed):.4f} | {statistics.mean(losses):+.1%} ({min(losses):+.1%} to {max(losses):+.1%}) | "
            f"{reached} |"
        )
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(train(sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS))
    parser.add_argument("--epochs", type=float, nargs="+", default=[3, 10], help="of the default run (3 and 10)")
    parser.add_argument("--against", choices=LEVERS, default=DEFAULT, help="the default of the table (%(default)s)")
    parser.add_argument("--rows", type=int, default=240, help="rows of the data, a tenth of them held out")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--smoke", action="store_true", help="one seed and a few rows")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.rows, options.epochs, options.tasks = [0], 40, [1], ["orders"]
        options.levers = list(LEVERS)[:3]
    print(table(read(options.json) if options.table else measure(options), options.against))


if __name__ == "__main__":
    main()
