"""Measures memory and speed of each technique, alone and combined, with `fxtune bench`. Prints one table.

    python scripts/bench/ablate.py --data docs.jsonl --json ablation.json  # a GPU, an hour and a half
    python scripts/bench/ablate.py --shapes 8b --lengths 65536 --minutes 9 --json ablation.json  # in parts: continues
    python scripts/bench/ablate.py --json ablation.json --minutes 0  # only the table
    python scripts/bench/ablate.py --smoke  # a short test on a CPU

Each case runs in its own process and uses the complete data path: it reads documents, tokenizes them, packs them into
full rows and trains LoRA r=16. Weights are random; speed and memory do not depend on their values. The figures are
what `fxtune bench` measures: the speed of the steps after the first WARM_UP ones, and the peak memory of the process. A
case that is refused or does not fit has a row with the reason. A case that the JSON file already holds does not run
again, unless it failed for another reason or --again is given.

Each technique is added to a base. The base is `plain` (LoRA, bfloat16, torch's own attention) where that fits. At
lengths where it does not fit, the base has the techniques that it needs to fit, and the row's name lists them (`full +
fused_loss`). Ratios are relative to that base.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]  # for a checkout that is not installed

import baselines  # noqa: E402
from baselines import Measurement  # noqa: E402
from shapes import DECODERS, in_words  # noqa: E402

WARM_UP = 2
"""Steps before the measured ones: they compile, tune and fill caches."""
LENGTHS = {4096: 4, 16384: 1, 65536: 1}
"""Tokens per row -> rows per micro-batch. Other lengths have one row."""


FULL = ("techniques.checkpointing.enabled=true", "techniques.checkpointing.policy=full")
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "flash4": ("techniques.attention.backend=flash4",),
    "liger": ("techniques.liger.enabled=true", "techniques.liger.kernels=[rms_norm,rope,swiglu]"),
    "fused_loss": ("techniques.liger.enabled=true", "techniques.liger.kernels=[fused_linear_cross_entropy]"),
    "compile": ("techniques.compile.enabled=true",),
    "full": FULL,
    "selective": (FULL[0], "techniques.checkpointing.policy=selective"),
    "offload": (*FULL, "techniques.checkpointing.offload=inputs"),
    "tiled_mlp": (*FULL, "techniques.checkpointing.mlp_tiles=8"),
    "nf4": ("techniques.quantize.enabled=true",),
}
"""The command-line keys of each technique."""
BASES: dict[int, tuple[str, ...]] = {65536: ("full", "fused_loss")}
"""The techniques of the base, by length. At other lengths the base is `plain`."""
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "base": (),
    "together": ("techniques=[fast,lora]",),
    "flash4": ("flash4",),
    "full": ("full",),
    "selective": ("selective",),
    "fused_loss": ("fused_loss",),
    "compile": ("compile",),
    "liger": ("liger",),
    "nf4": ("nf4",),
    "memory": ("techniques=[fast,lora,memory]",),
    "offload": ("offload",),
    "tiled_mlp": ("tiled_mlp",),
}
"""The rows, the most informative first: names in TECHNIQUES, or command-line keys.

`base` does not run where it equals `plain`.
"""

WITHOUT_BASE = ("plain", "together", "memory")
"""Cases that are not added to a base."""
POLICIES = ("selective", "offload", "tiled_mlp")
"""Cases that set the recompute policy themselves."""


def main() -> None:
    args = arguments()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rows: dict[str, dict[str, Any]] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    began = time.monotonic()
    left_out = []
    folder = Path(tempfile.mkdtemp(prefix="fxtune-ablate-"))
    try:
        for shape, length, case in cases_to_run(args.shapes, args.lengths, args.cases):
            key = f"{shape} {length} {case}"
            seconds = args.minutes * 60 - (time.monotonic() - began)
            if key in rows and not args.again and not rows[key].get("error", "").startswith("failed"):
                continue
            siblings = [row["seconds"] for row in rows.values() if (row["shape"], row["length"]) == (shape, length)]
            if seconds <= max(siblings, default=0):  # the time limit would interrupt it
                left_out.append(key)
                continue
            print(f"{key} ...", flush=True)
            row = measure(shape, length, case, args, folder, seconds)
            if row is None:
                left_out.append(key)
                continue
            rows[key] = row
            print(f"  {table_row(row, rows)}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    baselines.save(args.baseline, [measurement(row) for row in rows.values()])
    if left_out:
        print(f"\nNot run, the time limit ({args.minutes:g} minutes) was reached: {', '.join(left_out)}")


def arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=words, default=["8b", "1b"], help=f"choose from {', '.join(DECODERS)}")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--cases", type=words, default=list(CASES), help=f"choose from {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=6, help=f"steps per run, {WARM_UP} of them warm-up")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time and list what did not run")
    parser.add_argument(
        "--data", type=Path, help="documents; default: text of this machine, collected by scripts/make/gather.py"
    )
    parser.add_argument("--json", type=Path, help="add the rows to this file; cases that it holds do not run again")
    parser.add_argument("--again", action="store_true", help="also run the cases that the file holds")
    baselines.add_option(parser)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, rows of 256 tokens, 4 steps")
    args = parser.parse_args()
    if args.smoke:
        args.shapes, args.lengths, args.steps = ["tiny"], [256], WARM_UP + 2
    for given, known in ((args.shapes, DECODERS), (args.cases, CASES)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}, the number of warm-up steps")
    return args


def cases_to_run(shapes: list[str], lengths: list[int], cases: list[str]) -> Iterable[tuple[str, int, str]]:
    """(shape, length, case), the most informative case first, each with all shapes and lengths."""
    for case in cases:
        for length in lengths:
            for shape in shapes:
                base = BASES.get(length, ())
                if not ((case == "base" and not base) or case in base):
                    yield shape, length, case


def parts(length: int, case: str) -> list[str]:
    """The parts of this case at this length: names in TECHNIQUES, and command-line keys."""
    if case in WITHOUT_BASE:
        return list(CASES[case])
    base = [name for name in BASES.get(length, ()) if not (name == "full" and case in POLICIES)]
    return [*base, *CASES[case]]


def settings(length: int, case: str) -> list[str]:
    """The command-line keys of this case at this length."""
    names = parts(length, case)
    keys = [key for name in names for key in TECHNIQUES.get(name, (name,))]
    if {"liger", "fused_loss"} <= {*names}:  # each names its own kernels
        keys = [key for key in keys if not key.startswith("techniques.liger.kernels")]
    if not any(key.startswith("techniques=") for key in keys):
        keys = [
            "techniques=lora",
            "techniques.precision.autocast=bfloat16",
            *([] if "flash4" in names else ["techniques.attention.backend=sdpa"]),
            *keys,
        ]
    return list({key.partition("=")[0]: key for key in keys}.values())


def measure(
    shape: str, length: int, case: str, args: argparse.Namespace, folder: Path, seconds: float
) -> dict[str, Any] | None:
    """Run one case. Returns its row, or None if `seconds` were not enough."""
    from fxtune.diagnostics.benchmark import measure_in_process

    rows = LENGTHS.get(length, 1)
    words = [
        "model.path=null",
        "model.tokenizer=builtin:tiny",
        "model.init=random",
        f"model.architecture={in_words(DECODERS[shape])}",
        f"data.sources=[{{path: '{documents(args, folder)}'}}]",
        f"data.cache_dir={folder / 'cache'}",
        f"data.sequence_length={length}",
        f"train.micro_batch_size={rows}",
        f"train.global_batch_size={rows}",
        *settings(length, case),
    ]
    row: dict[str, Any] = dict(shape=shape, length=length, rows=rows, case=case, command=settings(length, case))
    began = time.monotonic()
    try:
        found = measure_in_process(words, args.steps - WARM_UP, WARM_UP, seconds)
    except TimeoutError:
        return None
    row["seconds"] = round(time.monotonic() - began, 1)
    kept = ("error", "tokens_per_second", "step_seconds", "mfu", "memory_gib")
    return {**row, **{name: found[name] for name in kept if name in found}}


def documents(args: argparse.Namespace, folder: Path) -> Path:
    """The training documents: --data, or text of this machine, about 15k tokens each."""
    if args.data:
        return args.data.resolve()
    file = folder / "documents.jsonl"
    if not file.exists():
        options = ["--max-mb", "8", "--join", "package", "--length", "40000"]
        command = [sys.executable, ROOT / "scripts" / "make" / "gather.py", file, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return file


def base_of(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the base that this one is compared with, or None if it was not measured."""
    case = "base" if BASES.get(row["length"]) else "plain"
    found = rows.get(f"{row['shape']} {row['length']} {case}", {})
    return found if "tokens_per_second" in found else None


def measurement(row: dict[str, Any]) -> Measurement:
    """A row as a file of benchmarks/baselines holds it."""
    names = {"together": "`techniques=[fast,lora]`", "memory": "`techniques=[fast,lora,memory]`"}
    alone = row["case"] in WITHOUT_BASE or row["case"] == "base"
    return Measurement(
        names.get(row["case"]) or (label(row) if alone else f"+ {row['case']}"),
        keys=row["command"],
        shape=row["shape"],
        rows=row["rows"],
        length=row["length"],
        packed=True,
        tokens_per_second=None if "error" in row else round(row["tokens_per_second"]),
        step_ms=None if "error" in row else round(1e3 * row["step_seconds"]),
        memory_gib=None if "error" in row else round(row["memory_gib"], 2),
        error=row.get("error", ""),
    )


def label(row: dict[str, Any]) -> str:
    return (
        " + ".join(["plain", *parts(row["length"], row["case"])]) if row["case"] not in WITHOUT_BASE else row["case"]
    )


def table_row(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """One row of the table, in Markdown."""
    where = f"| {row['shape']} | {row['rows']} x {row['length']:,} | {label(row)} |"
    if "error" in row:
        return f"{where} {row['error']} | | | | | |"
    base = base_of(row, rows)
    speed = f"{row['tokens_per_second'] / base['tokens_per_second']:.2f}x" if base else ""
    memory = f"{row['memory_gib'] / base['memory_gib']:.2f}x" if base else ""
    mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else ""
    return (
        f"{where} {row['tokens_per_second']:,.0f} | {row['step_seconds'] * 1000:,.0f} | {row['memory_gib']:.1f} | {mfu} | "
        f"{speed} | {memory} |"
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    order = {name: index for index, name in enumerate(CASES)}
    sizes = {name: index for index, name in enumerate(DECODERS)}
    lines = [
        "| shape | batch | techniques | tokens/s | ms/step | peak GiB | MFU | speed | memory |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows.values(), key=lambda each: (sizes[each["shape"]], each["length"], order[each["case"]])):
        lines.append(table_row(row, rows))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
