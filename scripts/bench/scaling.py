"""Compares fxtune on several cards with fxtune on one: the same case of bench_peers.py, measured by the same process.

    python scripts/bench/scaling.py --gpus 1,2,4 --json scaling.json                # 8B LoRA, 4 x 4,096 a card
    python scripts/bench/scaling.py --gpus 1,2 --cases 8b_4x4096,8b_4x4096_fp8 --set techniques.lora.fused=off
    python scripts/bench/scaling.py --gpus 1,2 --smoke                              # a short test of two CPU processes

Each card has the same rows on any number of cards; in a case of `context`, the cards share each row. The table has
tokens/s in all, their ratio to N times one card, how far the slowest rank is behind the others, and the share of a step
in which the first card does nothing but exchange with the others (NCCL kernels that no other kernel hides, by torch's
profiler in two further steps). What the file of --json already holds does not run again. docs/distributed.md has
figures of two and four cards.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for a checkout that is not installed
sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import baselines  # noqa: E402
import bench_peers  # noqa: E402
from baselines import Measurement  # noqa: E402

from fxtune.system.process.process_group import run_process  # noqa: E402
from fxtune.tuning import trial  # noqa: E402


def main() -> None:
    args = arguments()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    args.scratch.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text())
    for name in args.cases:
        for gpus in args.gpus:
            if str(gpus) in found.setdefault(name, {}):
                continue
            if why := bench_peers.reason_not_to_run("fxtune", args.smoke, gpus):
                sys.exit(f"{name} on {gpus}: {why}")
            print(f"{name} on {gpus} ...", flush=True)
            found[name][str(gpus)] = measure(name, gpus, args)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    print(table(found))
    baselines.save(args.baseline, [measurement(name, gpus, run) for name, gpus, run in runs(found)], max(args.gpus))


def runs(found: dict[str, dict[str, dict[str, Any]]]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(case, cards, figures) of each run, by the number of cards."""
    for name, counts in found.items():
        for gpus, figures in sorted(counts.items(), key=lambda run: int(run[0])):
            yield name, int(gpus), figures


def measurement(name: str, gpus: int, figures: dict[str, Any]) -> Measurement:
    """A run as a file of benchmarks/baselines holds it."""
    case, exchange = bench_peers.CASES[name], figures["exchange_seconds"]
    return Measurement(
        name,
        shape=case.shape,
        rows=case.rows,
        length=case.length,
        tokens_per_second=round(figures["tokens_per_second"]),
        step_ms=round(1e3 * figures["step_seconds"]),
        memory_gib=round(figures["memory_gib"], 1),
        seconds_to_second_step=figures["second_step_seconds"] and round(figures["second_step_seconds"], 1),
        cards=gpus,
        exchange_share=None if exchange is None else round(exchange / figures["step_seconds"], 4),
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=counts, default=[1, 2], help="numbers of cards to compare (1,2)")
    parser.add_argument("--cases", type=lambda text: text.split(","), help=f"of {', '.join(bench_peers.CASES)}")
    parser.add_argument("--steps", type=int, help="measured steps; default: those of the case")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    baselines.add_option(parser)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "fxtune-peers")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape; works without a GPU")
    args = parser.parse_args()
    args.cases = args.cases or (["smoke"] if args.smoke else ["8b_4x4096"])
    if unknown := set(args.cases) - set(bench_peers.CASES):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(bench_peers.CASES)}")
    return args


def counts(text: str) -> list[int]:
    """The numbers of cards in a list such as 1,2,4."""
    numbers = [int(number) for number in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def measure(name: str, gpus: int, args: argparse.Namespace) -> dict[str, Any]:
    """What `fxtune bench --profile` measures of a case on `gpus` cards. Ends this script if it fails."""
    case = bench_peers.CASES[name]
    file = args.scratch / "scaling.json"
    words = bench_peers.fxtune_words(name, args, gpus)
    command = trial.bench_command(words, args.steps or case.steps, case.warm_up, file)
    code, output, _ = run_process([*command, "--profile"])
    if code:
        sys.exit(f"{name} on {gpus} failed:\n{output}")
    figures: dict[str, Any] = json.loads(file.read_text())
    return {key: value for key, value in figures.items() if key not in ("kernels", "techniques")}


def table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The table in Markdown. The ratio stays empty where one card was not measured."""
    lines = [
        "| case | cards | tokens/s | of N times one | slowest rank | exchange not hidden | peak GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, gpus, figures in runs(found):
        one = found[name].get("1", {}).get("tokens_per_second")
        speed, behind, exchange = (figures[key] for key in ("tokens_per_second", "slowest_behind", "exchange_seconds"))
        share = "" if exchange is None else f"{exchange / figures['step_seconds']:.2%}"
        ratio = f"{speed / one / gpus:.3f}" if one else ""
        lines.append(
            f"| {name} | {gpus} | {speed:,.0f} | {ratio} | "
            f"{'' if behind is None else f'{behind:+.1%}'} | {share} | {figures['memory_gib']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
