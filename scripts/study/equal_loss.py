"""Compares the loss of one LoRA training: plain Hugging Face, fxtune with all techniques, fxtune with an fp8 base.

    python scripts/study/equal_loss.py --out build/equal --minutes 8 --json equal_loss.json  # one H200; again: continues
    python scripts/study/equal_loss.py --out build/equal --minutes 0 --json equal_loss.json --plot p.svg  # table and plot
    python scripts/study/equal_loss.py --out build/moe --moe --minutes 9 --json moe.json   # the same for a mixture of experts
    python scripts/study/equal_loss.py --out build/oss --gpt-oss --minutes 9 --json oss.json  # gpt-oss, and in MXFP4
    python scripts/study/equal_loss.py --out build/full --full --minutes 2 --json full.json  # full fine-tuning
    python scripts/study/equal_loss.py --out /tmp/equal --smoke   # a short test on a CPU, 20 s; with --moe, --gpt-oss, --full

1. gather.py collects text of this machine: Python sources and documentation for the base, C and C++ for tuning. Some
   documents of each are held out. A tokenizer is trained on the first text. The text stays in --out.
2. fxtune pre-trains a Llama of at least 100M parameters on the first text, from random weights, and reports its
   perplexity.
3. For each seed the script draws one initial adapter for all variants and writes the rows of every step to a file. So
   all variants train on the same tokens in the same order, with the same learning rates and the same gradient
   clipping:
     plain    transformers, peft and torch.optim.AdamW in bfloat16, in another process (plain_tune.py)
     fxtune   the fast techniques in bfloat16: the GPU's best attention, fused loss, fused LoRA, compiled layers
     fp8      the same with an fp8 base
4. Each variant computes its held-out loss. Plain transformers also computes the held-out loss of fxtune's adapters
   over the bfloat16 base. For each seed the final losses must be within 0.5 % (fxtune) and 1 % (fp8) of plain;
   otherwise the exit code is 1.

With --moe the base is a mixture of experts (Qwen3-MoE), pre-trained in bfloat16 with stochastic rounding. All variants
have adapters on attention and on all experts. With --gpt-oss the mixture is a gpt-oss: attention with sinks and windows,
experts with biases and a clamped activation. Its trained experts are rounded to MXFP4, as gpt-oss ships them, so the
variant `mxfp4` has the same weights as the others, in 4 bits.
With --full (--r 0) all weights are trained, in bfloat16 by torch's fused AdamW, and `float8` has the products of all
layers in fp8. `plain32` is plain in float32: it tells which of two unequal sides is nearer to the exact result.
With --moe, --gpt-oss and --full the bound is 0.1 %.

The JSON file keeps finished runs, which do not run again; --out keeps the base. A refused run (fp8 on a CPU) has a row
too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import shutil
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "make"))
import plain_tune
from gather import SUFFIXES, documents, find, standard_roots
from pretrain import base_config, micro_batch, random_llama, split, texts, train_for, train_tokenizer

TUNING_SUFFIXES = (".h", ".hpp", ".hh", ".cuh", ".cu", ".c", ".cc", ".cpp", ".inl")
"""Suffixes of the files to tune on."""
GENERATED = "generated"
"""A generated file has this word near its top. Such files are skipped, since thousands of them are almost equal."""
EVALUATIONS = 8
"""Evaluations of the held-out text per run."""
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
"""The defaults with --smoke."""
MOE = dict(hidden=512, layers=8, experts=16, pretrain_minutes=0.4, megabytes=60.0, evaluated=64, steps=100)
"""The defaults with --moe."""
GPT_OSS = dict(MOE, mixture="gpt_oss", head=64, pretrain_minutes=1.2, variants=["plain", "fxtune", "mxfp4"])
"""The defaults with --gpt-oss, whose base trains more slowly."""
FULL = dict(r=0, lr=2e-4, steps=120, pretrain_minutes=0.4, megabytes=60.0, variants=["plain", "fxtune", "float8"])
"""The defaults with --full."""
BASE_OPTIONS = (
    *("hidden", "layers", "head", "experts", "mixture", "vocabulary", "context", "megabytes", "tune_megabytes"),
    *("held_out", "evaluated", "pretrain_minutes", "pretrain_steps", "pretrain_rows", "pretrain_lr"),
)
RUN_OPTIONS = (*BASE_OPTIONS, "rows", "steps", "lr", "r")
"""Options that must be equal for two runs to be comparable."""

CLOSE = 0.001
"""The bound of each variant with --moe, --gpt-oss and --full."""


@dataclass(frozen=True)
class Variant:
    title: str
    bound: float = 0.0
    """Largest relative difference of its held-out loss from plain's."""
    keys: tuple[str, ...] = ()
    """Additional command-line keys."""


VARIANTS = {
    "plain": Variant("plain transformers + peft"),
    "fxtune": Variant("fxtune, everything on", 0.005),
    "fp8": Variant(
        "fxtune, everything on, base in fp8",
        0.01,
        ("techniques.quantize.enabled=true", "techniques.quantize.type=fp8"),
    ),
    "mxfp4": Variant(
        "fxtune, everything on, experts in MXFP4",
        CLOSE,
        ("techniques.quantize.enabled=true", "techniques.quantize.type=mxfp4"),
    ),
    "float8": Variant("fxtune, everything on, products in fp8", CLOSE, ("techniques.float8.enabled=true",)),
    "plain32": Variant("plain transformers + peft, float32"),
}
PLAIN = ("plain", "plain32")
ALL_TECHNIQUES = ("techniques=[fast,lora]",)
CPU_TECHNIQUES = (
    "techniques=[lora,selective]",
    "techniques.liger.enabled=true",
    "techniques.liger.kernels=[fused_linear_cross_entropy]",
)
"""Without compilation, which takes longer on a CPU than everything else."""
CPU_MOE_TECHNIQUES = ("techniques=[lora,selective]",)


# --- functions of the fxtune worker


def gpu_name() -> str | None:
    """The GPU's name; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def make_base(args: argparse.Namespace) -> dict[str, Any]:
    """Write text, tokenizer and base to --out, from scratch. Returns the figures of the base."""
    from fxtune.data.config import SourceConfig
    from fxtune.facts.options import Autocast
    from fxtune.models.load import DType, load_config
    from fxtune.models.structure import skeleton

    data = args.out / "data"
    for folder in (data, args.out / "base", args.out / "base-trial"):
        shutil.rmtree(folder, ignore_errors=True)
    data.mkdir(parents=True)
    gather(args, data)
    config = base_config(args.out, "base", 0)
    config.model = random_llama(
        data / "tokenizer", args.hidden, args.layers, args.head, args.context, args.experts, args.mixture
    )
    if args.experts and gpu_name():  # transformers runs experts as grouped matmuls of bfloat16
        config.model.dtype = DType.bfloat16
        config.techniques.precision.autocast = Autocast.none
        config.techniques.compile.enabled, config.optimizer.stochastic_rounding = False, True
    built = skeleton(load_config(config.model).to_dict())
    assert built is not None, "transformers has the Llama architecture"
    count = sum(parameter.numel() for parameter in built.parameters())
    config.data.sources = [SourceConfig(path=str(data / "base.jsonl"))]
    config.data.eval_sources = [SourceConfig(path=str(data / "base-held.jsonl"))]
    config.data.sequence_length, config.train.epochs = args.context, 100
    config.train.global_batch_size = args.pretrain_rows
    config.train.micro_batch_size = micro_batch(args.pretrain_rows, args.context, args.micro_tokens)
    config.optimizer.lr, config.schedule.warmup_steps, config.schedule.min_lr_ratio = args.pretrain_lr, 0.03, 0.01
    training = train_for(config, 60 * args.pretrain_minutes, args.pretrain_steps)
    figures = json.loads((args.out / "base" / "result.json").read_text())
    file = args.out / "base" / "model" / "model.safetensors"
    if args.mixture == "gpt_oss":
        round_experts(file)
    weights = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    return {
        "id": weights,
        "parameters": count,
        "device": gpu_name() or "cpu",
        **training,
        "held_out_loss": figures["eval/loss"],
        "perplexity": figures["eval/perplexity"],
        "sizes": {name: getattr(args, name) for name in BASE_OPTIONS},
    }


def round_experts(file: Path) -> None:
    """Replace the weights of a gpt-oss's experts in `file` by the nearest numbers that MXFP4 has."""
    from safetensors.torch import load_file, save_file

    from fxtune.kernels.quantized import pack_mxfp4, unpack_mxfp4

    tensors = load_file(file)
    for name, weight in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            rows = weight.mT.contiguous()  # MXFP4 packs along the input; transformers' weight is [experts, in, out]
            unpack_mxfp4(*pack_mxfp4(rows), rows.view(-1, rows.shape[-1]))
            tensors[name] = rows.mT.contiguous()
    save_file(tensors, file, {"format": "pt"})
    (file.parent / "proof.json").unlink()  # it has the digest of the former file


def gather(args: argparse.Namespace, data: Path) -> None:
    """Write base.jsonl and tune.jsonl, for each a -held.jsonl of about --evaluated rows, and the tokenizer of
    base.jsonl.
    """
    includes = (Path(sysconfig.get_paths()["include"]), Path("/usr/include"))
    roots = args.roots or [*standard_roots(), *(folder for folder in includes if folder.is_dir())]
    for name, suffixes, megabytes in (
        ("base", SUFFIXES, args.megabytes),
        ("tune", TUNING_SUFFIXES, args.tune_megabytes),
    ):
        found = (
            each for each in documents(find(roots, suffixes)) if name == "base" or GENERATED not in each.text[:400]
        )
        held, some = data / f"{name}-held.jsonl", data / "held.jsonl"
        split(found, data / f"{name}.jsonl", some, args.held_out, megabytes)
        room = args.evaluated * args.context * 3
        with some.open(encoding="utf-8") as lines, held.open("w", encoding="utf-8") as out:
            for each in lines:
                out.write(each)
                room -= len(each)
                if room <= 0:
                    break
    train_tokenizer(texts(data / "base.jsonl"), args.vocabulary, data / "tokenizer")


def words(args: argparse.Namespace, variant: str, seed: int, techniques: Sequence[str], gpu: bool) -> list[str]:
    """The command line of a run, after `python -m fxtune`."""
    out = args.out.resolve()
    return [
        f"model.path={out / 'base' / 'model'}",
        *([f"model.adapter={out / f'start-{seed}'}"] if args.r else []),
        f"model.dtype={'bfloat16' if gpu else 'float32'}",
        f"data.sources=[{{path: '{out / 'data' / 'tune.jsonl'}'}}]",
        f"data.eval_sources=[{{path: '{out / 'data' / 'tune-held.jsonl'}'}}]",
        f"data.sequence_length={args.context}",
        f"data.cache_dir={out / 'cache'}",
        f"run.dir={out / f'{variant}-{seed}'}",
        f"run.seed={seed}",
        "run.export=last",  # the tools that it is compared with have no best checkpoint
        f"train.max_steps={args.steps}",
        "train.epochs=100",
        f"train.micro_batch_size={args.rows}",
        f"train.global_batch_size={args.rows}",
        f"train.eval_every={max(args.steps // EVALUATIONS, 1)}",
        f"optimizer.lr={args.lr}",
        f"schedule.warmup_steps={max(args.steps // 20, 1)}",
        "checkpoint.every=0",
        "tracking.wandb.mode=disabled",
        "tracking.display=none",
        # On a CPU a packed row of gpt-oss would not keep its documents apart.
        *([] if gpu or args.mixture != "gpt_oss" else ["data.packing=false", f"data.buckets=[{args.context}]"]),
        *techniques,
    ]


def write_rows(line: list[str], file: Path) -> dict[str, Any]:
    """Write the rows of every step of the command `line` to `file`. Returns the other fields of plain_tune.Job."""
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
            joined = torch.cat(tensors) if before else torch.stack(tensors)
            arrays[before + name] = joined.to(torch.int32).numpy()
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
    """Run the command `line`.

    Returns the losses like plain_tune.tune(), and the evidence that each technique acted.
    """
    import torch

    from fxtune.config import compose as configs
    from fxtune.errors import UserError
    from fxtune.training import trainer

    torch._dynamo.reset()
    try:
        config = configs.load(line)
        folder = Path(str(config.run.dir))
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted call
        trainer.run(config)
    except UserError as error:
        lines = str(error).splitlines()
        reason = lines[1].strip() if lines[0].endswith(":") and len(lines) > 1 else lines[0]
        return {"error": f"refused: {reason}"[:300]}
    log = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    evidence = json.loads((folder / "evidence.json").read_text())
    return {
        "train": [each["train/loss"] for each in log if "train/loss" in each],
        "held_out": [(each["train/step"], each["eval/loss"]) for each in log if "eval/loss" in each],
        "step_seconds": statistics.median(each["train/step_seconds"] for each in log if "train/step_seconds" in each),
        "evidence": [f"{each['technique']}: {each['observed']}" for each in evidence],
    }


# --- the experiment


def main() -> None:
    args = arguments()
    record = open_record(args)
    left_out: list[str] = []
    if args.minutes > 0:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as ours, ProcessPoolExecutor(1, spawn) as plain:
            left_out = measure(args, record, ours, plain)
    print("\n".join(["", *table(record)]))
    if left_out:
        print(f"\nNot run, the time limit ({args.minutes:g} minutes) was reached: {', '.join(left_out)}")
    if args.plot and finished_runs(record):
        plot(record, args.plot)
    if unequal := [text for text, within in verdicts(record) if not within]:
        raise SystemExit("Not equal: " + "; ".join(unequal))


def open_record(args: argparse.Namespace) -> dict[str, Any]:
    """The record in --json. Ends the script if its runs are not comparable with the requested ones."""
    sizes = {name: getattr(args, name) for name in RUN_OPTIONS}
    record: dict[str, Any] = {"sizes": sizes, "base": None, "runs": {}}
    if args.json.exists():
        record = json.loads(args.json.read_text())
        if args.minutes > 0 and record["sizes"] != sizes:
            different = [
                f"{name}={record['sizes'].get(name)}" for name in sizes if record["sizes"].get(name) != sizes[name]
            ]
            raise SystemExit(f"{args.json} holds runs with {', '.join(different)}: name another file in --json.")
    file = args.out / "base.json"
    if args.minutes > 0 and file.exists():
        base = json.loads(file.read_text())
        if base["sizes"] != {name: sizes[name] for name in BASE_OPTIONS}:
            raise SystemExit(f"{args.out} holds a base with other options: name another folder in --out.")
        if record["base"] and record["base"]["id"] != base["id"]:
            raise SystemExit(
                f"The runs in {args.json} use another base than the one in {args.out}: name another file in --json."
            )
        record["base"] = base
    elif args.minutes > 0 and record["base"]:
        raise SystemExit(
            f"The base of the runs in {args.json} is not in {args.out}: name its folder in --out, or another "
            "file in --json."
        )
    return record


def measure(
    args: argparse.Namespace, record: dict[str, Any], ours: ProcessPoolExecutor, plain: ProcessPoolExecutor
) -> list[str]:
    """Run what the record does not hold yet. Returns the names of the runs that the time limit leaves out."""
    ends = time.monotonic() + 60 * args.minutes

    def keep() -> None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1))

    missing = [
        (variant, seed)
        for seed in args.seeds
        for variant in args.variants
        if seed not in finished_runs(record).get(variant, {})
    ]  # a refused run is tried again
    gpu = bool(ours.submit(gpu_name).result())
    if record["base"] is None:
        base = ours.submit(make_base, args).result()
        record["base"] = base
        (args.out / "base.json").write_text(json.dumps(base, indent=1))
        keep()
    print(base_summary(record["base"]), flush=True)
    jobs: dict[int, plain_tune.Job] = {}
    for index, (variant, seed) in enumerate(missing):
        took = [run["seconds"] for run in finished_runs(record).get(variant, {}).values()]
        if ends - time.monotonic() <= max(took, default=0.0):
            return [f"{variant} {seed}" for variant, seed in missing[index:]]
        if seed not in jobs:
            jobs[seed] = prepare_seed(args, seed, gpu, ours, plain)
        run = record["runs"][f"{variant} {seed}"] = run_variant(args, variant, jobs[seed], seed, gpu, ours, plain)
        keep()
        result = run.get("error") or f"held-out loss {run['held_out'][-1][1]:.4f}"
        print(f"{variant} {seed}: {result}, {run['seconds']:.0f} s", flush=True)
    return []


def prepare_seed(
    args: argparse.Namespace, seed: int, gpu: bool, ours: ProcessPoolExecutor, plain: ProcessPoolExecutor
) -> plain_tune.Job:
    """Write a seed's rows and initial adapter. Both depend only on the seed, so a later call writes the same ones."""
    base, start, rows = (args.out / name for name in ("base/model", f"start-{seed}", f"rows-{seed}.npz"))
    if args.r:
        plain.submit(plain_tune.make_start, str(base), str(start), seed, args.r, 2.0 * args.r).result()
    techniques = [f"techniques={'lora' if args.r else 'full'}"]
    if args.mixture == "gpt_oss" and gpu:  # without these techniques its rows would not be packed
        techniques = [*ALL_TECHNIQUES]
    fields = ours.submit(write_rows, words(args, "plain", seed, techniques, gpu), rows).result()
    return plain_tune.Job(str(base), str(start) if args.r else None, str(rows), **fields)


def run_variant(
    args: argparse.Namespace,
    variant: str,
    job: plain_tune.Job,
    seed: int,
    gpu: bool,
    ours: ProcessPoolExecutor,
    plain: ProcessPoolExecutor,
) -> dict[str, Any]:
    """Run one variant. Plain transformers also evaluates fxtune's adapters."""
    began = time.monotonic()
    techniques = [*(ALL_TECHNIQUES if gpu else CPU_MOE_TECHNIQUES if args.experts else CPU_TECHNIQUES)]
    if args.r:
        techniques += [f"techniques.lora.r={args.r}", f"techniques.lora.alpha={2.0 * args.r}"]
    else:
        techniques.append("techniques.lora.enabled=false")
    techniques += VARIANTS[variant].keys
    if variant in PLAIN:
        run = plain.submit(plain_tune.tune, replace(job, float32=variant == "plain32")).result()
    else:
        run = ours.submit(tune, words(args, variant, seed, techniques, gpu)).result()
        if "error" not in run:
            made = args.out / f"{variant}-{seed}" / ("adapter" if args.r else "model")
            judged = (job.base, str(made)) if args.r else (str(made), None)
            run["judged"] = plain.submit(plain_tune.judge, *judged, job.rows).result()
    return {**run, "seconds": round(time.monotonic() - began, 1)}


# --- results


def finished_runs(record: dict[str, Any]) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs without an error, by variant and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, run in record["runs"].items():
        variant, seed = name.split()
        if "error" not in run:
            found.setdefault(variant, {})[int(seed)] = run
    return found


def differences(record: dict[str, Any], variant: str, judged: bool = False) -> dict[int, float]:
    """Relative difference of the final held-out loss from plain's, by seed.

    With `judged`, plain transformers computes the loss with the adapter.
    """
    runs = finished_runs(record)
    plain = runs.get("plain", {})
    return {
        seed: (run["judged"] if judged else run["held_out"][-1][1]) / plain[seed]["held_out"][-1][1] - 1
        for seed, run in runs.get(variant, {}).items()
        if seed in plain
    }


def verdicts(record: dict[str, Any]) -> list[tuple[str, bool]]:
    """The result of each comparison, and whether it is within its bound."""
    results = []
    for name, variant in VARIANTS.items():
        bound = _only_bound(record) or variant.bound
        for suffix, judged in (("", False), (f", its {_trained(record)} in plain transformers", True)):
            if variant.bound and (by_seed := differences(record, name, judged)):
                worst = max(by_seed.values(), key=abs)
                results.append(
                    (
                        f"{variant.title}{suffix}: at most {abs(worst):.3%} from plain over {len(by_seed)} seeds (bound "
                        f"{bound:.1%})",
                        abs(worst) <= bound,
                    )
                )
    return results


def _only_bound(record: dict[str, Any]) -> float:
    """The bound of all variants; 0 if each has its own."""
    sizes = record["sizes"]
    return CLOSE if sizes.get("experts") or not sizes["r"] else 0.0


def _trained(record: dict[str, Any]) -> str:
    return "adapters" if record["sizes"]["r"] else "weights"


def base_summary(base: dict[str, Any]) -> str:
    return (
        f"base: {base['parameters'] / 1e6:.1f}M parameters, {base['tokens'] / 1e6:.1f}M tokens in {base['steps']:,} steps "
        f"({base['seconds']:.0f} s, {base['device']}); held-out loss {base['held_out_loss']:.4f}, perplexity "
        f"{base['perplexity']:.2f} per token"
    )


def table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown: the base, one row per variant, the verdicts."""
    if not record["base"]:
        return ["no base yet"]
    seeds = sorted({int(name.split()[1]) for name in record["runs"]})
    runs = finished_runs(record)
    before = [run["held_out"][0][1] for run in runs.get("plain", {}).values()]
    before_line = [f"held-out loss of the tuning text before tuning: {before[0]:.4f}"] if before else []
    lines = [
        base_summary(record["base"]),
        *before_line,
        "",
        f"| held-out loss after {record['sizes']['steps']} steps | "
        + " | ".join(f"seed {seed}" for seed in seeds)
        + " | mean | ms/step |",
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
        lines.append(
            _table_row(variant.title, seeds, final, {} if name == "plain" else differences(record, name), speed)
        )
        if variant.bound:
            judged = {seed: run["judged"] for seed, run in runs[name].items()}
            lines.append(
                _table_row(
                    f"... its {_trained(record)} in plain transformers",
                    seeds,
                    judged,
                    differences(record, name, True),
                    "",
                )
            )
    return [*lines, "", *(text + (": equal" if within else ": NOT equal") for text, within in verdicts(record))]


def _table_row(title: str, seeds: list[int], losses: dict[int, float], relative: dict[int, float], speed: str) -> str:
    def cell(loss: float, difference: float | None) -> str:
        return f"{loss:.4f}" + (f" ({difference:+.3%})" if difference is not None else "")

    cells = [cell(losses[seed], relative.get(seed)) if seed in losses else "" for seed in seeds]
    mean = cell(statistics.fmean(losses.values()), statistics.fmean(relative.values()) if relative else None)
    return f"| {' | '.join([title, *cells, mean, speed])} |"


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the held-out losses of each run to an SVG file."""
    from fxtune.reports.charts import Series
    from fxtune.reports.charts import plot as svg

    series = [
        Series(
            f"{VARIANTS[name].title}, seed {seed}", [point for point in run["held_out"] if point[0]], name == "plain"
        )
        for name, by_seed in finished_runs(record).items()
        for seed, run in sorted(by_seed.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg("Held-out loss", series, "step", "nats per token"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the text, the base and the runs")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="start no run after this time; 0: only the table (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file of the results (default: equal_loss.json in --out)")
    parser.add_argument("--plot", type=Path, help="an .svg file of the held-out losses")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test that the script runs")
    parser.add_argument("--moe", action="store_true", help="a mixture of experts, with a bound of 0.1 %%")
    parser.add_argument("--gpt-oss", action="store_true", help="a gpt-oss, with a bound of 0.1 %%")
    parser.add_argument("--full", action="store_true", help="full fine-tuning, with a bound of 0.1 %%")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2])
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=["plain", "fxtune", "fp8"],
        help=f"of {','.join(VARIANTS)} (default plain,fxtune,fp8; with --gpt-oss plain,fxtune,mxfp4; with --full plain,fxtune,float8)",
    )
    parser.add_argument(
        "--roots", type=Path, nargs="+", help="folders with text (default: stdlib, site-packages, includes)"
    )
    for name, value, text in (
        ("hidden", 1024, "hidden size"),
        ("layers", 10, ""),
        ("head", 128, "size of an attention head"),
        ("experts", 0, "experts of a layer, two of them for each token; 0: no mixture"),
        ("mixture", "qwen3_moe", "the type of a mixture: qwen3_moe or gpt_oss"),
        ("vocabulary", 8192, ""),
        ("context", 1024, "tokens per row"),
        ("megabytes", 150.0, "megabytes of text for pre-training"),
        ("tune-megabytes", 16.0, "megabytes of text for tuning"),
        ("held-out", 0.05, "share of held-out documents"),
        ("evaluated", 128, "approximate number of held-out rows"),
        ("pretrain-minutes", 2.0, ""),
        ("pretrain-steps", 10**9, "upper limit"),
        ("pretrain-rows", 64, "rows per pre-training step"),
        ("pretrain-lr", 1e-3, ""),
        ("micro-tokens", 65536, "upper limit of tokens per pre-training micro-batch"),
        ("rows", 16, "rows per tuning step"),
        ("steps", 240, "tuning steps"),
        ("lr", 5e-4, "learning rate of tuning"),
        ("r", 16, "rank of the adapters; 0: all weights are trained"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{text} (%(default)s)".strip())
    asked = parser.parse_known_args()[0]
    if asked.moe:
        parser.set_defaults(**MOE)
    if asked.gpt_oss:
        parser.set_defaults(**GPT_OSS)
    if asked.full:
        parser.set_defaults(**FULL)
    if asked.smoke:
        parser.set_defaults(**SMOKE, experts=4 if asked.moe or asked.gpt_oss else 0)
    args = parser.parse_args()
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"--variants: {', '.join(sorted(unknown))} is none of {', '.join(VARIANTS)}")
    args.json = args.json or args.out / "equal_loss.json"
    return args


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for a checkout that is not installed
    main()
