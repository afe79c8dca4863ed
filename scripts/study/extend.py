"""Tests context extension with YaRN: pre-trains a small Llama on 1,024 tokens, extends it to 8,192 tokens, measures
both models.

    python scripts/study/extend.py --out build/extend            # one H200, about nine minutes
    python scripts/study/extend.py --out build/extend --again --extend-lr 1e-4     # extends the same base again
    python scripts/study/extend.py --out build/extend --again --lengths   # also: rows that grow against equal rows
    python scripts/study/extend.py --out /tmp/extend --smoke     # a short test with a tiny model on a CPU

1. gather.py collects text of this machine and joins the files of a package to long documents. A part of them is held
   out. A BPE tokenizer is trained on the text.
2. fxtune pre-trains at the short context, on that text and on retrieval documents (retrieval.py) that fit the short
   context.
3. fxtune extends the model by full fine-tuning: YaRN by --factor, rows of the long context, long and short documents
   in every step (data.mix). A share of the long tokens (--long-retrieval) comes from retrieval documents.
4. Plain transformers evaluates three models on held-out text: the base, the base with YaRN but without tuning, and the
   extended model from the folder that fxtune saved. It measures the loss by position, the loss of short rows, and the
   share of pass keys that the model finds by length and depth (exact match, see retrieval.accuracy).

With --lengths it extends the base twice more, on the same data without data.mix and for --extend-steps steps each:
with rows of the long context, and with rows that grow to it (data.length_schedule). Both evaluate the held-out rows of
the long context as they train, so the script can say how long each took to the loss at which the equal rows end. The
table then has both models as well.

The script writes extended.json and the models to --out and prints the table. It downloads nothing. It
writes the JSON file after each stage and each evaluated model, so the same command continues an interrupted call after
the last of them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "make"))
from gather import Document, documents, find, standard_roots
from pretrain import base_config, line, micro_batch, random_llama, split, texts, train_for, train_tokenizer
from retrieval import Fillers, Passkeys, accuracy
from retrieval import documents as retrieval_documents

SMOKE = dict(
    context=256,
    factor=2,
    hidden=64,
    layers=2,
    vocabulary=512,
    megabytes=1,
    document_chars=3000,
    minutes=0.1,
    pretrain_steps=6,
    extend_steps=4,
    rows=8,
    extend_rows=4,
    micro_tokens=1024,
    samples=2,
    held_out=0.2,
    evaluated=4,
)
"""The defaults with --smoke."""
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass
class Corpus:
    """The text of an experiment: a folder with the joined documents (long.jsonl, held.jsonl) and the tokenizer."""

    folder: Path
    tokenizer: Any
    sample: list[str]
    """Some of the training documents."""
    held: list[list[int]]
    """Token ids of the held-out documents that are at least as long as the long context."""
    tokens_per_document: float
    chars_per_token: float

    def encode(self, texts: list[str]) -> list[list[int]]:
        return encode(self.tokenizer, texts)


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def gather_corpus(args: argparse.Namespace, folder: Path) -> None:
    """Gather text, split off the held-out documents, train the tokenizer."""
    folder.mkdir(parents=True)
    found = documents(find(args.roots or standard_roots()), args.seed, args.document_chars // 4, args.document_chars)
    split(found, folder / "long.jsonl", folder / "held.jsonl", args.held_out, args.megabytes)
    train_tokenizer(texts(folder / "long.jsonl"), args.vocabulary, folder / "tokenizer")


def open_corpus(args: argparse.Namespace, folder: Path) -> Corpus:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    sample = list(islice(texts(folder / "long.jsonl"), 500))
    tokens = sum(map(len, encode(tokenizer, sample[:100]))) / len(sample[:100])
    length = args.context * args.factor
    held = [ids for ids in encode(tokenizer, list(texts(folder / "held.jsonl"))) if len(ids) >= length]
    if len(held) < 2:
        raise SystemExit(
            f"Only {len(held)} held-out documents of {length} tokens: raise --megabytes, --document-chars or "
            "--held-out."
        )
    return Corpus(folder, tokenizer, sample, held, tokens, sum(map(len, sample[:100])) / len(sample[:100]) / tokens)


def write(file: Path, found: Iterable[str], source: str) -> Path:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(line(Document(text, source)) for text in found)
    return file


def pieces(sample: list[str], chars: int) -> Iterator[str]:
    """An endless stream of document pieces of up to `chars` characters."""
    rng = random.Random(0)
    while True:
        for text in sample:
            start = text.rfind("\n", 0, rng.randrange(max(len(text) - chars, 1)) + 1) + 1
            yield text[start : start + rng.randint(chars // 4, chars)]


def write_retrieval(corpus: Corpus, name: str, tokens: float, low: int, high: int, seed: int) -> Path:
    """Write about `tokens` tokens of retrieval documents, each of `low` to `high` tokens."""
    count = max(int(tokens / (0.85 * (low + high) / 2)), 8)
    made = retrieval_documents(random.Random(seed), Fillers(corpus.sample), corpus.encode, count, low, high)
    return write(corpus.folder / f"{name}.jsonl", made, "retrieval")


def pretraining(args: argparse.Namespace, corpus: Corpus) -> Any:
    """The config of the base: random weights, rows of the short context."""
    from fxtune.data.config import SourceConfig

    config = base_config(args.out, "base", args.seed)
    config.model = random_llama(corpus.folder / "tokenizer", args.hidden, args.layers, 64, args.context)
    supply = args.retrieval * args.megabytes * 1e6 / 3.5  # repeated about as often as the text
    retrieval = write_retrieval(corpus, "retrieval", supply, args.context // 4, args.context, args.seed)
    config.data.sources = [
        SourceConfig(path=str(corpus.folder / "long.jsonl"), weight=1 - args.retrieval),
        SourceConfig(path=str(retrieval), weight=args.retrieval),
    ]
    config.data.sequence_length = args.context
    config.train.global_batch_size = args.rows
    config.train.micro_batch_size = micro_batch(args.rows, args.context, args.micro_tokens)
    config.optimizer.lr, config.schedule.warmup_steps, config.schedule.min_lr_ratio = args.lr, 0.03, 0.01
    return config


def extension(args: argparse.Namespace, corpus: Corpus, name: str) -> Any:
    """The config of the extension: YaRN, rows of the long context, a mix of long and short documents."""
    from fxtune.data.config import MixConfig, SourceConfig
    from fxtune.facts.options import RopeType
    from fxtune.models.load import DType, ModelConfig
    from fxtune.techniques.rope import Rope

    context, length = args.context, args.context * args.factor
    tokens = args.extend_steps * args.extend_rows * length
    config = base_config(args.out, name, args.seed)
    config.model = ModelConfig(path=str(args.out / "base" / "model"), dtype=DType.float32)
    config.techniques.rope = Rope(enabled=True, type=RopeType.yarn, factor=float(args.factor))
    long, short = args.long_share * tokens, (1 - args.long_share) * tokens
    # Each kind has as many tokens as the steps take, so that the mix has the requested shares.
    limit = max(math.ceil((1 - args.long_retrieval) * long / corpus.tokens_per_document), 2)
    count = int((1 - args.retrieval) * short / (0.5 * context)) + 1
    cut = islice(pieces(corpus.sample, int(0.8 * context * corpus.chars_per_token)), count)
    facts, far_facts = args.retrieval * short, args.long_retrieval * long
    files = [
        write(corpus.folder / "short.jsonl", cut, "pieces"),
        write_retrieval(corpus, "retrieval-short", facts, context // 4, context, args.seed + 1),
    ]
    if far_facts:
        files.append(write_retrieval(corpus, "retrieval-long", far_facts, context * 3 // 2, length, args.seed + 2))
    config.data.sources = [
        SourceConfig(path=str(corpus.folder / "long.jsonl"), limit=limit),
        *(SourceConfig(path=str(file)) for file in files),
    ]
    config.data.sequence_length = length
    config.data.mix = MixConfig(long_share=args.long_share, threshold=context)
    config.train.global_batch_size = args.extend_rows
    config.train.micro_batch_size = micro_batch(args.extend_rows, length, args.micro_tokens)
    config.optimizer.lr, config.schedule.warmup_steps, config.schedule.min_lr_ratio = args.extend_lr, 0.1, 0.0
    return config


EQUAL, GROWING = "equal rows", "growing rows"


def compare_lengths(args: argparse.Namespace, corpus: Corpus, name: str, arms: dict[str, Any]) -> None:
    """Extend the base with equal rows and with growing ones, where `arms` has no result yet, and keep in `arms` the
    held-out loss of long rows over the seconds of training."""
    from fxtune.data.config import MixConfig, SourceConfig
    from fxtune.training import trainer

    length, held = args.context * args.factor, corpus.folder / "held-long.jsonl"
    rows = [{"input_ids": ids[:length]} for ids in corpus.held[: args.evaluated]]
    held.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arm in (EQUAL, GROWING):
        if arm in arms:
            continue
        config = extension(args, corpus, f"{name}-{arm.split()[0]}")
        shutil.rmtree(config.run.dir, ignore_errors=True)
        config.data.mix, config.data.eval_sources = MixConfig(), [SourceConfig(path=str(held))]
        if arm == GROWING:
            between = [[0.3, length // 2]] if args.factor > 2 else []
            config.data.length_schedule = [[0.0, args.context], *between, [0.6, length]]
        config.train.max_steps, config.train.log_every = args.extend_steps, 1
        config.train.eval_every = max(args.extend_steps // 20, 1)
        trainer.run(config)
        arms[arm] = curve([json.loads(each) for each in (Path(config.run.dir) / "metrics.jsonl").open()], config)


def curve(lines: list[dict[str, Any]], config: Any) -> dict[str, list[float]]:
    """The held-out losses of a run, and the seconds of its steps up to each of them.

    The first two steps of a stage, in which code is compiled, count as a median step of the stage.
    """
    seconds = {one["train/step"]: one["train/step_seconds"] for one in lines if "train/step_seconds" in one}
    steps = config.train.max_steps
    borders = [math.ceil(share * steps - 1e-9) for share, _ in config.data.length_schedule or [[0.0, 0]]]
    for first, end in pairwise([*borders, steps]):
        median = statistics.median(seconds[step + 1] for step in range(min(first + 2, end - 1), end))
        seconds |= dict.fromkeys(range(first + 1, min(first + 2, end) + 1), median)
    losses = {one["train/step"]: one["eval/loss"] for one in lines if "eval/loss" in one}
    return {
        "steps": list(losses),
        "seconds": [sum(seconds[done + 1] for done in range(step)) for step in losses],
        "losses": list(losses.values()),
    }


def seconds_to(loss: float, arm: dict[str, list[float]]) -> float | None:
    """The seconds of training at which the held-out loss reaches `loss`, linear between two evaluations; None: never."""
    points = list(zip(arm["seconds"], arm["losses"], strict=True))
    for (before, high), (after, low) in pairwise([(0.0, math.inf), *points]):
        if low <= loss:
            return after if math.isinf(high) else before + (after - before) * (high - loss) / (high - low)
    return None


def verdict(arms: dict[str, Any]) -> str:
    equal, growing = arms[EQUAL], arms[GROWING]
    target = equal["losses"][-1]
    needed = seconds_to(target, growing)
    reached = "never" if needed is None else f"after {needed:.1f} s ({needed / equal['seconds'][-1]:.2f}x)"
    return (
        f"{EQUAL} end with a held-out loss of long rows of {target:.4f} after {equal['seconds'][-1]:.1f} s of training; "
        f"{GROWING} reach it {reached}, and end with {growing['losses'][-1]:.4f} after {growing['seconds'][-1]:.1f} s."
    )


class Judge:
    """Evaluates models in plain transformers, all on the same held-out rows."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus) -> None:
        import torch

        self.args, self.device = args, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        length, context = args.context * args.factor, args.context
        held = corpus.held[: args.evaluated]
        self.long = torch.tensor([ids[:length] for ids in held])
        self.short = torch.tensor(
            [ids[at : at + context] for ids in held for at in range(0, length - context + 1, context)]
        )
        keys = Passkeys(corpus.encode, [token for ids in corpus.held for token in ids], args.seed)
        self.lengths = [context // 2 * 2**power for power in range(int(math.log2(args.factor)) + 2)]
        self.rows = {
            size: {depth: [keys.row(size, depth) for _ in range(args.samples)] for depth in DEPTHS}
            for size in self.lengths
        }

    def measure(self, folder: Path, yarn: bool = False) -> dict[str, Any]:
        """The figures of the model in `folder`. With `yarn`, its config gets the YaRN scaling without any tuning."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from fxtune.techniques.rope import Rope

        config = AutoConfig.from_pretrained(folder)
        if yarn:
            Rope(enabled=True, factor=float(self.args.factor)).configure(config)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
        self.model = model.to(self.device).eval()
        by_position = self.losses(self.long)
        edges = [0, *self.lengths]
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "max_position_embeddings": config.max_position_embeddings,
            "rope": config.rope_parameters,
            "buckets": {f"{low}-{high}": float(by_position[low:high].mean()) for low, high in pairwise(edges)},
            "by_position": [float(part.mean()) for part in by_position.chunk(64)],
            "short_loss": float(self.losses(self.short).mean()),
            "passkey": {
                str(size): {str(depth): accuracy(self.best, rows) for depth, rows in by_depth.items()}
                for size, by_depth in self.rows.items()
            },
        }

    def logits(self, ids: Any) -> Any:
        import torch

        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(input_ids=ids.to(self.device), use_cache=False).logits.float()

    def losses(self, rows: Any) -> Any:
        """Mean loss at each position, in nats: float64 [length - 1]."""
        import torch
        from torch.nn import functional as F

        total = torch.zeros(rows.shape[1] - 1, dtype=torch.float64)
        for some in rows.split(self.batch(rows.shape[1])):
            logits = self.logits(some)[:, :-1].transpose(1, 2)
            total += F.cross_entropy(logits, some[:, 1:].to(self.device), reduction="none").double().sum(0).cpu()
        return total / len(rows)

    def best(self, rows: list[list[int]]) -> list[list[int]]:
        import torch

        ids = torch.tensor(rows)
        return [row for some in ids.split(self.batch(ids.shape[1])) for row in self.logits(some).argmax(-1).tolist()]

    def batch(self, length: int) -> int:
        return max(self.args.micro_tokens // length, 1)


def table(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    """The figures of all models, one column each."""
    names = list(found)
    first = found[names[0]]
    rows = [
        ["", *names],
        *(
            [f"loss at {bucket}", *(f"{found[name]['buckets'][bucket]:.4f}" for name in names)]
            for bucket in first["buckets"]
        ),
    ]
    rows.append([f"loss of rows of {args.context}", *(f"{found[name]['short_loss']:.4f}" for name in names)])
    rows += [
        [f"pass key found at {size}", *(f"{mean(found[name]['passkey'][size]):.0%}" for name in names)]
        for size in first["passkey"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def mean(by_depth: dict[str, float]) -> float:
    return statistics.fmean(by_depth.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for text, models and results")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to test that the script runs")
    parser.add_argument(
        "--minutes", type=float, default=2.5, help="minutes of pre-training; the rest takes about 3 (%(default)s)"
    )
    parser.add_argument(
        "--extend-minutes", type=float, default=3.0, help="upper limit of the extension's minutes (%(default)s)"
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of the short context (%(default)s)")
    parser.add_argument("--factor", type=int, default=8, help="a power of two (%(default)s)")
    parser.add_argument("--hidden", type=int, default=640, help="hidden size (%(default)s)")
    parser.add_argument("--layers", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--roots", type=Path, nargs="+", help="folders with text (default: stdlib and site-packages)")
    parser.add_argument("--megabytes", type=float, default=200, help="megabytes of text (%(default)s)")
    parser.add_argument(
        "--document-chars", type=int, default=120_000, help="characters of a joined document (%(default)s)"
    )
    parser.add_argument("--held-out", type=float, default=0.05, help="share of held-out documents (%(default)s)")
    parser.add_argument("--evaluated", type=int, default=64, help="evaluated held-out documents (%(default)s)")
    parser.add_argument("--samples", type=int, default=20, help="pass keys per length and depth (%(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="rows per pre-training step (%(default)s)")
    parser.add_argument("--pretrain-steps", type=int, default=10**9, help="upper limit of pre-training steps")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of pre-training (%(default)s)")
    parser.add_argument(
        "--retrieval", type=float, default=0.12, help="share of short tokens in retrieval documents (%(default)s)"
    )
    parser.add_argument("--extend-rows", type=int, default=16, help="rows per extension step (%(default)s)")
    parser.add_argument("--extend-steps", type=int, default=500, help="upper limit of extension steps (%(default)s)")
    parser.add_argument("--extend-lr", type=float, default=3e-4, help="learning rate of the extension (%(default)s)")
    parser.add_argument(
        "--long-share", type=float, default=0.7, help="data.mix.long_share of the extension (%(default)s)"
    )
    parser.add_argument(
        "--long-retrieval",
        type=float,
        default=0.1,
        help="share of long tokens in retrieval documents, 0 for none (%(default)s)",
    )
    parser.add_argument(
        "--micro-tokens", type=int, default=65536, help="upper limit of tokens per micro-batch (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--again", action="store_true", help="keep the text and base of an earlier call, extend and evaluate again"
    )
    parser.add_argument("--lengths", action="store_true", help="also compare rows that grow with equal rows")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    if args.again and not (args.out / "base" / "result.json").exists():
        parser.error(f"{args.out} holds no base")
    unfinished = any("short_loss_change" not in record for record in records(args.out).values())
    if not args.again and not unfinished and args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: name a new folder, or add --again")
    return args


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of the extensions in a folder by name, the oldest first."""
    files = sorted(folder.glob("extended*.json"), key=lambda file: (len(file.stem), file.stem))
    return {file.stem: json.loads(file.read_text()) for file in files}


def open_record(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The name and the record of the interrupted extension, or of a new one.

    Ends the script if their options differ.
    """
    known = records(args.out)
    settings = {
        key: value if isinstance(value, (int, float)) else str(value)
        for key, value in vars(args).items()
        if key != "again"
    }
    for name, record in known.items():
        if "short_loss_change" not in record:
            old = record["asked"]
            if different := [f"{key}={old.get(key)}" for key, value in settings.items() if old.get(key) != value]:
                raise SystemExit(
                    f"{args.out / name} was interrupted with {', '.join(different)}: use the same options or a new folder."
                )
            return name, record
    name = f"extended-{len(known)}" if known else "extended"
    return name, {"asked": settings, "seconds": {}, "runs": {}, "models": {}}


def main() -> None:
    args = arguments()
    name, record = open_record(args)
    seconds, runs, found = record["seconds"], record["runs"], record["models"]
    data, base, extended = (args.out / folder for folder in ("data", "base", name))
    began = time.perf_counter()

    def finish_stage(stage: str) -> None:
        nonlocal began
        seconds[stage] = time.perf_counter() - began
        began = time.perf_counter()
        print(f"{stage}: {seconds[stage]:.0f} s", flush=True)
        write_record()

    def write_record() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{name}.json").write_text(json.dumps(record, indent=1, default=str))

    write_record()
    fresh = not (base / "result.json").exists()
    if fresh and not (data / "complete").exists():
        shutil.rmtree(data, ignore_errors=True)
        gather_corpus(args, data)
        (data / "complete").touch()
    corpus = open_corpus(args, data)
    finish_stage("text and tokenizer")
    if fresh:
        runs["base"] = train_from_scratch(pretraining(args, corpus), 60 * args.minutes, args.pretrain_steps)
        finish_stage("pre-training")
    if not (extended / "result.json").exists():
        runs["extended"] = train_from_scratch(
            extension(args, corpus, name), 60 * args.extend_minutes, args.extend_steps
        )
        finish_stage("extension")
    models = [("base", base, False), ("base with YaRN, not tuned", base, True), ("extended", extended, False)]
    if args.lengths:
        compare_lengths(args, corpus, name, record.setdefault("lengths", {}))
        models += [(arm, args.out / f"{name}-{arm.split()[0]}", False) for arm in (EQUAL, GROWING)]
        finish_stage("rows of equal and of growing length")
    judge = Judge(args, corpus)
    for title, folder, yarn in models:
        if title not in found:
            found[title] = judge.measure(folder / "model", yarn)
            write_record()
    finish_stage("measuring")
    change = record["short_loss_change"] = found["extended"]["short_loss"] / found["base"]["short_loss"] - 1
    write_record()
    print(table(found, args))
    print(
        f"The loss of rows of {args.context} tokens changed by {change:+.2%}. Total time: {sum(seconds.values()):.0f} s."
    )
    if args.lengths:
        print(verdict(record["lengths"]))


def train_from_scratch(config: Any, seconds: float, limit: int) -> dict[str, Any]:
    """Delete the files of an interrupted call, then call train_for()."""
    for folder in (config.run.dir, f"{config.run.dir}-trial"):
        shutil.rmtree(folder, ignore_errors=True)
    return train_for(config, seconds, limit)


if __name__ == "__main__":
    main()
