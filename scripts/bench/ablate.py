"""The memory and the time of each technique, alone and together: each by `fxtune bench`, in one table and one plot.

    python scripts/bench/ablate.py --data docs.jsonl --json ablation.json --plot docs/ablation.svg      # a GPU, an hour and a half
    python scripts/bench/ablate.py --shapes 8b --lengths 65536 --minutes 9 --json ablation.json         # in pieces: goes on
    python scripts/bench/ablate.py --json ablation.json --minutes 0 --plot docs/ablation.svg            # only table and plot
    python scripts/bench/ablate.py --smoke                                                              # on a CPU: does it run at all?

Each row is a process of its own, through the whole data path: documents are read, tokenised and packed into rows of full
length, weights are drawn at random (speed and memory do not depend on their values), LoRA r=16 is trained. Its figures are
those of `fxtune bench`: of the steps after the first WARM_UP ones, and the peak of all of it. What is refused or does not fit
is a row that says so. A case that stands in the JSON file is not run again (--again does), unless it failed for another reason.

A technique is put on top of a base: `plain` where that fits (LoRA, bfloat16, torch's own attention), at lengths where plain
does not fit what it needs to fit, which the row's name tells (`full + fused_loss`). Ratios are to that base.
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
sys.path.insert(0, str(ROOT))  # of a checkout that is not installed
WARM_UP = 2
"""Steps that compile, tune and fill caches."""
LENGTHS = {4096: 4, 16384: 1, 65536: 1}
"""Tokens in a row -> rows in a micro-batch; another length has one row."""

_LLAMA = dict(model_type="llama", vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0)
SHAPES: dict[str, dict[str, Any]] = {
    "8b": dict(
        _LLAMA,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "1b": dict(
        _LLAMA,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        _LLAMA,
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}
KERNELS = ("rms_norm", "layer_norm", "rope", "swiglu", "geglu")
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "flash4": ("techniques.attention.backend=flash4",),
    "liger": ("techniques.liger.enabled=true", "techniques.liger.fused_linear_cross_entropy='off'"),
    "fused_loss": ("techniques.liger.enabled=true", *(f"techniques.liger.{name}='off'" for name in KERNELS)),
    "compile": ("techniques.compile.enabled=true",),
    "full": ("techniques.checkpointing.enabled=true", "techniques.checkpointing.policy=full"),
    "selective": ("techniques.checkpointing.enabled=true", "techniques.checkpointing.policy=selective"),
    "offload": (
        "techniques.checkpointing.enabled=true",
        "techniques.checkpointing.policy=full",
        "techniques.checkpointing.offload=true",
    ),
    "tiled_mlp": (
        "techniques.checkpointing.enabled=true",
        "techniques.checkpointing.policy=full",
        "techniques.checkpointing.mlp_tiles=8",
    ),
    "nf4": ("techniques.quantize.enabled=true",),
}
"""What each technique adds to the command line."""
BASES: dict[int, tuple[str, ...]] = {65536: ("full", "fused_loss")}
"""What a technique is put on top of, by length; nothing at any other length."""
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
"""The rows, the most telling first: names in TECHNIQUES, or keys of the command line. `base` is left out where it is plain."""

ALONE = ("plain", "together", "memory")
"""Cases that stand on no base."""
POLICIES = ("selective", "offload", "tiled_mlp")
"""Cases that say themselves what is recomputed."""


def main() -> None:
    args = arguments()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rows: dict[str, dict[str, Any]] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    began = time.monotonic()
    left_out = []
    folder = Path(tempfile.mkdtemp(prefix="fxtune-ablate-"))
    try:
        for shape, length, case in wanted(args.shapes, args.lengths, args.cases):
            key = f"{shape} {length} {case}"
            seconds = args.minutes * 60 - (time.monotonic() - began)
            if key in rows and not args.again and not rows[key].get("error", "").startswith("failed"):
                continue
            siblings = [row["seconds"] for row in rows.values() if (row["shape"], row["length"]) == (shape, length)]
            if seconds <= max(siblings, default=0):  # it would be broken off
                left_out.append(key)
                continue
            print(f"{key} ...", flush=True)
            row = measure(shape, length, case, args, folder, seconds)
            if row is None:
                left_out.append(key)
                continue
            rows[key] = row
            print(f"  {line(row, rows)}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    if left_out:
        print(f"\nNot run, the time ({args.minutes:g} minutes) was over: {', '.join(left_out)}")
    if args.plot:
        plot(rows, args.plot)


def arguments() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=words, default=["8b", "1b"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--cases", type=words, default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=6, help=f"of each run, {WARM_UP} of them to warm up")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop in time and say what was not run")
    parser.add_argument(
        "--data", type=Path, help="documents; default: text at hand, gathered by scripts/make/gather.py"
    )
    parser.add_argument("--json", type=Path, help="add the rows to this file; what stands there is not run again")
    parser.add_argument("--again", action="store_true", help="run also what stands there")
    parser.add_argument("--plot", type=Path, help="an .svg or .png")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, rows of 256 tokens, 4 steps")
    args = parser.parse_args()
    if args.smoke:
        args.shapes, args.lengths, args.steps = ["tiny"], [256], WARM_UP + 2
    for given, known in ((args.shapes, SHAPES), (args.cases, CASES)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be above the {WARM_UP} that warm up")
    return args


def wanted(shapes: list[str], lengths: list[int], cases: list[str]) -> Iterable[tuple[str, int, str]]:
    """(shape, length, case), the most telling first: all shapes and lengths of the first case, then of the second."""
    for case in cases:
        for length in lengths:
            for shape in shapes:
                base = BASES.get(length, ())
                if not ((case == "base" and not base) or case in base):
                    yield shape, length, case


def parts(length: int, case: str) -> list[str]:
    """What this case is made of at this length: names in TECHNIQUES, and keys of the command line."""
    if case in ALONE:
        return list(CASES[case])
    base = [name for name in BASES.get(length, ()) if not (name == "full" and case in POLICIES)]
    return [*base, *CASES[case]]


def settings(length: int, case: str) -> list[str]:
    """The keys of the command line that make this case at this length."""
    names = parts(length, case)
    keys = [key for name in names for key in TECHNIQUES.get(name, (name,))]
    if {"liger", "fused_loss"} <= {*names}:  # neither switches the other off
        keys = [key for key in keys if not (key.startswith("techniques.liger.") and "off" in key)]
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
    """Run one case; its row, or None where `seconds` were not enough."""
    from fxtune.diagnostics.benchmark import measure_in_process

    rows = LENGTHS.get(length, 1)
    architecture = ",".join(
        f"{key}:{str(value).lower() if isinstance(value, bool) else value}" for key, value in SHAPES[shape].items()
    )
    words = [
        "model.path=null",
        "model.tokenizer=builtin:tiny",
        "model.init=random",
        f"model.architecture={{{architecture}}}",
        f"data.sources=[{{path: '{documents(args, folder)}'}}]",
        f"data.cache_dir={folder / 'cache'}",
        f"data.sequence_length={length}",
        f"train.micro_batch_size={rows}",
        f"train.global_batch_size={rows}",
        *settings(length, case),
    ]
    row: dict[str, Any] = {
        "shape": shape,
        "length": length,
        "rows": rows,
        "case": case,
        "command": settings(length, case),
    }
    began = time.monotonic()
    try:
        found = measure_in_process(words, args.steps - WARM_UP, WARM_UP, seconds)
    except TimeoutError:
        return None
    row["seconds"] = round(time.monotonic() - began, 1)
    kept = ("error", "tokens_per_second", "step_seconds", "mfu", "memory_gib")
    return {**row, **{name: found[name] for name in kept if name in found}}


def documents(args: argparse.Namespace, folder: Path) -> Path:
    """The documents to train on: those given, or text at hand on this machine, some 15k tokens each."""
    if args.data:
        return args.data.resolve()
    file = folder / "documents.jsonl"
    if not file.exists():
        subprocess.run(
            [
                sys.executable,
                str(ROOT / "scripts" / "make" / "gather.py"),
                str(file),
                "--max-mb",
                "8",
                "--join",
                "package",
                "--length",
                "40000",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return file


def base_of(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The row that this one is compared with; None where that was not measured."""
    case = "base" if BASES.get(row["length"]) else "plain"
    found = rows.get(f"{row['shape']} {row['length']} {case}", {})
    return found if "tokens_per_second" in found else None


def label(row: dict[str, Any]) -> str:
    return " + ".join(["plain", *parts(row["length"], row["case"])]) if row["case"] not in ALONE else row["case"]


def line(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
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
    sizes = {name: index for index, name in enumerate(SHAPES)}
    lines = [
        "| shape | batch | techniques | tokens/s | ms a step | peak GiB | MFU | speed | memory |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in sorted(rows.values(), key=lambda each: (sizes[each["shape"]], each["length"], order[each["case"]])):
        lines.append(line(row, rows))
    return "\n".join(lines)


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Tokens a second and peak memory, two panels for each shape and length; what did not run says why."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "fxtune", "font.size": 8, "font.sans-serif": ["DejaVu Sans"]}
    )
    shapes = [shape for shape in SHAPES if any(row["shape"] == shape for row in rows.values())]
    lengths = sorted({row["length"] for row in rows.values()})
    cases = [case for case in CASES if any(row["case"] == case for row in rows.values())]
    figure, panels = pyplot.subplots(
        len(shapes) * 2, len(lengths), figsize=(4 * len(lengths), 5.2 * len(shapes)), squeeze=False, sharey=True
    )
    colors = {"plain": "darkgray", "base": "darkgray", "together": "tab:orange", "memory": "tab:green"}
    for down, shape in enumerate(shapes):
        for across, length in enumerate(lengths):
            for offset, (key, unit, digits) in enumerate(
                (("tokens_per_second", "tokens/s", 0), ("memory_gib", "peak GiB", 1))
            ):
                panel = panels[2 * down + offset][across]
                for at, case in enumerate(cases):
                    row = rows.get(f"{shape} {length} {case}", {})
                    if key in row:
                        panel.barh(at, row[key], color=colors.get(case, "tab:blue"), clip_on=False)
                        panel.text(row[key], at, f" {row[key]:,.{digits}f}", va="center", fontsize=6)
                    elif row:
                        panel.text(0, at, f" {row['error'].partition(':')[0]}", va="center", fontsize=6, color="gray")
                panel.set_yticks(range(len(cases)), cases)
                panel.set_ylim(len(cases) - 0.5, -0.5)
                panel.set_title(f"{shape}, rows of {length:,} tokens: {unit}")
                panel.margins(x=0.15)
                panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main()
