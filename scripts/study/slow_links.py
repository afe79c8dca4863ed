"""What the ways to add up gradients cost on a slow link: bytes and seconds of a step, and the loss after the same rows.

    sudo python scripts/study/slow_links.py --out runs/slow-links

Two ranks on the CPU fine-tune all weights of the tiny base (the data of `full_quickstart`). Each rank runs in a network
namespace of its own, and a veth pair joins the two; tc's token bucket (tbf) limits what each end sends. So this is a
full-duplex link of a stated bandwidth between two hosts, without latency beyond its queue. Creating namespaces takes
root; the machine's own network is not touched, and the namespaces end with their processes. The ranks are fxtune's own
training loop with gloo, as in `fxtune run.gpus=2 run.device=cpu`.

- Bytes: what a rank sends over its end of the link, from /proc/net/dev. This includes the headers of TCP and IP,
  acknowledgements, and the few bytes by which ranks agree on each step.
- Seconds: of a step on this CPU. The steps are divided into windows of 8 (9 to 16, 17 to 24, ...), and the lowest mean
  of a window counts, because other work on the machine slows some steps. A step of these runs has two rows of 128
  tokens, so that most of its time is the exchange.
- Loss: on the held-out rows after --steps steps of four rows of 512 tokens, for each seed, on the unlimited link.

It prints a table in Markdown and writes each figure to OUT/figures.json. A second call with the same OUT continues the
first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.99.0.1", "10.99.0.2")
WARM_UP = 16
"""Steps before the measured ones, in which PowerSGD sums whole gradients; a multiple of the longest average_every."""
WINDOW = 8
"""Steps that are timed together; a multiple of the longest average_every."""
SHORT = ["train.micro_batch_size=1", "train.global_batch_size=2", "data.sequence_length=128"]
"""The keys of a timed run."""
READY = "link-is-up"
MODES = {
    "float32": [],
    "bfloat16": ["parallel.compression=bfloat16"],
    "PowerSGD, rank 4": ["parallel.compression=powersgd"],
    "average_every=8": ["parallel.average_every=8"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the runs and figures.json")
    parser.add_argument("--steps", type=int, default=40, help="of a run for the loss; a multiple of 8")
    parser.add_argument("--timed", type=int, default=24, help="steps of a run for the time; a multiple of 8")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the runs for the loss")
    parser.add_argument("--mbit", type=int, nargs="*", default=[25, 100, 1000], help="bandwidths, Mbit/s each way")
    parser.add_argument("--words", nargs="*", default=[], help="further words of every run")
    args = parser.parse_args()
    if os.geteuid() != 0 or not all(map(shutil.which, ("tc", "ip", "unshare", "nsenter"))):
        sys.exit("slow_links.py makes network namespaces: run it as root, with iproute2 and util-linux installed.")
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = []
    for mode, words in MODES.items():
        jobs += [job(args, mode, words, seed, None, args.steps) for seed in args.seeds]
        jobs += [job(args, mode, words, 0, mbit, args.timed) for mbit in args.mbit]
    missing = [one for one in jobs if not (args.out / one["name"] / "measured.json").exists()]
    (args.out / "jobs.json").write_text(json.dumps(missing))
    if missing:
        on_two_hosts(args.out)
    for one in jobs:
        one |= json.loads((args.out / one["name"] / "measured.json").read_text())
    (args.out / "figures.json").write_text(json.dumps(jobs, indent=1))
    print(table(jobs, args.seeds, args.mbit))


def job(
    args: argparse.Namespace, mode: str, words: list[str], seed: int, mbit: int | None, steps: int
) -> dict[str, Any]:
    """A run of two ranks. `mbit` None: the link is not limited, and the run is evaluated at its end."""
    name = re.sub(r"\W+", "-", f"{mode} {seed} {mbit or 'unlimited'}")
    line = [
        "+recipe=full_quickstart",
        "run.device=cpu",
        f"run.dir={(args.out / name / 'run').resolve()}",
        "run.resume=never",
        f"run.seed={seed}",
        f"train.max_steps={steps}",
        *(SHORT if mbit else ["train.micro_batch_size=2"]),
        "data.questions.path=null",
        "data.eval_fraction=0.1",
        "checkpoint.every=0",
        "checkpoint.keep_best=false",
        "tracking.display=none",
        *words,
        *args.words,
    ]
    return {"name": name, "mode": mode, "seed": seed, "mbit": mbit, "steps": steps, "words": line}


def on_two_hosts(out: Path) -> None:
    """Run rank() for the jobs of `out` in two network namespaces with a link between them."""
    ranks = []
    (out / READY).unlink(missing_ok=True)
    for rank in range(2):
        command = ["unshare", "--net", "--", sys.executable, __file__, "rank", str(rank), str(out.resolve())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": ADDRESSES[0]}
        environment |= {"GLOO_SOCKET_IFNAME": f"link{rank}", "MASTER_PORT": "29500"}
        log = (out / f"rank-{rank}.log").open("w")
        ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks, below
    try:
        while any(os.readlink(f"/proc/{one.pid}/ns/net") == os.readlink("/proc/self/ns/net") for one in ranks):
            time.sleep(0.05)  # until unshare has acted
        first, second = (str(one.pid) for one in ranks)
        inside(first, f"ip link add link0 type veth peer name link1 netns {second}")
        for rank, process in enumerate((first, second)):
            inside(process, "ip link set lo up")
            inside(process, f"ip address add {ADDRESSES[rank]}/24 dev link{rank}")
            inside(process, f"ip link set link{rank} up")
        (out / READY).touch()
        codes = [one.wait() for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    if any(codes):
        sys.exit(f"The ranks ended with {codes}; see {out}/rank-0.log and rank-1.log.")


def inside(process: str, command: str) -> None:
    subprocess.run(["nsenter", "--target", process, "--net", *command.split()], check=True)


def rank(number: int, out: Path) -> None:
    """Run all jobs as rank `number`; rank 0 writes what it measured."""
    from fxtune.cli.main import main as fxtune
    from fxtune.training.trainer import Trainer

    link, marks, inner = f"link{number}", [], Trainer.step

    def step(self: Trainer, *given: Any) -> Any:
        metrics = inner(self, *given)
        marks.append((time.perf_counter(), sent(link)))
        return metrics

    Trainer.step = step  # type: ignore[method-assign]
    while not (out / READY).exists():
        time.sleep(0.1)
    for position, one in enumerate(json.loads((out / "jobs.json").read_text())):
        os.environ["MASTER_PORT"] = str(29500 + position)
        subprocess.run(["tc", "qdisc", "delete", "dev", link, "root"], check=False, stderr=subprocess.DEVNULL)
        if one["mbit"]:
            limit = ["rate", f"{one['mbit']}mbit", "burst", "128kb", "latency", "200ms"]
            subprocess.run(["tc", "qdisc", "add", "dev", link, "root", "tbf", *limit], check=True)
        marks.clear()
        if code := fxtune(one["words"]):
            sys.exit(code)
        if number == 0:
            ends = marks[WARM_UP - 1 :: WINDOW]  # the ends of the warm-up and of each window
            steps = (len(ends) - 1) * WINDOW
            result = json.loads((out / one["name"] / "run" / "result.json").read_text())
            measured = {
                "bytes": (ends[-1][1] - ends[0][1]) / steps,
                "seconds": min(later[0] - earlier[0] for earlier, later in pairwise(ends)) / WINDOW,
                "loss": result["eval/loss"],
            }
            (out / one["name"] / "measured.json").write_text(json.dumps(measured))


def sent(link: str) -> int:
    """Bytes that this network namespace has sent over `link`."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(f"{link}:"))
    return int(line.split(":")[1].split()[8])


def table(jobs: list[dict[str, Any]], seeds: list[int], bandwidths: list[int]) -> str:
    """The figures in Markdown, with a line for each mode."""
    head = ["", "MB sent a step and rank", *(f"s a step, {mbit} Mbit/s" for mbit in bandwidths)]
    head.append(f"held-out loss, seeds {', '.join(map(str, seeds))}")
    lines = [head, ["---"] * len(head)]
    for mode in MODES:
        own = [one for one in jobs if one["mode"] == mode]
        timed = {one["mbit"]: one for one in own if one["mbit"]}
        found = [one["loss"] for one in own if one["mbit"] is None]
        size = statistics.mean(one["bytes"] for one in timed.values()) / 1e6
        cells = [mode, f"{size:.2f}", *(f"{timed[mbit]['seconds']:.2f}" for mbit in bandwidths)]
        lines.append([*cells, ", ".join(f"{loss:.4f}" for loss in found) or "as with one"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
