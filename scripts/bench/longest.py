"""Finds the longest row that this GPU trains on: measures some lengths and fits a line through their memory.

    python scripts/bench/longest.py --json longest.json --lengths 65536,131072,262144      # a GPU, ten minutes
    python scripts/bench/longest.py --json longest.json --lengths 409600 --fast --minutes 9.5  # one length at a time: continues
    python scripts/bench/longest.py --dry-run --card 139 --host 128                        # no GPU: only the forecast
    python scripts/bench/longest.py --lengths 65536 techniques.quantize.enabled=true       # other settings: any key

A row is one document of that length. The model has the shape of Llama 3 8B and random weights (memory does not depend
on their values) and trains LoRA r=16. All settings save memory: a layer keeps only its input, the inputs are offloaded
to host memory as far as they fit, and MLPs run in tiles of TILE tokens. Each length is a run of `fxtune bench`, and is
written to the JSON file when it has finished. A length that the file holds with the same settings, measured or out of
memory, does not run again. A length that failed for another reason, or that the time limit stopped, runs again.

The script fits a straight line to the measured lengths, bytes = constant + bytes per token x tokens, after it
subtracts the inputs of layers that did not fit into host memory. The line gives the longest row that fits, and whether
GPU or host memory limits it. A length that ran out of memory is always above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import baselines  # noqa: E402
from baselines import Measurement  # noqa: E402

from fxtune.config.compose import load  # noqa: E402
from fxtune.diagnostics.benchmark import measure_in_process  # noqa: E402
from fxtune.estimate.memory import forecast  # noqa: E402
from fxtune.facts.recomputation import RecomputePlan, pinned_bytes  # noqa: E402
from fxtune.facts.run import Facts  # noqa: E402
from fxtune.models.load import load_config  # noqa: E402
from fxtune.optim.optimizer import state_of  # noqa: E402
from fxtune.system.machine.facts import PACKAGES  # noqa: E402
from fxtune.system.machine.host import memory  # noqa: E402
from fxtune.system.terminal.units import GIB  # noqa: E402
from fxtune.techniques.checkpointing.technique import HOST_SHARE  # noqa: E402

TILE = 8192
"""Tokens per MLP tile."""
LENGTHS = (65536, 131072, 262144, 409600)
STEP, FARTHEST = 1024, 1 << 24
SPARE = 0.03
"""Share of GPU memory that the longest row leaves free."""
OUT_OF_MEMORY = "does not fit"
"""The error of measure_in_process() if the length ran out of memory."""


@dataclass
class Row:
    """The forecast and the measurement of one length."""

    length: int
    senders: int
    """Layers that offload their input to host memory."""
    fast: bool
    """The run uses all memory for speed, so the line leaves it out."""
    staying: int
    """Layers, without the last one, that keep their input on the device because host memory is full."""
    forecast_gib: float
    host_gib: float
    """Pinned host memory by the forecast."""
    words: list[str] = field(default_factory=list)
    """Keys in addition to the script's settings."""
    error: str = ""
    peak_gib: float | None = None
    reserved_gib: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None

    @property
    def key(self) -> tuple[int, bool, str]:
        """Identifies the row in its file."""
        return self.length, self.fast, " ".join(self.words)

    @property
    def final(self) -> bool:
        """Whether the length was measured or ran out of memory, so it need not run again."""
        return self.error in ("", OUT_OF_MEMORY)


@dataclass
class Line:
    """Bytes on the device: constant + bytes_per_token x tokens, with only the last layer's input on the device."""

    constant: float
    bytes_per_token: float
    measured: bool
    """Fitted to measurements; if false, to forecasts."""
    points: int = 0
    """Number of fitted lengths."""
    max_deviation: float = 0.0
    """Largest relative deviation of a fitted length from the line."""

    def device_bytes(self, length: int, staying: int, hidden_bytes: int) -> float:
        """Bytes for a row of `length` tokens if `staying` more layers keep their input on the device."""
        return self.constant + length * (self.bytes_per_token + staying * hidden_bytes)


def main() -> None:
    args = arguments()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rows, hardware, began = read_rows(args.json), hardware_facts(args), time.monotonic()
    print(HEAD, flush=True)
    late = []
    for length in args.lengths:
        row, facts = forecast_row(length, args, hardware)
        left = args.minutes * 60 - (time.monotonic() - began)
        if row.key in rows and rows[row.key].final:
            row = rows[row.key]
        elif not args.dry_run and left <= 0:
            late.append(f"{length:,}")
            continue
        elif not args.dry_run:
            measure(row, args, left)
        rows[row.key] = row
        print(table_row(row), flush=True)
        if args.json and not args.dry_run:
            args.json.write_text(json.dumps([asdict(rows[key]) for key in sorted(rows)], indent=1))
    if late:
        print(f"\nNot run, the time limit ({args.minutes:g} minutes) was reached: {', '.join(late)}")
    print(f"\n{summary(list(rows.values()), facts, args.words)}")
    if not args.dry_run:
        baselines.save(args.baseline, [measurement(row) for row in sorted(rows.values(), key=lambda row: row.key)])


def measurement(row: Row) -> Measurement:
    """A row as a file of benchmarks/baselines holds it."""

    def rounded(value: float | None, digits: int) -> float | None:
        return None if value is None else round(value, digits)

    return Measurement(
        f"{row.length:,}" + ", `--fast`" * row.fast,
        settings=" ".join(row.words),
        length=row.length,
        tokens_per_second=rounded(row.tokens_per_second, 0),
        step_ms=rounded(row.step_seconds and 1e3 * row.step_seconds, 0),
        memory_gib=rounded(row.peak_gib, 2),
        reserved_gib=rounded(row.reserved_gib, 2),
        forecast_gib=rounded(row.forecast_gib, 2),
        host_gib=rounded(row.host_gib, 2),
        error=row.error,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="additional keys, as on fxtune's command line")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--dry-run", action="store_true", help="only the forecast; works without a GPU")
    parser.add_argument("--card", type=float, help="GiB of GPU memory to assume (with --dry-run)")
    parser.add_argument("--host", type=float, help="GiB of host memory to assume")
    parser.add_argument(
        "--fast", action="store_true", help="the fastest settings that fit, not those with the least memory"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time, also within a length")
    parser.add_argument("--json", type=Path, help="add the rows to this file; lengths that it holds do not run again")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape for a CPU")
    baselines.add_option(parser)
    return parser.parse_intermixed_args()


def read_rows(file: Path | None) -> dict[tuple[int, bool, str], Row]:
    """The rows of the JSON file, by their keys."""
    if file is None or not file.exists():
        return {}
    rows = [Row(**row) for row in json.loads(file.read_text())]
    return {row.key: row for row in rows}


def settings(length: int, args: argparse.Namespace) -> list[str]:
    """The command-line words for rows of this length."""
    tiles = max(-(-length // TILE), 1)
    if args.smoke:
        base = ["+recipe=quickstart", "techniques=[lora,low_memory]"]
    elif args.fast:
        base = ["+recipe=llama_yarn_64k", "model=llama_8b_shape", f"techniques.rope.factor={max(length / 8192, 1.0)}"]
    else:
        base = [
            "+recipe=llama_yarn_64k_memory",
            "model=llama_8b_shape",
            f"techniques.rope.factor={max(length / 8192, 1.0)}",
            f"techniques.checkpointing.mlp_tiles={tiles}",
        ]
    return [
        *base,
        f"data.sequence_length={length}",
        "data.eval_sources=[]",
        "data.eval_fraction=0",
        "data.questions.path=null",
        "train.eval_every=0",
        "train.micro_batch_size=1",
        "train.global_batch_size=1",
        *args.words,
    ]


def hardware_facts(args: argparse.Namespace) -> dict[str, Any]:
    """The Facts about GPU and host. They come from nvidia-smi, so that this process allocates no GPU memory."""
    name, free, capability = "NVIDIA H200", args.card, (9, 0)
    if free is None and not args.smoke:
        if not (cards := baselines.nvidia_smi("name,memory.free,compute_cap")):
            raise SystemExit(
                "There is no GPU on this machine (nvidia-smi finds none). --dry-run --card GIB --host GIB makes a "
                "forecast without one."
            )
        name, mib, version = cards[0]
        free, capability = float(mib) / 1024, tuple(int(part) for part in version.split("."))
    size = int((64 if free is None else free) * GIB)
    return dict(
        device="cpu" if args.smoke else "cuda",
        device_name=name,
        capability=capability,
        memory=size,
        free_memory=size,
        host_memory=int(args.host * GIB) if args.host is not None else memory()[0],
    )


def facts_of(length: int, args: argparse.Namespace, hardware: dict[str, Any]) -> tuple[Facts, RecomputePlan]:
    """The facts of one length with each `auto` decided, and the recompute plan."""
    config = load(settings(length, args))
    facts = Facts(
        **hardware,
        packages={**dict.fromkeys(PACKAGES, "1"), "flash-attn-4": "4.0.0b36"},
        packing=config.data.packs,
        model=load_config(config.model).to_dict(),
        dtype=config.model.dtype.value,
        sequence_length=length,
        rows=(length,),
        micro_batch_size=1,
        optimizer=state_of(config.optimizer),
    )
    techniques, _ = config.techniques.decided(facts)
    return replace(facts, techniques=techniques), techniques.checkpointing.plan


def forecast_row(length: int, args: argparse.Namespace, hardware: dict[str, Any]) -> tuple[Row, Facts]:
    """The forecast of one length, with as many layer inputs in host memory as fit."""
    facts, plan = facts_of(length, args, hardware)
    layers = facts.text["num_hidden_layers"]
    need, senders = forecast(facts, plan), sum(plan.sending(layers))
    staying = layers - 1 - senders if senders and not args.fast else 0
    return Row(length, senders, args.fast, staying, need.device / GIB, need.host / GIB, args.words), facts


def measure(row: Row, args: argparse.Namespace, limit: float) -> None:
    """Run one length with `fxtune bench`, and fill in the row's results."""
    with tempfile.TemporaryDirectory(prefix="fxtune-longest-") as scratch:
        documents = Path(scratch) / "documents.jsonl"
        write_documents(documents, row.length, 3)
        words = [
            *settings(row.length, args),
            f"data.sources=[{{path: '{documents}'}}]",
            f"data.cache_dir={scratch}/cache",
            "data.on_long=truncate",
        ]
        try:
            found = measure_in_process(words, 1, 1, limit)
        except TimeoutError:
            found = {"error": f"not finished after {limit:.0f} s"}
    row.error = found.get("error", "")
    if not row.error:
        row.peak_gib, row.reserved_gib = found["memory_gib"], found["memory_reserved_gib"]
        row.step_seconds, row.tokens_per_second = found["step_seconds"], found["tokens_per_second"]


def write_documents(file: Path, length: int, count: int) -> None:
    """Write documents of random words. Each is longer than a row, since a word is at least one token."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(2000)]
    with file.open("w") as out:
        for _ in range(count):
            out.write(json.dumps({"text": " ".join(draw.choices(words, k=length))}) + "\n")


def fit_line(rows: list[Row], facts: Facts) -> Line:
    """The least-squares line through the measurements, or through the forecasts if fewer than two lengths were
    measured.
    """
    hidden = 2 * facts.text["hidden_size"]
    points = [(row.length, row.peak_gib * GIB - row.length * row.staying * hidden) for row in rows if row.peak_gib]
    measured = len({length for length, _ in points}) > 1
    if not measured:
        points = [(row.length, row.forecast_gib * GIB - row.length * row.staying * hidden) for row in rows]
    if len({length for length, _ in points}) < 2:
        return Line(0.0, 0.0, False)
    lengths, sizes = [length for length, _ in points], [size for _, size in points]
    mean_length, mean_size = sum(lengths) / len(points), sum(sizes) / len(points)
    variance = sum((length - mean_length) ** 2 for length in lengths)
    slope = sum((length - mean_length) * (size - mean_size) for length, size in points) / variance
    line = Line(mean_size - slope * mean_length, slope, measured, len(points))
    line.max_deviation = max(abs(line.device_bytes(length, 0, hidden) / size - 1) for length, size in points)
    return line


def longest(line: Line, facts: Facts) -> tuple[int, int, str]:
    """(tokens, layers besides the last that keep their input on the device, limit) of the longest row that fits."""
    layers, hidden = facts.text["num_hidden_layers"], 2 * facts.text["hidden_size"]
    room, host = (1 - SPARE) * facts.free_memory, HOST_SHARE * facts.host_memory
    sends = facts.techniques.checkpointing.offload != "none"
    tokens = stay = 0
    for length in range(STEP, FARTHEST, STEP):
        staying = layers - 1 - min(int(host // pinned_bytes(length * hidden)), layers - 1) if sends else 0
        if line.device_bytes(length, staying, hidden) > room:
            break
        tokens, stay = length, staying
    why = f"{room / GIB:.1f} GiB of GPU memory" + (f" and {host / GIB:.1f} GiB of host memory" if stay else "")
    if tokens * facts.text["hidden_size"] >= 1 << 31:
        why += "; such a row has more elements than an int32 index can address, so only a run shows that every kernel accepts it"
    return tokens, stay, why


def summary(rows: list[Row], facts: Facts, words: list[str]) -> str:
    """The last lines, for the rows with these settings: the longest measured length, the fitted line, the longest row
    that fits and its limit. A line needs two lengths."""
    rows = [row for row in rows if row.words == words]
    done = max((row.length for row in rows if row.peak_gib is not None), default=0)
    first = f"Rows of up to {done:,} tokens were measured." if done else "No length was measured."
    rows = [row for row in rows if not row.fast]
    line = fit_line(rows, facts)
    if not line.bytes_per_token:
        return f"{first} The longest row that fits needs two lengths or more (without --fast)."
    tokens, staying, why = longest(line, facts)
    if (beyond := min((row.length for row in rows if row.error == OUT_OF_MEMORY), default=FARTHEST)) <= tokens:
        why = f"that {beyond:,} tokens ran out of memory, although the line gives {tokens:,} tokens for {why}"
        tokens, staying = max(
            ((row.length, row.staying) for row in rows if row.peak_gib and row.length < beyond), default=(0, 0)
        )
    return (
        f"{first} Memory is {line.constant / GIB:.1f} GiB plus {line.bytes_per_token / 1024:.1f} KiB per token, fitted to "
        f"{line.points} lengths ({'measured' if line.measured else 'forecast'}) with a deviation of at most "
        f"{line.max_deviation:.1%}. The longest row is {tokens:,} tokens, with the inputs of {staying} layers besides the "
        f"last one in GPU memory. The limit is {why}."
    )


def table_row(row: Row) -> str:
    """One row of the table, in Markdown."""
    start = f"| {row.length:,} | {row.senders} | {row.forecast_gib:.1f} |"
    if row.error:
        return f"{start} {row.error} | | | | |"
    if row.peak_gib is None:
        return f"{start} | | {row.host_gib:.1f} | | |"
    return (
        f"{start} {row.peak_gib:.1f} | {row.reserved_gib or 0:.1f} | {row.host_gib:.1f} | {row.step_seconds:,.0f} | "
        f"{row.tokens_per_second:,.0f} |"
    )


HEAD = """| tokens per row | inputs on the host | forecast GiB | peak GiB | reserved GiB | host GiB, forecast | s/step | tokens/s |
|---:|---:|---:|---:|---:|---:|---:|---:|"""

if __name__ == "__main__":
    main()
