"""Measures the seconds from the command to the end of the second step, by part, with empty and with filled caches.

    python scripts/bench/first_step.py                                # tiny, 8b, moe: cold, then warm; about 9 minutes
    python scripts/bench/first_step.py --cases tiny --minutes 3       # some of them
    python scripts/bench/first_step.py --cases quickstart             # the quickstart on this machine, GPU or CPU
    python scripts/bench/first_step.py --cases 8b,dpo --tools fxtune,trl  # also a peer, by the same rule
    python scripts/bench/first_step.py --json start.json              # all figures, for programs

Each measurement is `fxtune bench --steps 1 --warm-up 2` in its own process, which waits for the device after each of
the first two steps. `cold` starts with an empty folder for all that fxtune, torch, Triton and the kernel packages
cache (environment()); the files of the packages themselves may be in the memory of the machine. `warm` is the same
command again, over the folder that `cold` filled. Models have random weights, so no file of a model is read. Python's
compiled files are present: if torch has none, a first run of each tool that is not measured makes them. A peer runs
its part of bench_peers.py, so its row has no parts.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import baselines  # noqa: E402
import bench_peers  # noqa: E402
from baselines import Measurement  # noqa: E402

CASES = {"quickstart": None, "tiny": None, "8b": "8b_4x4096", "moe": "moe_4x4096", "dpo": "dpo_8b_8x1024"}
"""Name -> the case of bench_peers.py; None: the quickstart, whose model is tiny, as it is or with kernels of a GPU."""
DEFAULT = ("tiny", "8b", "moe")
GOALS = {
    ("tiny", "warm"): 13,
    ("8b", "warm"): 20,
    ("8b", "cold"): 50,
    ("moe", "warm"): 30,
    ("moe", "cold"): 60,
    ("dpo", "warm"): 25,
}
"""Seconds on one H100 that fxtune wants to stay below."""


def main() -> None:
    args = arguments()
    began, rows = time.monotonic(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="fxtune-start-") as folder:
        bytecode = (
            None if has_bytecode() else make_bytecode(words_of(args.cases[0], Path(folder)), Path(folder) / "first")
        )
        for name, tool in itertools.product(args.cases, args.tools):
            words, cache = words_of(name, Path(folder)), Path(folder) / f"cache-{name}-{tool}"
            if bytecode and bytecode.is_dir():
                (cache / "fxtune").mkdir(parents=True)
                (cache / "fxtune" / "bytecode").symlink_to(bytecode)
            start = partial(measure, words) if tool == "fxtune" else partial(measure_peer, name, tool, bytecode)
            if bytecode and tool != "fxtune":
                start(Path(folder) / f"first-{name}-{tool}", 300)
            for state in ("cold", "warm"):
                row = f"{name} {state}" + f" {tool}" * (tool != "fxtune")
                left = args.minutes * 60 - (time.monotonic() - began)
                if left <= 0:
                    print(f"{row}: not run, the time limit ({args.minutes:g} minutes) was reached")
                    continue
                print(f"{row} ...", flush=True)
                rows[row] = found = start(cache, left)
                print(f"  {found.get('error') or format(found['second_step_seconds'], '.1f') + ' s'}", flush=True)
    print(table(rows))
    baselines.save(args.baseline, [measurement(name, row) for name, row in rows.items()])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(DEFAULT), help=", ".join(CASES))
    parser.add_argument("--tools", type=lambda text: text.split(","), default=["fxtune"], help="fxtune, trl, unsloth")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no measurement after this time (9)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    baselines.add_option(parser)
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(CASES)}")
    if args.tools != ["fxtune"] and (own := [name for name in args.cases if CASES[name] is None]):
        parser.error(f"{', '.join(own)}: a case of fxtune alone")
    return args


def words_of(name: str, scratch: Path) -> list[str]:
    """fxtune's keys for a case."""
    if (case := CASES[name]) is None:
        fast = ["techniques=[lora,fast]"] if name == "tiny" else []
        return ["+recipe=quickstart", *fast]
    given = argparse.Namespace(scratch=scratch, steps=1, smoke=False, set=[])
    return bench_peers.fxtune_words(case, given, 1)


def has_bytecode() -> bool:
    """Whether torch was installed with Python's compiled files."""
    spec = importlib.util.find_spec("torch")
    return spec is None or not spec.cached or os.path.exists(spec.cached)


def make_bytecode(words: list[str], cache: Path) -> Path:
    """Run a case, and return the folder in which fxtune then keeps compiled files of Python."""
    print("compiling Python's files ...", flush=True)
    measure(words, cache, 300)
    return cache / "fxtune" / "bytecode"


def environment(cache: Path) -> dict[str, str]:
    """The variables by which fxtune and the libraries under it keep all that they cache in `cache`."""
    folders = {
        "XDG_CACHE_HOME": "",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash4",
        "QUACK_CACHE_DIR": "quack",
    }
    return {**os.environ, **{name: str(cache / folder) for name, folder in folders.items()}}


def measure(words: list[str], cache: Path, seconds: float) -> dict[str, Any]:
    """The figures of `fxtune bench`, or `{"error": reason}`. The reason is the end of what it printed."""
    cache.mkdir(parents=True, exist_ok=True)
    result = cache / "bench.json"
    command = [sys.executable, "-m", "fxtune", "bench", *words, "data.cache_dir=null", "tracking.display=none"]
    started = time.time()
    try:
        done = subprocess.run(
            [*command, "--steps", "1", "--warm-up", "2", "--json", str(result)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment(cache),
            timeout=max(seconds, 1.0),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "the time limit was reached"}
    if done.returncode:
        return {"error": (done.stderr.strip() or done.stdout.strip())[-600:]}
    found = json.loads(result.read_text())
    kept = ("first_step_seconds", "second_step_seconds", "startup_seconds", "compile_seconds", "loss", "device")
    return {**{key: found[key] for key in kept}, "whole_seconds": time.time() - started, "packages": found["packages"]}


def measure_peer(name: str, tool: str, bytecode: Path | None, cache: Path, seconds: float) -> dict[str, Any]:
    """The figures of a peer. `bytecode`: the folder for compiled files of Python; None: packages have them."""
    cache.mkdir(parents=True, exist_ok=True)
    case = CASES[name]
    assert case is not None
    variables = environment(cache) | (
        {"PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONDONTWRITEBYTECODE": ""} if bytecode else {}
    )
    given = argparse.Namespace(scratch=cache, steps=1, smoke=False, set=[], gpus=1, json=None, again=True)
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        found = bench_peers.run_peer(case, tool, given, seconds)
    except subprocess.TimeoutExpired:
        return {"error": "the time limit was reached"}
    finally:
        os.environ.clear()
        os.environ.update(before)
    return found if "error" in found else {key: found[key] for key in ("second_step_seconds", "loss", "device")}


def measurement(name: str, row: dict[str, Any]) -> Measurement:
    """A row as a file of benchmarks/baselines holds it."""
    if "error" in row:
        return Measurement(name, error=row["error"])
    return Measurement(
        name,
        seconds_to_first_step=round(row["first_step_seconds"], 1) if "first_step_seconds" in row else None,
        seconds_to_second_step=round(row["second_step_seconds"], 1),
        startup_seconds={part: round(seconds, 1) for part, seconds in row.get("startup_seconds", {}).items()} or None,
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown: a column for each part of the start."""
    measured = [row for row in rows.values() if "error" not in row]
    parts = list(dict.fromkeys(part for row in measured for part in row.get("startup_seconds", {})))
    columns = ["case", "s to step 1", "s to step 2", "goal", *parts, "in torch.compile"]
    lines = ["", f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for name, row in rows.items():
        case, _, state = name.partition(" ")
        if "error" in row:
            cells = [row["error"].replace("\n", " "), *[""] * (len(columns) - 2)]
        else:
            goal, own = GOALS.get((case, state)), row.get("startup_seconds", {})
            times = [*map(row.get, ("first_step_seconds", "second_step_seconds")), *map(own.get, parts)]
            cells = ["" if seconds is None else f"{seconds:.1f}" for seconds in (*times, row.get("compile_seconds"))]
            cells.insert(2, str(goal or ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
