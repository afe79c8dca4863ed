"""Equal loss: the same LoRA run by plain Hugging Face, by fxtune with everything on, and by fxtune over a base in fp8.

    python scripts/study/equal_loss.py --out build/equal --minutes 8 --json equal_loss.json    # one H200; again: it goes on
    python scripts/study/equal_loss.py --out build/equal --minutes 0 --json equal_loss.json --plot equal_loss.svg    # only table, plot
    python scripts/study/equal_loss.py --out /tmp/equal --smoke         # a toy on a CPU in 20 s: whether it runs, nothing else

1. Text at hand (gather.py): Python sources and documentation for the base, C and C++ for tuning; some documents of each are held
   out. A tokenizer of the first. Nothing of the text leaves --out.
2. A Llama of at least 100M parameters is pre-trained on the first text by fxtune, from random weights; its perplexity is stated.
3. For each seed an adapter is drawn that every side starts from, and the rows of every step are written down, so that all learn
   from the same tokens in the same order, with the same learning rates and the same clipping:
     plain    transformers, peft and torch.optim.AdamW in bfloat16, in a process of its own (plain_tune.py)
     fxtune   the fast set in bfloat16: the card's best attention, fused loss, fused LoRA, compiled layers
     fp8      the same over a base in fp8
4. The held-out loss of each by its own forward pass, and that of fxtune's adapters as plain transformers sees them over the base
   in bfloat16. Each seed's final losses must be within 0.5 % (fxtune) and 1 % (fp8) of plain: exit code 1 where one is not.

Finished runs stand in the JSON file and are not run again; the base stays in --out. What is refused (fp8 on a CPU) is a row, too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "make"))
import plain_tune
from gather import SUFFIXES, documents, find, standard_roots
from pretrain import common, micro_batch, random_llama, split, texts, train_for, train_tokenizer

LEAST = 100_000_000
"""Parameters of the base, the tied embedding counted once."""
OTHER = (".h", ".hpp", ".hh", ".cuh", ".cu", ".c", ".cc", ".cpp", ".inl")
"""Files of the text that is tuned on."""
MADE = "generated"
"""Near its top a file says so where a program wrote it: thousands of such are nearly alike."""
READY = 60.0
"""Seconds that text, tokenizer and compiling take before pre-training, about."""
EVALUATIONS = 8
"""Of the held-out text in a run."""
SMOKE = dict(
    hidden=64,
    layers=2,
    head=32,
    vocabulary=512,
    context=128,
    megabytes=0.4,
    tune_megabytes=0.2,
    held_out=0.2,
    evaluated=8,
    pretrain_minutes=0.02,
    pretrain_steps=6,
    rows=4,
    steps=8,
    lr=5e-3,
    seeds=[0],
    micro_tokens=1024,
)
"""What --smoke has in place of the defaults."""
OF_BASE = (
    "hidden",
    "layers",
    "head",
    "vocabulary",
    "context",
    "megabytes",
    "tune_megabytes",
    "held_out",
    "evaluated",
    "pretrain_minutes",
    "pretrain_steps",
    "pretrain_rows",
    "pretrain_lr",
)
OF_RUNS = (*OF_BASE, "rows", "steps", "lr", "r")
"""What must be the same for runs to be compared."""


@dataclass(frozen=True)
class Variant:
    title: str
    bound: float = 0.0
    """How far its held-out loss may be from plain's, relative."""
    more: tuple[str, ...] = ()
    """What it adds to the command line."""


VARIANTS = {
    "plain": Variant("plain transformers + peft"),
    "fxtune": Variant("fxtune, everything on", 0.005),
    "fp8": Variant(
        "fxtune, everything on, base in fp8",
        0.01,
        ("techniques.quantize.enabled=true", "techniques.quantize.type=fp8"),
    ),
}
EVERYTHING = ("techniques=[fast,lora]",)
ON_A_CPU = (
    "techniques=[lora,selective]",
    "techniques.liger.enabled=true",
    "techniques.liger.fused_linear_cross_entropy='on'",
)
"""Without a compiler, which takes longer there than the rest together."""


class TimeOver(Exception):
    """A worker was ended in the middle of its work."""


class Failed(Exception):
    """What was asked of a worker could not be done; one that died has printed why."""


class Worker:
    """A process that functions are sent to, one at a time; a new one where it died or was ended."""

    def __init__(self, *modules: str) -> None:
        """`modules`: what it is to import at once; that takes seconds, and two workers do it at the same time."""
        self.modules = modules
        self.process: Any = None
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.modules))
        self.process.start()
        theirs.close()

    def ask(self, seconds: float, function: Callable[..., Any], *given: Any) -> Any:
        """What `function(*given)` returns. Raises TimeOver, and Failed where the process died."""
        if self.process is None:
            self.start()
        try:
            self.pipe.send((function, given))
            if not self.pipe.poll(max(seconds, 0.0)):
                self.close(patience=0.0)
                raise TimeOver
            return self.pipe.recv()
        except (EOFError, ConnectionError) as problem:
            self.process.join(5.0)
            status = self.process.exitcode
            self.close()
            raise Failed(f"failed: its process ended with {status}, see above") from problem

    def close(self, patience: float = 5.0) -> None:
        """End the process. It goes by itself when nobody asks any more; one at work has `patience` seconds for that."""
        if self.process is not None:
            self.pipe.close()
            self.process.join(patience)
            self.process.kill()
            self.process.join()
            self.process = None


def serve(pipe: Any, modules: Sequence[str]) -> None:
    """A worker's life. What a function raises ends it, with its traceback."""
    for name in modules:
        importlib.import_module(name)
    while True:
        try:
            function, given = pipe.recv()
        except EOFError:  # whoever asked is gone
            return
        pipe.send(function(*given))


# --- what fxtune's process does


def card() -> str | None:
    """The GPU's name; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def make_base(asked: argparse.Namespace) -> dict[str, Any]:
    """Text, tokenizer and the base in --out, from the beginning; what there is to say of it."""
    from fxtune.data.config import SourceConfig
    from fxtune.models.load import load_config
    from fxtune.models.structure import skeleton

    data = asked.out / "data"
    for folder in (data, asked.out / "base", asked.out / "base-trial"):
        shutil.rmtree(folder, ignore_errors=True)
    data.mkdir(parents=True)
    gather(asked, data)
    config = common(asked.out, "base", 0)
    config.model = random_llama(data / "tokenizer", asked.hidden, asked.layers, asked.head, asked.context)
    built = skeleton(load_config(config.model).to_dict())
    assert built is not None, "transformers knows what a Llama is"
    count = sum(parameter.numel() for parameter in built.parameters())
    if count < LEAST and not asked.smoke:
        return {"error": f"A base of {count:,} parameters, and {LEAST:,} are the least: raise --hidden or --layers."}
    config.data.sources = [SourceConfig(path=str(data / "base.jsonl"))]
    config.data.eval_sources = [SourceConfig(path=str(data / "base-held.jsonl"))]
    config.data.sequence_length, config.train.epochs = asked.context, 100
    config.train.global_batch_size = asked.pretrain_rows
    config.train.micro_batch_size = micro_batch(asked.pretrain_rows, asked.context, asked.micro_tokens)
    config.optimizer.lr, config.schedule.warmup_ratio, config.schedule.min_lr_ratio = asked.pretrain_lr, 0.03, 0.01
    seen = train_for(config, 60 * asked.pretrain_minutes, asked.pretrain_steps)
    figures = json.loads((asked.out / "base" / "result.json").read_text())
    weights = hashlib.blake2b(
        (asked.out / "base" / "model" / "model.safetensors").read_bytes(), digest_size=16
    ).hexdigest()
    return {
        "id": weights,
        "parameters": count,
        "device": card() or "cpu",
        **seen,
        "held_out_loss": figures["eval/loss"],
        "perplexity": figures["eval/perplexity"],
        "sizes": {name: getattr(asked, name) for name in OF_BASE},
    }


def gather(asked: argparse.Namespace, data: Path) -> None:
    """base.jsonl and tune.jsonl, each with a -held.jsonl of --evaluated rows or so, and the tokenizer of the first."""
    includes = (Path(sysconfig.get_paths()["include"]), Path("/usr/include"))
    roots = asked.roots or [*standard_roots(), *(folder for folder in includes if folder.is_dir())]
    for name, suffixes, megabytes in (("base", SUFFIXES, asked.megabytes), ("tune", OTHER, asked.tune_megabytes)):
        found = (each for each in documents(find(roots, suffixes)) if name == "base" or MADE not in each.text[:400])
        held, some = data / f"{name}-held.jsonl", data / "held.jsonl"
        split(found, data / f"{name}.jsonl", some, asked.held_out, megabytes)
        room = asked.evaluated * asked.context * 3
        with some.open(encoding="utf-8") as lines, held.open("w", encoding="utf-8") as out:
            for each in lines:
                out.write(each)
                room -= len(each)
                if room <= 0:
                    break
    train_tokenizer(texts(data / "base.jsonl"), asked.vocabulary, data / "tokenizer")


def words(asked: argparse.Namespace, variant: str, seed: int, techniques: Sequence[str], gpu: bool) -> list[str]:
    """The command line of a run, after `python -m fxtune`."""
    out = asked.out.resolve()
    return [
        f"model.path={out / 'base' / 'model'}",
        f"model.adapter={out / f'start-{seed}'}",
        f"model.dtype={'bfloat16' if gpu else 'float32'}",
        f"data.sources=[{{path: '{out / 'data' / 'tune.jsonl'}'}}]",
        f"data.eval_sources=[{{path: '{out / 'data' / 'tune-held.jsonl'}'}}]",
        f"data.sequence_length={asked.context}",
        f"data.cache_dir={out / 'cache'}",
        f"run.dir={out / f'{variant}-{seed}'}",
        f"run.seed={seed}",
        f"train.max_steps={asked.steps}",
        "train.epochs=100",
        f"train.micro_batch_size={asked.rows}",
        f"train.global_batch_size={asked.rows}",
        f"train.eval_every={max(asked.steps // EVALUATIONS, 1)}",
        f"optimizer.lr={asked.lr}",
        f"schedule.warmup_steps={max(asked.steps // 20, 1)}",
        "checkpoint.every=0",
        "tracking.wandb.mode=disabled",
        "tracking.display=none",
        *techniques,
    ]


def write_rows(line: list[str], file: Path) -> dict[str, Any]:
    """Write down what every step of the command `line` learns from, and return what else plain_tune.Job wants of it."""
    import numpy as np
    import torch

    from fxtune.config import compose as configs
    from fxtune.optim.schedule import learning_rate
    from fxtune.training.builder import RunBuilder

    config = configs.load(line)
    data = RunBuilder(config).read()[1]
    assert data.evaluation is not None, "words() names held-out text"
    arrays: dict[str, Any] = {}
    for before, plan in (("", data.training), ("held_", data.evaluation)):
        batches = [plan.batch(step, 0) for step in range(plan.steps)]
        for name, tensors in (
            ("ids", [each.input_ids for each in batches]),
            ("targets", [each.targets for each in batches]),
            ("positions", [each.position_ids for each in batches]),
        ):
            together = torch.cat(tensors) if before else torch.stack(tensors)
            arrays[before + name] = together.to(torch.int32).numpy()
    np.savez(file, **arrays)
    steps, optimizer = data.training.steps, config.optimizer
    return {
        "rates": tuple(learning_rate(config.schedule, optimizer.lr, step, steps) for step in range(steps)),
        "eval_every": config.train.eval_every,
        "betas": tuple(optimizer.betas),
        "eps": optimizer.eps,
        "clip": config.train.max_grad_norm,
    }


def tune(line: list[str]) -> dict[str, Any]:
    """Run the command `line`. Losses as plain_tune.tune() returns them, and what was seen to act."""
    import torch

    from fxtune.config import compose as configs
    from fxtune.errors import UserError
    from fxtune.training import trainer

    torch._dynamo.reset()
    try:
        config = configs.load(line)
        folder = Path(str(config.run.dir))
        shutil.rmtree(folder, ignore_errors=True)  # what a call before this one broke off
        trainer.run(config)
    except UserError as error:
        said = str(error).splitlines()
        return {"error": f"refused: {said[1].strip() if said[0].endswith(':') and len(said) > 1 else said[0]}"[:300]}
    log = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    evidence = json.loads((folder / "evidence.json").read_text())
    return {
        "train": [each["train/loss"] for each in log if "train/loss" in each],
        "held_out": [(each["train/step"], each["eval/loss"]) for each in log if "eval/loss" in each],
        "step_seconds": statistics.median(each["train/step_seconds"] for each in log if "train/step_seconds" in each),
        "evidence": [f"{each['technique']}: {each['observed']}" for each in evidence],
    }


# --- the whole


def main() -> None:
    asked = arguments()
    record = opened(asked)
    left_out: list[str] = []
    if asked.minutes > 0:
        with ExitStack() as stack:
            ours, plain = Worker("fxtune.training.trainer", "peft"), Worker("transformers", "peft")
            stack.callback(ours.close)
            stack.callback(plain.close)
            try:
                left_out = measure(asked, record, ours, plain)
            except Failed as problem:
                raise SystemExit(f"The base or the rows: {problem}") from problem
    print("\n".join(["", *table(record)]))
    if left_out:
        print(f"\nNot run, the time ({asked.minutes:g} minutes) was over: {', '.join(left_out)}")
    if asked.plot and compared(record):
        plot(record, asked.plot)
    if beyond := [said for said, within in verdicts(record) if not within]:
        raise SystemExit("Not equal: " + "; ".join(beyond))


def opened(asked: argparse.Namespace) -> dict[str, Any]:
    """The record in --json. Ends the script where runs in it cannot be compared with what is asked for."""
    sizes = {name: getattr(asked, name) for name in OF_RUNS}
    record: dict[str, Any] = {"sizes": sizes, "base": None, "runs": {}}
    if asked.json.exists():
        record = json.loads(asked.json.read_text())
        if asked.minutes > 0 and record["sizes"] != sizes:
            apart = [
                f"{name}={record['sizes'].get(name)}" for name in sizes if record["sizes"].get(name) != sizes[name]
            ]
            raise SystemExit(f"{asked.json} holds runs with {', '.join(apart)}: name another file in --json.")
    file = asked.out / "base.json"
    if asked.minutes > 0 and file.exists():
        base = json.loads(file.read_text())
        if base["sizes"] != {name: sizes[name] for name in OF_BASE}:
            raise SystemExit(f"{asked.out} holds a base of other sizes: name another folder in --out.")
        if record["base"] and record["base"]["id"] != base["id"]:
            raise SystemExit(
                f"The runs in {asked.json} are of another base than that in {asked.out}: name another file in --json."
            )
        record["base"] = base
    elif asked.minutes > 0 and record["base"]:
        raise SystemExit(
            f"The base of the runs in {asked.json} is not in {asked.out}: name its folder in --out, or another "
            "file in --json."
        )
    return record


def measure(asked: argparse.Namespace, record: dict[str, Any], ours: Worker, plain: Worker) -> list[str]:
    """Do what is not in the record yet, until the time is over. Returns what was left out."""
    ends = time.monotonic() + 60 * asked.minutes

    def left() -> float:
        return ends - time.monotonic()

    def keep() -> None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(record, indent=1))

    wanted = [
        (variant, seed)
        for seed in asked.seeds
        for variant in VARIANTS
        if seed not in compared(record).get(variant, {})
    ]  # what was refused or failed is tried again
    names = [f"{variant} {seed}" for variant, seed in wanted]
    try:
        gpu = ours.ask(left(), card)
        if record["base"] is None:
            if left() < 60 * asked.pretrain_minutes + (0 if asked.smoke else READY):
                return ["base", *names]
            base = ours.ask(left(), make_base, asked)
            if "error" in base:
                raise SystemExit(base["error"])
            record["base"] = base
            (asked.out / "base.json").write_text(json.dumps(base, indent=1))
            keep()
        print(told(record["base"]), flush=True)
        jobs: dict[int, plain_tune.Job] = {}
        for variant, seed in wanted:
            took = [run["seconds"] for run in compared(record).get(variant, {}).values()]
            if left() <= max(took, default=0.0):  # it would be broken off
                return names
            if seed not in jobs:
                jobs[seed] = prepared(asked, seed, bool(gpu), left, ours, plain)
            run = tuned(asked, variant, jobs[seed], seed, bool(gpu), left, ours, plain)
            record["runs"][f"{variant} {seed}"] = run
            names.remove(f"{variant} {seed}")
            keep()
            print(
                f"{variant} {seed}: {run.get('error') or f'''held-out loss {run['held_out'][-1][1]:.4f}'''}, "
                f"{run['seconds']:.0f} s",
                flush=True,
            )
    except TimeOver:
        return names if record["base"] else ["base", *names]
    return names


def prepared(
    asked: argparse.Namespace, seed: int, gpu: bool, left: Callable[[], float], ours: Worker, plain: Worker
) -> plain_tune.Job:
    """A seed's rows and its adapter to start from. Both hang on the seed alone, so a later call makes the same."""
    base, start, rows = (asked.out / name for name in ("base/model", f"start-{seed}", f"rows-{seed}.npz"))
    plain.ask(left(), plain_tune.make_start, str(base), str(start), seed, asked.r, 2.0 * asked.r)
    more = ours.ask(left(), write_rows, words(asked, "plain", seed, ["techniques=lora"], gpu), rows)
    return plain_tune.Job(str(base), str(start), str(rows), **more)


def tuned(
    asked: argparse.Namespace,
    variant: str,
    job: plain_tune.Job,
    seed: int,
    gpu: bool,
    left: Callable[[], float],
    ours: Worker,
    plain: Worker,
) -> dict[str, Any]:
    """One run of one variant; fxtune's adapters are judged by plain transformers as well."""
    began = time.monotonic()
    more = [
        *(EVERYTHING if gpu else ON_A_CPU),
        f"techniques.lora.r={asked.r}",
        f"techniques.lora.alpha={2.0 * asked.r}",
        *VARIANTS[variant].more,
    ]
    try:
        if variant == "plain":
            run = plain.ask(left(), plain_tune.tune, job)
        else:
            run = ours.ask(left(), tune, words(asked, variant, seed, more, gpu))
            if "error" not in run:
                adapter = asked.out / f"{variant}-{seed}" / "adapter"
                run["judged"] = plain.ask(left(), plain_tune.judge, job.base, str(adapter), job.rows)
    except Failed as problem:
        run = {"error": str(problem)}
    return {**run, "seconds": round(time.monotonic() - began, 1)}


# --- what it came to


def compared(record: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs that came to their end, by variant and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, run in record["runs"].items():
        variant, seed = name.split()
        if "error" not in run:
            found.setdefault(variant, {})[int(seed)] = run
    return found


def differences(record: dict[str, Any], variant: str, judged: bool = False) -> dict[int, float]:
    """By seed: how far the final held-out loss is from plain's, relative; `judged`: as plain transformers sees the adapter."""
    runs = compared(record)
    plain = runs.get("plain", {})
    return {
        seed: (run["judged"] if judged else run["held_out"][-1][1]) / plain[seed]["held_out"][-1][1] - 1
        for seed, run in runs.get(variant, {}).items()
        if seed in plain
    }


def verdicts(record: dict[str, Any]) -> list[tuple[str, bool]]:
    """What each comparison came to, and whether it is within its bound."""
    said = []
    for name, variant in VARIANTS.items():
        for how, judged in (("", False), (", as plain transformers sees its adapters", True)):
            if variant.bound and (apart := differences(record, name, judged)):
                worst = max(apart.values(), key=abs)
                said.append(
                    (
                        f"{variant.title}{how}: at most {abs(worst):.3%} from plain over {len(apart)} seeds (bound "
                        f"{variant.bound:.1%})",
                        abs(worst) <= variant.bound,
                    )
                )
    return said


def told(base: dict[str, Any]) -> str:
    return (
        f"base: {base['parameters'] / 1e6:.1f}M parameters, {base['tokens'] / 1e6:.1f}M tokens in {base['steps']:,} steps "
        f"({base['seconds']:.0f} s, {base['device']}); held-out loss {base['held_out_loss']:.4f}, perplexity "
        f"{base['perplexity']:.2f} a token"
    )


def table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown: the base, a row a variant, the verdicts."""
    if not record["base"]:
        return ["no base yet"]
    seeds = sorted({int(name.split()[1]) for name in record["runs"]})
    runs = compared(record)
    before = [run["held_out"][0][1] for run in runs.get("plain", {}).values()]
    told_before = [f"held-out loss of the other text before tuning: {before[0]:.4f}"] if before else []
    lines = [
        told(record["base"]),
        *told_before,
        "",
        f"| held-out loss after {record['sizes']['steps']} steps | "
        + " | ".join(f"seed {seed}" for seed in seeds)
        + " | mean | ms a step |",
        "|---|" + "---:|" * (len(seeds) + 2),
    ]
    for name, variant in VARIANTS.items():
        refused = {
            run["error"] for key, run in record["runs"].items() if key.startswith(f"{name} ") and "error" in run
        }
        if refused and name not in runs:
            lines.append(f"| {variant.title} | {min(refused)} |" + " |" * (len(seeds) + 1))
        if name not in runs:
            continue
        speed = f"{1000 * statistics.median(run['step_seconds'] for run in runs[name].values()):.1f}"
        final = {seed: run["held_out"][-1][1] for seed, run in runs[name].items()}
        lines.append(_row(variant.title, seeds, final, differences(record, name) if variant.bound else {}, speed))
        if variant.bound:
            seen = {seed: run["judged"] for seed, run in runs[name].items()}
            lines.append(
                _row("... its adapters in plain transformers", seeds, seen, differences(record, name, True), "")
            )
    return [*lines, "", *(said + (": equal" if within else ": NOT equal") for said, within in verdicts(record))]


def _row(title: str, seeds: list[int], losses: dict[int, float], apart: dict[int, float], speed: str) -> str:
    def cell(loss: float, off: float | None) -> str:
        return f"{loss:.4f}" + (f" ({off:+.3%})" if off is not None else "")

    cells = [cell(losses[seed], apart.get(seed)) if seed in losses else "" for seed in seeds]
    mean = cell(statistics.fmean(losses.values()), statistics.fmean(apart.values()) if apart else None)
    return f"| {' | '.join([title, *cells, mean, speed])} |"


def smooth(losses: Sequence[float], points: int = 60) -> tuple[list[float], list[float]]:
    """At most `points` (step, mean loss of the steps around it)."""
    size = -(-len(losses) // points)
    parts = [losses[first : first + size] for first in range(0, len(losses), size)]
    return [index * size + (len(part) + 1) / 2 for index, part in enumerate(parts)], [
        statistics.fmean(part) for part in parts
    ]


def plot(record: dict[str, Any], path: Path) -> None:
    """Training loss, held-out loss and its difference from plain's, a line a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "fxtune", "font.size": 8, "font.sans-serif": ["DejaVu Sans"]}
    )
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.6))
    runs = compared(record)
    styles = {"plain": ("black", "-", 2.2), "fxtune": ("tab:orange", "-", 1.1), "fp8": ("tab:blue", "--", 1.1)}
    for name, by_seed in runs.items():
        color, dashes, width = styles[name]
        for first, (seed, run) in enumerate(sorted(by_seed.items())):
            style: dict[str, Any] = dict(
                color=color, linestyle=dashes, linewidth=width, alpha=0.8, label="" if first else VARIANTS[name].title
            )
            left.plot(*smooth(run["train"]), **style)
            steps = [step for step, _ in run["held_out"] if step]
            held = [loss for step, loss in run["held_out"] if step]
            middle.plot(steps, held, **style)
            reference = dict(runs.get("plain", {}).get(seed, {}).get("held_out", []))
            if VARIANTS[name].bound and all(step in reference for step in steps):
                right.plot(
                    steps,
                    [100 * (loss / reference[step] - 1) for step, loss in zip(steps, held, strict=True)],
                    **style,
                )
    for variant in VARIANTS.values():
        if variant.bound:
            for sign in (-1, 1):
                right.axhline(100 * sign * variant.bound, color="lightgray", linestyle=":", linewidth=1)
    seeds = len({seed for by_seed in runs.values() for seed in by_seed})
    for axes, title in (
        (left, "training loss, nats a token"),
        (middle, "held-out loss, nats a token"),
        (right, "held-out loss: % from plain, same seed"),
    ):
        axes.set(title=title, xlabel=f"step ({seeds} seeds)")
        axes.spines[["top", "right"]].set_visible(False)
    middle.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the text, the base and the runs")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="stop in time and say what was not run (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="the record (default: equal_loss.json in --out)")
    parser.add_argument("--plot", type=Path, help="an .svg or .png")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only whether it runs")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2])
    parser.add_argument(
        "--roots", type=Path, nargs="+", help="where text is (default: stdlib, site-packages, includes)"
    )
    for name, value, told in (
        ("hidden", 1024, "hidden size"),
        ("layers", 10, ""),
        ("head", 128, "size of an attention head"),
        ("vocabulary", 8192, ""),
        ("context", 1024, "tokens of a row"),
        ("megabytes", 150.0, "of text to pre-train on"),
        ("tune-megabytes", 16.0, "of text to tune on"),
        ("held-out", 0.05, "share of the documents"),
        ("evaluated", 128, "rows of held-out text, about"),
        ("pretrain-minutes", 2.0, ""),
        ("pretrain-steps", 10**9, "at most"),
        ("pretrain-rows", 64, "rows of a step"),
        ("pretrain-lr", 1e-3, ""),
        ("micro-tokens", 65536, "tokens of a micro-batch of pre-training, at most"),
        ("rows", 16, "rows of a step of tuning"),
        ("steps", 240, "of tuning"),
        ("lr", 5e-4, "of tuning"),
        ("r", 16, "rank of the adapters"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{told} (%(default)s)".strip())
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**SMOKE)
    asked = parser.parse_args()
    asked.json = asked.json or asked.out / "equal_loss.json"
    return asked


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed
    main()
