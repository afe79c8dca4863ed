"""Measures how long a checkpoint stops training: a run without checkpoints, with background saves, and with blocking
saves.

    python scripts/bench/stall.py +recipe=quickstart                                     # on a CPU, a minute
    python scripts/bench/stall.py +recipe=llama_lora train.max_steps=40 --every 10       # any recipe and keys

Each run takes `train.max_steps` steps (default: 60) in a temporary folder below --folder, so the figures are those of
that disk. The script reads each run's metrics.jsonl. It prints the seconds that a save stops the loop, the seconds
until the save is on the disk, and the time that the saves add to a step, without the first WARM_UP steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for a checkout that is not installed
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "words", nargs="*", default=["+recipe=quickstart"], help="recipe and keys, as on fxtune's command line"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("."), help="the disk to measure")
    options = parser.parse_args()
    heads = ("saves", "GiB each", "stall s", "longest", "to disk s", "s/step", "added")
    print(f"{'checkpoints':<20}" + "".join(f"{head:>11}" for head in heads))
    baseline = 0.0
    for name, every, blocking in (
        ("none", 0, False),
        ("background", options.every, False),
        ("blocking", options.every, True),
    ):
        with tempfile.TemporaryDirectory(prefix=".stall-", dir=options.folder) as scratch:
            lines, size = run(options.words, every, Path(scratch) / "run", blocking)
        steps = [line for line in lines if "train/loss" in line and line["train/step"] >= WARM_UP]
        step_seconds = (steps[-1]["time"] - steps[0]["time"]) / (steps[-1]["train/step"] - steps[0]["train/step"])
        baseline = baseline or step_seconds
        stalls = [line["checkpoint/stall_seconds"] for line in lines if "checkpoint/stall_seconds" in line]
        spent = [line["checkpoint/seconds"] for line in lines if "checkpoint/seconds" in line]
        print(
            f"{name:<20}{len(stalls):>11}{size / 2**30:>11.3f}{statistics.median(stalls):>11.4f}{max(stalls):>11.4f}"
            f"{statistics.median(spent):>11.3f}{step_seconds:>11.4f}{step_seconds / baseline - 1:>11.1%}",
            flush=True,
        )


def run(words: list[str], every: int, folder: Path, blocking: bool) -> tuple[list[dict[str, float]], int]:
    """Train. Returns the lines of metrics.jsonl and the bytes of a checkpoint.

    `blocking`: training waits for each save, as on a host without memory for a copy.
    """
    from fxtune.checkpoint.host_copy import HostCopy
    from fxtune.config import compose
    from fxtune.training import trainer

    config = compose.load(
        [
            "train.max_steps=60",
            *words,
            f"checkpoint.every={every}",
            "checkpoint.keep_best=false",
            "train.eval_every=0",
            "data.questions.path=null",
            "tracking.display=none",
            "train.log_every=1",
        ]
    )
    config.run.dir = str(folder)
    with mock.patch.object(HostCopy, "take", return_value=None) if blocking else mock.MagicMock():
        trainer.run(config)
    newest = max((folder / "checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in newest.iterdir())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], size


if __name__ == "__main__":
    main()
