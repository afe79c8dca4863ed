"""Compares `fxtune plan` with measurements: memory and step time of the rows of benchmarks/baselines that name their keys.

    python scripts/study/plan_accuracy.py               # the table, in seconds, on any machine
    python scripts/study/plan_accuracy.py --json FILE   # also as JSON
    python scripts/study/plan_accuracy.py --measure     # on a card: first run cases of bench_peers.py, and write them to
    python scripts/study/plan_accuracy.py --measure --gpus 2 --cases 8b_4x4096,8b_full_2x8192   # the file of this card
    python scripts/study/plan_accuracy.py --measure --cases vl_7b_1024 --set techniques.lora.vision=true   # a variant of a case

The forecast of the allocator's peak is compared with the allocator's peak. What must be free is more, by fragmentation
and workspaces; it is compared with the memory that the allocator has reserved, where that was measured. Speeds are
compared only of compiled layers, and only where every row is one document: packed documents of unknown lengths attend
to less. Of measurements of the same case on the same cards the newest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import baselines  # noqa: E402
import bench_peers  # noqa: E402
import image_documents  # noqa: E402
import numpy as np  # noqa: E402
from baselines import Baseline, Measurement  # noqa: E402
from shapes import SHAPES, in_words, with_positions  # noqa: E402

from fxtune.config import compose  # noqa: E402
from fxtune.config.root import Config  # noqa: E402
from fxtune.estimate.machines import CARD_MODELS, machine  # noqa: E402
from fxtune.models.kinds.known import kind_of  # noqa: E402
from fxtune.models.load import load_config  # noqa: E402
from fxtune.system.terminal.units import GIB  # noqa: E402
from fxtune.training.forecast.run_forecast import Lengths, RunForecast, forecast_run  # noqa: E402

HOST_GIB = 128.0
HOURS = 36000.0
"""Seconds that a case may take."""
MEASURED_HERE = ("8b_4x4096", "8b_4x4096_fp8", "1b_8x4096", "moe_4x4096", "1b_full_8x4096", "8b_full_2x8192")
"""Cases of bench_peers.py that --measure runs, if it is given no others."""


Measured = tuple[Baseline, Measurement]


def read() -> list[Measured]:
    """The newest measurement of each case on each kind and number of cards."""
    newest: dict[Any, Measured] = {}
    for baseline in baselines.read_all():
        for row in baseline.measurements:
            if row.keys is not None:
                baseline = replace(baseline, cards=row.cards or baseline.cards)
                identity = (baseline.card, baseline.cards, row.case, row.settings, row.shape, row.rows, row.length)
                newest[identity] = baseline, row
    return list(newest.values())


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
    reserved_gib: float | None = None

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


def forecast(card: str, cards: int, row: Measurement) -> tuple[Config, RunForecast]:
    """The run of a measurement on `cards` cards of model `card`: its config and its forecast."""
    assert row.keys is not None
    assert row.shape
    assert row.rows
    assert row.length
    shared = any(key.startswith("parallel.context=") for key in row.keys)
    words = [
        "model.path=null",
        "model.tokenizer=builtin:tiny",
        "model.init=random",
        "model.dtype=bfloat16",
        f"model.architecture={in_words(with_positions(SHAPES[row.shape], row.length))}",
        f"data.sequence_length={row.length}",
        "data.packing=true",
        "train.max_steps=10",
        f"train.micro_batch_size={row.rows}",
        f"train.global_batch_size={row.rows * (1 if shared else cards)}",
        *row.keys,
    ]
    config = compose.load(words)
    case = bench_peers.CASES.get(row.case)
    length = lengths_with_images(config, case) if case and case.images else Lengths(10**9, 10**9, 1.0, row.length)
    return config, forecast_run(config, machine(card, HOST_GIB, config.run.memory_gib), cards, length)


def compare(measured: Measured) -> Row:
    """A measurement with its forecast."""
    baseline, row = measured
    case = bench_peers.CASES.get(row.case)
    config, found = forecast(baseline.card, baseline.cards, row)
    # Documents in a row, of lengths that are not known here.
    several = row.packed or (case is not None and (case.pairs > 0 or case.task is not None))
    priced = row.tokens_per_second is not None and not several and config.techniques.compile.enabled
    cards = f" on {baseline.cards} x {baseline.card}" if baseline.cards > 1 or baseline.card != "H200" else ""
    name = f"{row.case}, {row.settings}" if row.settings else row.case
    return Row(
        f"{name}: {row.shape}, {row.rows} x {row.length:,}{cards}",
        row.memory_gib,
        found.need.allocated / GIB,
        found.need.device / GIB,
        found.fits,
        row.tokens_per_second if priced else None,
        found.step_tokens / found.step_seconds if priced else None,
        row.reserved_gib,
    )


def lengths_with_images(config: Config, case: bench_peers.Case) -> Lengths:
    """The lengths of a case whose documents have an image each, of sizes that are log-uniform between two bounds."""
    assert case.images is not None
    hf_config = load_config(config.model)
    images = kind_of(hf_config).images
    shape = images.shape(hf_config) if images else None
    assert shape is not None
    least, most = case.images
    features = np.rint(np.geomspace(least, most, 1000)).astype(np.int64)
    documents = features + case.text
    tokens = int(documents.sum())
    answers = (1 - image_documents.QUESTION) * case.text * len(documents) / tokens
    return Lengths(
        tokens,
        tokens,
        answers,
        float((documents**2).sum() / tokens),
        images=shape.work(features, features, features),
        fullest=case.length * most // (most + case.text),
    )


def measure(names: list[str], gpus: int, more: Sequence[str] = ()) -> list[Measured]:
    """Run cases of bench_peers.py on `gpus` cards of this machine, with `more` keys, and put them into the file of its
    card. A case that fails is printed and left out."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    card = baselines.card()
    if card not in CARD_MODELS:
        sys.exit(f"{card} is no card of fxtune plan.")
    found = []
    with tempfile.TemporaryDirectory(prefix="fxtune-plan-") as folder:
        given = argparse.Namespace(
            steps=None, scratch=Path(folder), smoke=False, set=[*more], gpus=gpus, profile=False
        )
        for name in names:
            figures = bench_peers.run_fxtune(name, given, HOURS)
            if "error" in figures:
                print(f"{name}: {figures['error']}", flush=True)
                continue
            found.append(bench_peers.measurement({"case": name, "tool": "fxtune", **figures}))
            print(json.dumps(asdict(found[-1])), flush=True)
    file = f"{card.lower()}_plan" + f"_x{gpus}" * (gpus > 1)
    baselines.save(file, found, gpus)
    return [(Baseline(baselines.command(), card, baselines.today(), found, gpus), row) for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help="first run cases on this machine's cards")
    parser.add_argument("--gpus", type=int, default=1, help="--measure: how many cards (1)")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(MEASURED_HERE))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="--measure: a further key")
    given = parser.parse_args()
    measured = measure(given.cases, given.gpus, given.set) if given.measure else read()
    found = list(map(compare, measured))
    if not found:
        sys.exit("No case was measured.")
    print(
        "| case | GiB measured | calculated | off by | GiB reserved | must be free | tokens/s measured | calculated | off by |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in found:
        memory = "does not fit" if row.measured_gib is None else f"{row.measured_gib:.1f}"
        off = "" if row.memory_error is None else f"{row.memory_error:+.1%}"
        speeds = "| |"
        if row.measured and row.calculated and row.time_error is not None:
            speeds = f"{row.measured:,.0f} | {row.calculated:,.0f} | {row.time_error:+.1%}"
        fits = "" if row.fits else ", does not fit"
        reserved = "" if row.reserved_gib is None else f"{row.reserved_gib:.1f}"
        print(
            f"| {row.case} | {memory} | {row.calculated_gib:.1f}{fits} | {off} | {reserved} | {row.needed_gib:.1f} | "
            f"{speeds} |"
        )
    memories = [abs(row.memory_error) for row in found if row.memory_error is not None]
    times = [abs(row.time_error) for row in found if row.time_error is not None]
    short = [row.case for row in found if row.reserved_gib is not None and row.needed_gib < row.reserved_gib]
    print(
        f"\nMemory: median error {statistics.median(memories):.1%}, at most {max(memories):.1%}, {len(memories)} cases."
    )
    print(f"Less must be free than was reserved: {', '.join(short) or 'in no case'}.")
    print(f"Fits or not: wrong in {sum(not row.right for row in found)} of {len(found)} cases.")
    print(f"Step time: median error {statistics.median(times):.1%}, at most {max(times):.1%}, {len(times)} cases.")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
