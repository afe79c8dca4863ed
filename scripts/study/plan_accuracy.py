"""Compares `fxtune plan` with measurements: memory and step time of cases in docs/, on an H200.

    python scripts/study/plan_accuracy.py               # the table, in seconds, on any machine
    python scripts/study/plan_accuracy.py --json FILE   # also as JSON

MEASURED has the figures of docs/performance.md and docs/techniques.md, each printed by the command beside it there.
Speeds are compared only where every row is one document: packed documents of unknown lengths attend to less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from ablate import SHAPES, TECHNIQUES  # noqa: E402
from bench_peers import MIXED, MIXED_FP8  # noqa: E402

from fxtune.config import compose  # noqa: E402
from fxtune.system.units import GIB  # noqa: E402
from fxtune.techniques.estimate.machines import machine  # noqa: E402
from fxtune.training.run_forecast import Lengths, forecast_run  # noqa: E402

FAST, MEMORY = ("techniques=[fast,lora]",), ("techniques=[fast,lora,memory]",)
FP8 = (*FAST, "techniques.quantize.enabled=true", "techniques.quantize.type=fp8")
PLAIN = ("techniques=lora", "techniques.attention.enabled=true", "techniques.attention.backend=sdpa")
FULL, FULL_FP8 = ("techniques=[full,fast]",), ("techniques=[full_fp8,fast]",)
ROUNDED = "optimizer.stochastic_rounding=true"
HOST_GIB = 128.0


@dataclass(frozen=True)
class Measured:
    name: str
    shape: str
    rows: int
    length: int
    words: tuple[str, ...]
    gib: float | None
    """Peak of torch's allocator. None: it ran out of memory."""
    tokens_per_second: float | None = None


def added(*names: str) -> tuple[str, ...]:
    """The overrides of ablate.py's rows: techniques added to plain peft."""
    return (*PLAIN, *(word for name in names for word in TECHNIQUES[name]))


def mixed(**layers: int) -> tuple[str, ...]:
    """The overrides for a mix of levels. `layers`: how many layers have each level."""
    kept = ",".join(f"{level}:{count}" for level, count in layers.items())
    return "techniques.checkpointing.policy=mix", f"techniques.checkpointing.mix={{{kept}}}"


MEASURED = (
    # scripts/bench/bench_peers.py
    Measured("8b_4x4096", "8b", 4, 4096, FAST, 71.3, 17532),
    Measured("8b_4x4096_fp8", "8b", 4, 4096, FP8, 71.2, 24633),
    Measured("1b_8x4096", "1b", 8, 4096, FAST, 33.4, 87352),
    Measured("1b_8x4096_fp8", "1b", 8, 4096, FP8, 33.3, 106425),
    Measured("8b_1x65536", "8b", 1, 65536, FAST, 125.5, 6570),
    Measured("8b_1x65536_fp8", "8b", 1, 65536, FP8, 123.4, 7457),
    Measured("8b_1x65536_30gib", "8b", 1, 65536, (*FAST, "run.memory_gib=30"), 24.2, 6150),
    Measured("1b, full fine-tuning", "1b", 8, 4096, ("techniques=[full,fast]",), 47.1, 69032),
    Measured("1b, full, float32 moments", "1b", 8, 4096, (*FULL, ROUNDED), 51.7, 67454),
    Measured("1b, full, fp8", "1b", 8, 4096, FULL_FP8, 42.1, 84672),
    # What `auto` kept in this run: its forecast was 20 GiB higher then.
    Measured("8b, full", "8b", 2, 8192, (*FULL, *mixed(wide=8, everything=24)), 112.0, 11334),
    Measured("8b, full, fp8", "8b", 2, 8192, FULL_FP8, 108.6, 15690),
    Measured("8b, full, 8-bit moments", "8b", 2, 8192, (*FULL, "optimizer.name=adamw_8bit", ROUNDED), 102.8, 9496),
    Measured("moe", "moe", 4, 4096, MIXED, 29.0, 95404),
    # The speed of this run, 75,344, is that of a model that was not compiled, which the forecast of time leaves out.
    Measured("moe, fp8 experts", "moe", 4, 4096, (*MIXED_FP8, "techniques.compile.enabled=false"), 30.8),
    Measured("gpt-oss", "gpt_oss", 4, 4096, MIXED, 75.6, 28144),
    Measured("70b, fp8", "70b", 1, 4096, FP8, 123.0, 3166),
    # scripts/bench/ablate.py
    *(Measured("fast", "8b", rows, length, FAST, 71.3) for rows, length in ((4, 4096), (1, 16384))),
    *(Measured("memory", "8b", rows, length, MEMORY, 17.4) for rows, length in ((4, 4096), (1, 16384))),
    Measured("memory", "8b", 1, 65536, MEMORY, 22.3),
    *(Measured("fast", "1b", rows, length, FAST, 18.3) for rows, length in ((4, 4096), (1, 16384))),
    Measured("fast", "1b", 1, 65536, FAST, 64.2),
    *(Measured("memory", "1b", rows, length, MEMORY, 3.8) for rows, length in ((4, 4096), (1, 16384))),
    Measured("memory", "1b", 1, 65536, MEMORY, 5.9),
    Measured("plain", "8b", 1, 16384, added(), 101.3),
    Measured("plain + full", "8b", 1, 16384, added("full"), 43.4),
    Measured("plain + fused_loss", "8b", 1, 16384, added("fused_loss"), 79.1),
    Measured("plain + liger", "8b", 1, 16384, added("liger"), 93.3),
    Measured("plain + compile", "8b", 1, 16384, added("compile"), 93.4),
    Measured("plain + nf4", "8b", 1, 16384, added("nf4"), 91.5),
    Measured("plain + offload", "8b", 1, 16384, added("offload"), 39.5),
    Measured("plain + full + fused_loss", "8b", 1, 65536, added("full", "fused_loss"), 45.7),
    Measured("plain + full + fused_loss + nf4", "8b", 1, 65536, added("full", "fused_loss", "nf4"), 35.9),
    Measured("plain", "1b", 1, 16384, added(), 42.6),
    Measured("plain + full", "1b", 1, 16384, added("full"), 27.1),
    Measured("plain + compile", "1b", 1, 16384, added("compile"), 40.7),
    Measured("plain", "8b", 1, 65536, added(), None),
    Measured("plain", "1b", 1, 65536, added(), None),
    Measured("plain + selective + fused_loss", "8b", 1, 65536, added("selective", "fused_loss"), None),
)


@dataclass(frozen=True)
class Row:
    case: str
    measured_gib: float | None
    calculated_gib: float
    needed_gib: float
    """With fragmentation and workspaces, as `fits` is judged."""
    fits: bool
    measured: float | None
    calculated: float | None
    """Tokens a second, where they are compared."""

    @property
    def memory_error(self) -> float | None:
        return None if self.measured_gib is None else self.calculated_gib / self.measured_gib - 1

    @property
    def right(self) -> bool:
        """Whether the run fitted if and only if the forecast says so."""
        return self.fits == (self.measured_gib is not None)

    @property
    def time_error(self) -> float | None:
        """Of the seconds of a step."""
        return None if self.measured is None or self.calculated is None else self.measured / self.calculated - 1


def rows() -> Iterator[Row]:
    for one in MEASURED:
        architecture = ",".join(f"{key}:{str(value).lower()}" for key, value in SHAPES[one.shape].items())
        words = [
            "model.path=null",
            "model.tokenizer=builtin:tiny",
            "model.init=random",
            "model.dtype=bfloat16",
            f"model.architecture={{{architecture}}}",
            f"data.sequence_length={one.length}",
            "data.packing=true",
            "train.max_steps=10",
            f"train.micro_batch_size={one.rows}",
            f"train.global_batch_size={one.rows}",
            *one.words,
        ]
        config = compose.load(words)
        length = Lengths(10**9, 10**9, 1.0, one.length)
        found = forecast_run(config, machine("H200", HOST_GIB, config.run.memory_gib), 1, length)
        yield Row(
            f"{one.name}: {one.shape}, {one.rows} x {one.length:,}",
            one.gib,
            found.need.allocated / GIB,
            found.need.device / GIB,
            found.fits,
            one.tokens_per_second,
            found.step_tokens / found.step_seconds if one.tokens_per_second else None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = list(rows())
    print("| case | GiB measured | calculated | off by | tokens/s measured | calculated | step time off by |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in found:
        memory = "does not fit" if row.measured_gib is None else f"{row.measured_gib:.1f}"
        off = "" if row.memory_error is None else f"{row.memory_error:+.1%}"
        speeds = "| |"
        if row.measured and row.calculated and row.time_error is not None:
            speeds = f"{row.measured:,.0f} | {row.calculated:,.0f} | {row.time_error:+.1%}"
        fits = "" if row.fits else ", does not fit"
        print(f"| {row.case} | {memory} | {row.calculated_gib:.1f}{fits} | {off} | {speeds} |")
    memories = [abs(row.memory_error) for row in found if row.memory_error is not None]
    times = [abs(row.time_error) for row in found if row.time_error is not None]
    print(f"\nMemory: median error {statistics.median(memories):.1%}, {len(memories)} cases.")
    print(f"Fits or not: wrong in {sum(not row.right for row in found)} of {len(found)} cases.")
    print(f"Step time: median error {statistics.median(times):.1%}, at most {max(times):.1%}, {len(times)} cases.")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
