"""How long a run takes to answer a scheduler: from the signal to the checkpoint on the disk, and to the end of the process.

    python scripts/faults/preempt.py [--stops 50] [--seed 0] [--json FILE] [+recipe=NAME key=value ...]

One run is told to end again and again at random instants, by SIGTERM and by SIGUSR1 in turn, and started again by the same words.
Each time it must end with 75, and its newest checkpoint must be of the last step in metrics.jsonl. Without words it is LoRA on a
small random Llama on a CPU. The runs are forked from a parent that has imported everything, so that a stop costs a second or two
(on a GPU, which a fork cannot use, they are not); what is measured begins with the signal and has no part in that. Ctrl-C ends it
with what was measured so far.
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
    """Start the run, signal it `after` seconds into its steps; seconds to the checkpoint (None: there was nothing new to save)
    and to the end.
    """
    forked = server.start(words, folder)
    assert forked.until("training", 2), tail(folder)  # the first step may compile for longer than `within`
    time.sleep(after)
    began = time.monotonic()
    os.kill(forked.pid, how)
    code = forked.wait()
    ended = time.monotonic()
    assert code == 75, f"it ended with {code}: {tail(folder)}"
    saved = [end for _, end in Traced.read(forked.file).spans("saving") if end > began]
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["train/step"]
    newest = max(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").glob("step-*"))
    assert newest == last, f"the checkpoint is of step {newest}, and step {last} was done"
    return saved[-1] - began if saved else None, ended - began


def told(what: str, seconds: list[float]) -> str:
    share = statistics.quantiles(seconds * 2 if len(seconds) == 1 else seconds, n=100, method="inclusive")
    return f"{what:<28} p50 {share[49]:.2f} s   p95 {share[94]:.2f} s   most {max(seconds):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--stops", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=2.0, help="seconds of the steps in which a signal falls")
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
                if options.json:  # each time: what is measured outlives a job that is killed
                    options.json.write_text(json.dumps({"saved": saved, "ended": ended}, indent=1))
        print(f"{len(ended)} stops by SIGTERM and SIGUSR1, each ended with 75 and with the last step's checkpoint")
        if saved:
            print(told("signal to saved checkpoint", saved), f"  ({len(saved)} with something new to save)")
        if ended:
            print(told("signal to the process's end", ended))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
