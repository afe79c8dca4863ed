"""Measures how fast a run stops for a scheduler: from the signal to the saved checkpoint, and to the end of the
process.

    python scripts/faults/preempt.py [--stops 50] [--seed 0] [--json FILE] [+recipe=NAME key=value ...]

The script stops one run at random instants, by SIGTERM and SIGUSR1 in turn, and starts it again with the same command.
Each time the exit code must be 75, and the newest checkpoint must be of the last step in metrics.jsonl. Without a
recipe the run trains LoRA on a small random Llama on a CPU. On a CPU the runs are forked from a parent that has
imported all packages, so a stop takes one or two seconds; CUDA cannot be used after a fork. The measured time begins
with the signal, so the start does not count. Ctrl-C ends the script and prints the results so far.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.endings import Traced
from support.harness import command
from support.killing import ForkServer, Processes, tail

ENDLESS = ["train.max_steps=1000000", "train.epochs=1000000", "checkpoint.every=0", "train.log_every=1"]


def stop_once(
    server: ForkServer | Processes, words: list[str], folder: Path, how: signal.Signals, after: float
) -> tuple[float | None, float]:
    """Start the run and send it the signal `how`, `after` seconds into its steps.

    Returns the seconds to the checkpoint (None if there was nothing new to save) and to the end of the process.
    """
    forked = server.start(words, folder)
    assert forked.until("training", 2), tail(folder)  # the first step may compile for longer than `within`
    time.sleep(after)
    began = time.monotonic()
    os.kill(forked.pid, how)
    code = forked.wait()
    ended = time.monotonic()
    assert code == 75, f"the run ended with {code}: {tail(folder)}"
    saved = [end for _, end in Traced.read(forked.file).spans("saving") if end > began]
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["train/step"]
    newest = max(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").glob("step-*"))
    assert newest == last, f"the newest checkpoint is of step {newest}, but the run finished step {last}"
    return saved[-1] - began if saved else None, ended - began


def percentiles(label: str, seconds: list[float]) -> str:
    values = statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=100, method="inclusive")
    return f"{label:<28} p50 {values[49]:.2f} s   p95 {values[94]:.2f} s   max {max(seconds):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--within", type=float, default=2.0, help="latest instant of a signal, in seconds after the first step"
    )
    parser.add_argument("--json", type=Path)
    options, words = parser.parse_known_args()
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="fxtune-preempt-"))
    try:
        line = (
            [*words, "run.dir=run", "tracking.display=plain", *ENDLESS]
            if words
            else command(folder, "run.device=cpu", *ENDLESS)
        )
        saved, ended = [], []
        with (
            Processes() if words and torch.cuda.is_available() else ForkServer() as server,
            suppress(KeyboardInterrupt),
        ):
            for how in islice(cycle((signal.SIGTERM, signal.SIGUSR1)), options.stops):
                at, end = stop_once(server, line, folder, how, draw.uniform(0, options.within))
                saved += [at] if at is not None else []
                ended.append(end)
                if options.json:  # after each stop, so that the results outlive a killed job
                    options.json.write_text(json.dumps({"saved": saved, "ended": ended}, indent=1))
        print(f"{len(ended)} stops by SIGTERM and SIGUSR1, each with exit code 75 and a checkpoint of the last step")
        if saved:
            print(percentiles("signal to saved checkpoint", saved), f"  ({len(saved)} stops had steps to save)")
        if ended:
            print(percentiles("signal to process end", ended))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
