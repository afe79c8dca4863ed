"""The longest context of which this card takes a training step: measured at some lengths, and by the arithmetic in between.

    python scripts/bench/longest.py --json longest.json --lengths 65536,131072,262144      # a GPU, ten minutes
    python scripts/bench/longest.py --json longest.json --lengths 409600 --fast --minutes 9.5     # one at a time: goes on
    python scripts/bench/longest.py --dry-run --card 139 --host 128                        # no GPU: the forecast alone
    python scripts/bench/longest.py --lengths 65536 techniques.quantize.enabled=true       # other settings: any key

One document fills a row of the length, the shape is that of Llama 3 8B (weights drawn at random, which no memory depends on),
LoRA r=16, and everything gives way to memory: layers keep their inputs alone, these wait in host memory as far as it holds
them, MLPs run in tiles of TILE tokens. Each length is a process of its own that takes real training steps, and stands in the JSON
file when it is done. A length that stands there with the same settings, measured or out of memory, is not run again (--again
does); one that failed otherwise, or for want of time, is.

What was measured is fitted by a straight line, bytes = constant + bytes a token x tokens, after taking off the inputs of layers
that did not fit into host memory. From the line follows the longest row that card and host hold, and which of them ends it; a
length that ran out of memory is beyond it, whatever the line says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
if TYPE_CHECKING:
    from fxtune.techniques.checkpointing.plan import RecomputePlan
    from fxtune.techniques.facts import Facts

GIB = 1 << 30
TILE = 8192
"""Tokens of a tile of an MLP."""
LENGTHS = (65536, 131072, 262144, 409600)
STEP, FARTHEST = 1024, 1 << 24
SPARE = 0.03
"""Of the card's memory, what the longest row leaves free."""
OUT = "out of memory"
"""How a row's error begins, if it was that (fxtune.tuning.trial.Outcome.memory)."""


@dataclass
class Row:
    """One length."""

    length: int
    senders: int
    """Layers whose input waits in host memory."""
    fast: bool
    """Memory was used up for speed, so the line does not go through this one."""
    staying: int
    """Layers that keep theirs on the device besides the last one, as the host has no room."""
    forecast_gib: float
    host_gib: float
    """Pinned, by the forecast."""
    words: list[str] = field(default_factory=list)
    """Keys that were put on top of the settings."""
    error: str = ""
    peak_gib: float | None = None
    reserved_gib: float | None = None
    pinned_gib: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    seconds: float = 0.0
    """Of the whole process."""

    @property
    def key(self) -> tuple[int, bool, str]:
        """What rows of one file differ in."""
        return self.length, self.fast, " ".join(self.words)

    @property
    def too_long(self) -> bool:
        return self.error.startswith(OUT)

    @property
    def settled(self) -> bool:
        """Whether another run would say nothing new."""
        return not self.error or self.too_long


@dataclass
class Line:
    """Bytes on the device: constant + a_token x tokens, without the inputs of layers that stay beyond the last."""

    constant: float
    a_token: float
    measured: bool
    """Through what was measured; else through forecasts."""
    points: int = 0
    """Lengths that it goes through."""
    beside: float = 0.0
    """How far the farthest of them lies beside it, as a share of its bytes."""

    def at(self, length: int, staying: int, hidden_bytes: int) -> float:
        return self.constant + length * (self.a_token + staying * hidden_bytes)


def main() -> None:
    args = arguments()
    if args.child:
        take_steps(args.child, args.words, args.steps)
        return
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    rows, here, began = known(args.json), ground(args), time.monotonic()
    print(HEAD, flush=True)
    late = []
    for length in args.lengths:
        row, facts = expected(length, args, here)
        left = args.minutes * 60 - (time.monotonic() - began)
        if row.key in rows and rows[row.key].settled and not args.again:
            row = rows[row.key]
        elif not args.dry_run and left <= 0:
            late.append(f"{length:,}")
            continue
        elif not args.dry_run:
            measure(row, args, left)
        rows[row.key] = row
        print(told(row), flush=True)
        if args.json and not args.dry_run:
            every = sorted(rows.values(), key=lambda one: one.key)
            args.json.write_text(
                json.dumps({"rows": [asdict(one) for one in every], **conclusion(every, facts, args.words)}, indent=1)
            )
    if late:
        print(f"\nNot run, the time ({args.minutes:g} minutes) was over: {', '.join(late)}")
    print(f"\n{summary(conclusion(list(rows.values()), facts, args.words))}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="keys that are put on top, as on fxtune's command line")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--dry-run", action="store_true", help="the forecast alone; runs without a GPU")
    parser.add_argument("--card", type=float, help="GiB of a card that is not here (with --dry-run)")
    parser.add_argument("--host", type=float, help="GiB of host memory that is not here")
    parser.add_argument(
        "--fast", action="store_true", help="not the least memory, but what is fastest of all that fits"
    )
    parser.add_argument("--steps", type=int, default=1, help="of each length; the last is timed, less compiling")
    parser.add_argument("--minutes", type=float, default=600.0, help="end a length that would go on for longer")
    parser.add_argument("--json", type=Path, help="add the rows to this file; what stands there is not run again")
    parser.add_argument("--again", action="store_true", help="run also what stands there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape that a CPU takes")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def known(file: Path | None) -> dict[tuple[int, bool, str], Row]:
    """The rows of the JSON file, by their keys."""
    if file is None or not file.exists():
        return {}
    rows = [Row(**row) for row in json.loads(file.read_text())["rows"]]
    return {row.key: row for row in rows}


def settings(length: int, args: argparse.Namespace, senders: int | None = None) -> list[str]:
    """The words of the command line for rows of this length."""
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
    sends = [f"techniques.checkpointing.offload_layers={senders}"] if senders is not None else []
    return [
        *base,
        f"data.sequence_length={length}",
        "data.eval_sources=[]",
        "data.eval_fraction=0",
        "data.questions.path=null",
        "train.eval_every=0",
        "train.micro_batch_size=1",
        "train.global_batch_size=1",
        *sends,
        *args.words,
    ]


def ground(args: argparse.Namespace) -> dict[str, Any]:
    """The card and the host as Facts has them. The card is asked by nvidia-smi: this process is to leave its memory alone."""
    from fxtune.system.host import memory

    name, free, capability = "NVIDIA H200", args.card, (9, 0)
    if free is None and not args.smoke:
        try:
            asked = ["nvidia-smi", "--query-gpu=name,memory.free,compute_cap", "--format=csv,noheader,nounits"]
            answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
            name, mib, version = answer.splitlines()[0].split(", ")
        except (OSError, subprocess.CalledProcessError, IndexError) as error:
            raise SystemExit(
                "There is no GPU here (nvidia-smi answers nothing). --dry-run --card GIB --host GIB forecasts for "
                "one that is not here."
            ) from error
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


def facts_of(
    length: int, args: argparse.Namespace, here: dict[str, Any], senders: int | None = None
) -> tuple[Facts, RecomputePlan]:
    """What the forecast needs to know of one length, each `auto` decided, and what layers then keep."""
    from fxtune.config.compose import load
    from fxtune.models import load as models
    from fxtune.system.facts import PACKAGES
    from fxtune.techniques.facts import Facts

    config = load(settings(length, args, senders))
    facts = Facts(
        **here,
        packages={**dict.fromkeys(PACKAGES, "1"), "flash-attn-4": "4.0.0b36"},
        packing=config.data.packing,
        model=models.load_config(config.model).to_dict(),
        dtype=config.model.dtype.value,
        sequence_length=length,
        rows=(length,),
        micro_batch_size=1,
        optimizer=config.optimizer.name.value,
    )
    techniques, _ = config.techniques.decided(facts, measure=False)
    return replace(facts, techniques=techniques), techniques.checkpointing.plan()


def expected(length: int, args: argparse.Namespace, here: dict[str, Any]) -> tuple[Row, Facts]:
    """The forecast of one length, with as many layers' inputs on the host as it holds."""
    from fxtune.techniques.checkpointing.technique import HOST_SHARE
    from fxtune.techniques.estimate.memory import forecast
    from fxtune.techniques.estimate.step_time import limit_senders

    facts, keeping = facts_of(length, args, here)
    layers = facts.text["num_hidden_layers"]
    whole = sum(keeping.sending(layers))
    keeping, need = (
        limit_senders(facts, keeping, HOST_SHARE * facts.host_memory) if whole else (keeping, forecast(facts, keeping))
    )
    senders = sum(keeping.sending(layers))
    return Row(
        length, senders, args.fast, max(whole - senders, 0), need.device / GIB, need.host / GIB, args.words
    ), facts


def measure(row: Row, args: argparse.Namespace, limit: float) -> None:
    """Run one length in a process of its own and write down what came of it."""
    from fxtune.tuning import trial

    with tempfile.TemporaryDirectory(prefix="fxtune-longest-") as scratch:
        documents, found = Path(scratch) / "documents.jsonl", Path(scratch) / "found.json"
        write_documents(documents, row.length, args.steps + 1)
        words = settings(row.length, args, row.senders if row.staying else None)
        command = [
            sys.executable,
            __file__,
            "--child",
            str(found),
            "--steps",
            str(args.steps),
            *words,
            f"data.sources=[{{path: '{documents}'}}]",
            f"data.cache_dir={scratch}/cache",
            "data.on_long=truncate",
            f"run.dir={scratch}/run",
        ]
        code, text, row.seconds = trial.run_process(command, limit)
        if found.exists():
            for name, value in json.loads(found.read_text()).items():
                setattr(row, name, value)
        if code is None:
            row.error = f"not done after {limit:.0f} s"
        elif code:
            answer = trial.failure(code, text, row.seconds)
            row.error = f"{answer.outcome.value}: {answer.reason}"[:300]


def write_documents(file: Path, length: int, count: int) -> None:
    """Documents of words drawn at random, each longer than a row (a word is a token or more)."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(2000)]
    with file.open("w") as out:
        for _ in range(count):
            out.write(json.dumps({"text": " ".join(draw.choices(words, k=length))}) + "\n")


def take_steps(file: Path, words: list[str], count: int) -> None:
    """The process of one length: real training steps, and what they took, to `file`."""
    import torch

    from fxtune.checkpoint.run_folder import claim
    from fxtune.config.compose import load
    from fxtune.diagnostics.benchmark import steps_only
    from fxtune.tracking.display import Display
    from fxtune.training.trainer import Trainer

    config = steps_only(load(words), count)
    plain = json.loads(json.dumps(asdict(config)))
    trainer = Trainer(config, claim("longest", config.run.dir, "never", plain), Display(), plain)
    cuda = trainer.world.device.type == "cuda"
    print("\n".join(trainer.builder.decided), flush=True)
    with trainer.tracker:
        began = time.perf_counter()
        for _, _, metrics in trainer.steps():
            value, now = metrics["loss"].item(), time.perf_counter()  # waits for the step
            seconds, began = now - began, now
    compiled = trainer.techniques.compile
    if count == 1 and compiled.enabled:
        seconds -= compiled.report().seconds
    offload = getattr(trainer.model, "offload", None)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    file.write_text(
        json.dumps(
            dict(
                peak_gib=peak / GIB,
                reserved_gib=torch.cuda.max_memory_reserved() / GIB if cuda else 0.0,
                pinned_gib=offload.pinned / GIB if offload else 0.0,
                step_seconds=seconds,
                loss=value,
                tokens_per_second=trainer.plan.tokens(count - 1) / seconds,
            )
        )
    )


def fitted(rows: list[Row], facts: Facts) -> Line:
    """The straight line through what was measured (least squares), or through the forecast where fewer than two lengths were."""
    hidden = 2 * facts.text["hidden_size"]
    seen = [(row.length, row.peak_gib * GIB - row.length * row.staying * hidden) for row in rows if row.peak_gib]
    measured = len({length for length, _ in seen}) > 1
    if not measured:
        seen = [(row.length, row.forecast_gib * GIB - row.length * row.staying * hidden) for row in rows]
    if len({length for length, _ in seen}) < 2:
        return Line(0.0, 0.0, False)
    lengths, sizes = [length for length, _ in seen], [size for _, size in seen]
    middle = sum(lengths) / len(seen), sum(sizes) / len(seen)
    spread = sum((length - middle[0]) ** 2 for length in lengths)
    a_token = sum((length - middle[0]) * (size - middle[1]) for length, size in seen) / spread
    line = Line(middle[1] - a_token * middle[0], a_token, measured, len(seen))
    line.beside = max(abs(line.at(length, 0, hidden) / size - 1) for length, size in seen)
    return line


def longest(line: Line, facts: Facts) -> tuple[int, int, str]:
    """(tokens, layers whose input stays besides the last, what ends it) of the longest row that card and host hold."""
    from fxtune.techniques.checkpointing.offload import pinned_bytes
    from fxtune.techniques.checkpointing.technique import HOST_SHARE

    layers, hidden = facts.text["num_hidden_layers"], 2 * facts.text["hidden_size"]
    room, host = (1 - SPARE) * facts.free_memory, HOST_SHARE * facts.host_memory
    sends = facts.techniques.checkpointing.offload
    tokens = stay = 0
    for length in range(STEP, FARTHEST, STEP):
        staying = layers - 1 - min(int(host // pinned_bytes(length * hidden)), layers - 1) if sends else 0
        if line.at(length, staying, hidden) > room:
            break
        tokens, stay = length, staying
    why = f"{room / GIB:.1f} GiB of the card" + (f", and {host / GIB:.1f} GiB of the host" if stay else "")
    if tokens * facts.text["hidden_size"] >= 1 << 31:
        why += "; a row of that length has more numbers than an int32 counts, so only a run shows that every kernel takes it"
    return tokens, stay, why


def conclusion(rows: list[Row], facts: Facts, words: list[str]) -> dict[str, Any]:
    """What the rows with these settings come to, for the JSON file and for the last lines. One length makes no line, and says
    nothing of others.
    """
    rows = [row for row in rows if row.words == words]
    done = [row.length for row in rows if row.peak_gib is not None]
    rows = [row for row in rows if not row.fast]
    line, measured = fitted(rows, facts), {"longest_measured_tokens": max(done, default=0), "card": facts.device_name}
    if not line.a_token:
        return {**measured, "bytes_a_token": 0.0}
    tokens, staying, why = longest(line, facts)
    if (beyond := min((row.length for row in rows if row.too_long), default=FARTHEST)) <= tokens:
        why = f"that {beyond:,} tokens ran out of memory here, though by the line {why} would hold {tokens:,}"
        tokens, staying = max(
            ((row.length, row.staying) for row in rows if row.peak_gib and row.length < beyond), default=(0, 0)
        )
    return {
        **measured,
        "bytes_a_token": line.a_token,
        "constant_gib": line.constant / GIB,
        "of": "measured" if line.measured else "forecast",
        "lengths": line.points,
        "beside": line.beside,
        "longest_tokens": tokens,
        "inputs_that_stay": staying,
        "ended_by": why,
    }


def summary(found: dict[str, Any]) -> str:
    """The last lines: how far it was measured, what the memory is made of, how far it goes and what ends it."""
    measured = found["longest_measured_tokens"]
    first = f"Rows of up to {measured:,} tokens were measured." if measured else "No length was measured."
    if not found["bytes_a_token"]:
        return f"{first} Two lengths or more (without --fast) make a line, which says what is the longest."
    return (
        f"{first} {found['constant_gib']:.1f} GiB and {found['bytes_a_token'] / 1024:.1f} KiB a token, a line through "
        f"{found['lengths']} lengths ({found['of']}), none of them more than {found['beside']:.1%} beside it. The longest "
        f"row is {found['longest_tokens']:,} tokens, with {found['inputs_that_stay']} layers' inputs on the card besides the "
        f"last one's. What ends it is {found['ended_by']}."
    )


def told(row: Row) -> str:
    """One row of the table, in Markdown."""
    start = f"| {row.length:,} | {row.senders} | {row.forecast_gib:.1f} |"
    if row.error:
        return f"{start} {row.error} | | | | |"
    if row.peak_gib is None:
        return f"{start} | | {row.host_gib:.1f} (forecast) | | |"
    return (
        f"{start} {row.peak_gib:.1f} | {row.reserved_gib:.1f} | {row.pinned_gib:.1f} | {row.step_seconds:,.0f} | "
        f"{row.tokens_per_second:,.0f} |"
    )


HEAD = """| tokens in a row | inputs on the host | forecast GiB | peak GiB | reserved GiB | host GiB | s a step | tokens/s |
|---:|---:|---:|---:|---:|---:|---:|---:|"""

if __name__ == "__main__":
    main()
