"""How long training stands still for a checkpoint: the same run without checkpoints, with, and with ones written while it waits.

    python scripts/bench/stall.py +recipe=quickstart                                     # on a CPU, a minute
    python scripts/bench/stall.py +recipe=llama_lora train.max_steps=40 --every 10       # any recipe and keys

Each run takes `train.max_steps` steps (60, unless the words say otherwise) in a folder that is thrown away, below --folder: it is
that disk which is measured. Printed are, from each run's own metrics.jsonl: the seconds that the loop stood still for a save, the
seconds until the save was on the disk, and what the saves add to the run's time over all its steps but the first ten.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of a checkout that is not installed
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "words", nargs="*", default=["+recipe=quickstart"], help="recipe and keys, as fxtune takes them"
    )
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--folder", type=Path, default=Path("."), help="the disk to measure")
    options = parser.parse_args()
    heads = ("saves", "GiB each", "stall s", "longest", "to disk s", "s a step", "added")
    print(f"{'checkpoints':<20}" + "".join(f"{head:>11}" for head in heads))
    alone = 0.0
    for name, every in (("none", 0), ("in the background", options.every), ("while training waits", options.every)):
        with tempfile.TemporaryDirectory(prefix=".stall-", dir=options.folder) as scratch:
            lines, size = run(options.words, every, Path(scratch) / "run", waits=name.startswith("while"))
        steps = [line for line in lines if "train/loss" in line and line["train/step"] >= WARM_UP]
        each = (steps[-1]["time"] - steps[0]["time"]) / (steps[-1]["train/step"] - steps[0]["train/step"])
        alone = alone or each
        stalls = [line["checkpoint/stall_seconds"] for line in lines if "checkpoint/stall_seconds" in line]
        spent = [line["checkpoint/seconds"] for line in lines if "checkpoint/seconds" in line]
        print(
            f"{name:<20}{len(stalls):>11}{size / 2**30:>11.3f}{statistics.median(stalls):>11.4f}{max(stalls):>11.4f}"
            f"{statistics.median(spent):>11.3f}{each:>11.4f}{each / alone - 1:>11.1%}",
            flush=True,
        )


def run(words: list[str], every: int, folder: Path, waits: bool) -> tuple[list[dict[str, float]], int]:
    """Train; the lines of metrics.jsonl, and the bytes of a checkpoint. `waits`: as on a host that has no memory for a copy."""
    from fxtune.checkpoint.host_copy import HostCopy
    from fxtune.config import compose
    from fxtune.training import trainer

    chosen = compose.load(
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
    chosen.run.dir = str(folder)
    with mock.patch.object(HostCopy, "take", return_value=None) if waits else mock.MagicMock():
        trainer.run(chosen)
    newest = max((folder / "checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in newest.iterdir())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], size


if __name__ == "__main__":
    main()
