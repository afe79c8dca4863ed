"""YaRN really extends: pre-train a small Llama on 1,024 tokens, extend it to 8,192 with a recipe's own means, measure both.

    python scripts/study/extend.py --out build/extend            # one H200, about nine minutes in all
    python scripts/study/extend.py --out build/extend --again --extend-lr 1e-4     # the same base, extended once more
    python scripts/study/extend.py --out /tmp/extend --smoke     # a few steps of a toy on a CPU: whether it runs, nothing else

1. Text at hand (gather.py): a package's files joined to long documents, a part of them held out; a BPE tokenizer of it.
2. Pre-training with fxtune at the short context, on that text and on documents that ask for facts (retrieval.py), all of them
   within the short context.
3. Extension with fxtune: YaRN by --factor, rows of the long context, data.mix with long and short documents in every step, full
   fine-tuning. A part of the long documents (--long-retrieval; 0: none) asks for facts, too.
4. Plain transformers measures three models on held-out text: the base as it is, the base with YaRN but not tuned, and the
   extended model, loaded from the folder that fxtune saved. Loss by position, the loss of short rows, and whether a pass key is
   found at lengths and depths (exact match, see retrieval.accuracy).

Writes extended.json, extended.png and the models to --out, and prints the table. Nothing is downloaded. The JSON file is written
after each stage and each model that was measured: the same command after one that was broken off goes on behind the last of them.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "make"))
from gather import Document, documents, find, standard_roots
from pretrain import common, line, micro_batch, random_llama, split, texts, train_for, train_tokenizer
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
"""What --smoke has in place of the defaults."""
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass
class Corpus:
    """The text of an experiment, in its folder: long.jsonl and held.jsonl, joined documents, and the tokenizer."""

    folder: Path
    tokenizer: Any
    sample: list[str]
    """Some of the documents that are trained on."""
    held: list[list[int]]
    """Token ids of the held-out documents that fill the long context."""
    tokens_a_document: float
    chars_a_token: float

    def encode(self, texts: list[str]) -> list[list[int]]:
        return encode(self.tokenizer, texts)


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def gather_corpus(asked: argparse.Namespace, folder: Path) -> None:
    """Gather text, split off the hold-out, train the tokenizer."""
    folder.mkdir(parents=True)
    found = documents(
        find(asked.roots or standard_roots()), asked.seed, asked.document_chars // 4, asked.document_chars
    )
    split(found, folder / "long.jsonl", folder / "held.jsonl", asked.held_out, asked.megabytes)
    train_tokenizer(texts(folder / "long.jsonl"), asked.vocabulary, folder / "tokenizer")


def open_corpus(asked: argparse.Namespace, folder: Path) -> Corpus:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    sample = list(islice(texts(folder / "long.jsonl"), 500))
    tokens = sum(map(len, encode(tokenizer, sample[:100]))) / len(sample[:100])
    length = asked.context * asked.factor
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
    """Pieces of documents of up to `chars` characters, without end."""
    rng = random.Random(0)
    while True:
        for text in sample:
            start = text.rfind("\n", 0, rng.randrange(max(len(text) - chars, 1)) + 1) + 1
            yield text[start : start + rng.randint(chars // 4, chars)]


def write_retrieval(corpus: Corpus, name: str, tokens: float, low: int, high: int, seed: int) -> Path:
    """About `tokens` tokens of documents that ask for facts, each of `low` to `high` tokens."""
    count = max(int(tokens / (0.85 * (low + high) / 2)), 8)
    made = retrieval_documents(random.Random(seed), Fillers(corpus.sample), corpus.encode, count, low, high)
    return write(corpus.folder / f"{name}.jsonl", made, "retrieval")


def pretraining(asked: argparse.Namespace, corpus: Corpus) -> Any:
    """The config of the base: random weights, rows of the short context."""
    from fxtune.data.config import SourceConfig

    config = common(asked.out, "base", asked.seed)
    config.model = random_llama(corpus.folder / "tokenizer", asked.hidden, asked.layers, 64, asked.context)
    supply = asked.retrieval * asked.megabytes * 1e6 / 3.5  # about as often repeated as the text
    retrieval = write_retrieval(corpus, "retrieval", supply, asked.context // 4, asked.context, asked.seed)
    config.data.sources = [
        SourceConfig(path=str(corpus.folder / "long.jsonl"), weight=1 - asked.retrieval),
        SourceConfig(path=str(retrieval), weight=asked.retrieval),
    ]
    config.data.sequence_length = asked.context
    config.train.global_batch_size = asked.rows
    config.train.micro_batch_size = micro_batch(asked.rows, asked.context, asked.micro_tokens)
    config.optimizer.lr, config.schedule.warmup_ratio, config.schedule.min_lr_ratio = asked.lr, 0.03, 0.01
    return config


def extension(asked: argparse.Namespace, corpus: Corpus, name: str) -> Any:
    """The config of the extension, what a recipe would say: YaRN, rows of the long context, long and short documents mixed."""
    from fxtune.data.config import MixConfig, SourceConfig
    from fxtune.models.load import DType, ModelConfig
    from fxtune.techniques.rope import Rope, RopeType

    context, length = asked.context, asked.context * asked.factor
    tokens = asked.extend_steps * asked.extend_rows * length
    config = common(asked.out, name, asked.seed)
    config.model = ModelConfig(path=str(asked.out / "base" / "model"), dtype=DType.float32)
    config.techniques.rope = Rope(enabled=True, type=RopeType.yarn, factor=float(asked.factor))
    long, short = asked.long_share * tokens, (1 - asked.long_share) * tokens
    # Of each kind as much as the steps take, so that the shares within the long and the short documents are those asked for.
    limit = max(math.ceil((1 - asked.long_retrieval) * long / corpus.tokens_a_document), 2)
    count = int((1 - asked.retrieval) * short / (0.5 * context)) + 1
    cut = islice(pieces(corpus.sample, int(0.8 * context * corpus.chars_a_token)), count)
    facts, far_facts = asked.retrieval * short, asked.long_retrieval * long
    files = [
        write(corpus.folder / "short.jsonl", cut, "pieces"),
        write_retrieval(corpus, "retrieval-short", facts, context // 4, context, asked.seed + 1),
    ]
    if far_facts:
        files.append(write_retrieval(corpus, "retrieval-long", far_facts, context * 3 // 2, length, asked.seed + 2))
    config.data.sources = [
        SourceConfig(path=str(corpus.folder / "long.jsonl"), limit=limit),
        *(SourceConfig(path=str(file)) for file in files),
    ]
    config.data.sequence_length = length
    config.data.mix = MixConfig(long_share=asked.long_share, threshold=context)
    config.train.global_batch_size = asked.extend_rows
    config.train.micro_batch_size = micro_batch(asked.extend_rows, length, asked.micro_tokens)
    config.optimizer.lr, config.schedule.warmup_ratio, config.schedule.min_lr_ratio = asked.extend_lr, 0.1, 0.0
    return config


class Judge:
    """Measures models as plain transformers loads them, all on the same held-out rows."""

    def __init__(self, asked: argparse.Namespace, corpus: Corpus) -> None:
        import torch

        self.asked, self.device = asked, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        length, context = asked.context * asked.factor, asked.context
        held = corpus.held[: asked.evaluated]
        self.long = torch.tensor([ids[:length] for ids in held])
        self.short = torch.tensor(
            [ids[at : at + context] for ids in held for at in range(0, length - context + 1, context)]
        )
        keys = Passkeys(corpus.encode, [token for ids in corpus.held for token in ids], asked.seed)
        self.lengths = [context // 2 * 2**power for power in range(int(math.log2(asked.factor)) + 2)]
        self.rows = {
            size: {depth: [keys.row(size, depth) for _ in range(asked.samples)] for depth in DEPTHS}
            for size in self.lengths
        }

    def measure(self, folder: Path, yarn: bool = False) -> dict[str, Any]:
        """The figures of the model in `folder`; `yarn`: with the scaling laid over its config, as if that were enough."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from fxtune.techniques.rope import Rope

        config = AutoConfig.from_pretrained(folder)
        if yarn:
            Rope(enabled=True, factor=float(self.asked.factor)).configure(config)
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
        return max(self.asked.micro_tokens // length, 1)


def table(found: dict[str, dict[str, Any]], asked: argparse.Namespace) -> str:
    """The figures of all models side by side, and what the extension came to."""
    names = list(found)
    first = found[names[0]]
    rows = [
        ["", *names],
        *(
            [f"loss at {bucket}", *(f"{found[name]['buckets'][bucket]:.4f}" for name in names)]
            for bucket in first["buckets"]
        ),
    ]
    rows.append([f"loss of rows of {asked.context}", *(f"{found[name]['short_loss']:.4f}" for name in names)])
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


def plot(file: Path) -> None:
    """Draw the figures in a JSON file that this script wrote, beside it; without matplotlib say where to."""
    try:
        import matplotlib
    except ImportError:
        print(
            f"No plot, matplotlib is not here. Where it is: python scripts/study/extend.py --out {file.parent} --plot {file}"
        )
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = json.loads(file.read_text())
    found, context, factor = written["models"], written["asked"]["context"], written["asked"]["factor"]
    length = context * factor
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, seen in found.items():
        curve: Sequence[float] = seen["by_position"]
        left.plot([(index + 0.5) * length / len(curve) for index in range(len(curve))], curve, label=name)
        right.plot(
            [int(size) for size in seen["passkey"]],
            [mean(by) for by in seen["passkey"].values()],
            marker="o",
            label=name,
        )
    left.set(
        xlabel="position in the document (tokens)",
        ylabel="loss (nats a token)",
        ylim=(None, 1.1 * max(max(seen["by_position"]) for name, seen in found.items() if name != "base")),
    )
    right.set(xlabel="length of the row (tokens)", ylabel="pass keys found", xscale="log", ylim=(-0.05, 1.05))
    right.set_xticks([int(size) for size in found["base"]["passkey"]], list(found["base"]["passkey"]))
    right.minorticks_off()
    for axes in (left, right):
        axes.axvline(context, color="grey", linestyle=":", linewidth=1)
        axes.legend()
    figure.suptitle(
        f"A Llama of {found['base']['parameters'] / 1e6:.0f}M, pre-trained on {context:,} tokens, "
        f"extended {factor} times with YaRN"
    )
    figure.tight_layout()
    figure.savefig(file.with_suffix(".png"), dpi=130)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only whether it runs")
    parser.add_argument(
        "--minutes", type=float, default=2.5, help="of pre-training; the rest takes about 3 (%(default)s)"
    )
    parser.add_argument("--extend-minutes", type=float, default=3.0, help="of extension, at most (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the short context (%(default)s)")
    parser.add_argument("--factor", type=int, default=8, help="a power of two (%(default)s)")
    parser.add_argument("--hidden", type=int, default=640, help="hidden size (%(default)s)")
    parser.add_argument("--layers", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="(%(default)s)")
    parser.add_argument(
        "--roots", type=Path, nargs="+", help="where text is looked for (default: stdlib and site-packages)"
    )
    parser.add_argument("--megabytes", type=float, default=200, help="of text (%(default)s)")
    parser.add_argument(
        "--document-chars", type=int, default=120_000, help="characters of a joined document (%(default)s)"
    )
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the documents (%(default)s)")
    parser.add_argument("--evaluated", type=int, default=64, help="held-out documents that are measured (%(default)s)")
    parser.add_argument("--samples", type=int, default=20, help="pass keys for each length and depth (%(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step of pre-training (%(default)s)")
    parser.add_argument("--pretrain-steps", type=int, default=10**9, help="at most")
    parser.add_argument("--lr", type=float, default=1e-3, help="of pre-training (%(default)s)")
    parser.add_argument(
        "--retrieval", type=float, default=0.12, help="of the short tokens in retrieval documents (%(default)s)"
    )
    parser.add_argument("--extend-rows", type=int, default=16, help="rows of a step of extension (%(default)s)")
    parser.add_argument("--extend-steps", type=int, default=500, help="at most (%(default)s)")
    parser.add_argument("--extend-lr", type=float, default=3e-4, help="(%(default)s)")
    parser.add_argument(
        "--long-share", type=float, default=0.7, help="data.mix.long_share of the extension (%(default)s)"
    )
    parser.add_argument("--long-retrieval", type=float, default=0.1, help="the same of the long tokens (%(default)s)")
    parser.add_argument(
        "--micro-tokens", type=int, default=65536, help="tokens of a micro-batch, at most (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--again", action="store_true", help="keep text and base of an earlier call, extend and measure anew"
    )
    parser.add_argument("--plot", type=Path, help="only draw the figures of this JSON file")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**SMOKE)
    asked = parser.parse_args()
    if asked.again and not (asked.out / "base" / "result.json").exists():
        parser.error(f"{asked.out} holds no base to go on with")
    going_on = any("short_loss_change" not in record for record in records(asked.out).values())
    if not asked.again and not asked.plot and not going_on and asked.out.exists() and any(asked.out.iterdir()):
        parser.error(f"{asked.out} is not empty: name a new folder, or say --again")
    return asked


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of each extension in a folder, by its name, the oldest first."""
    files = sorted(folder.glob("extended*.json"), key=lambda file: (len(file.stem), file.stem))
    return {file.stem: json.loads(file.read_text()) for file in files}


def opened(asked: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The name and the record of the extension that was broken off, or of a new one. Ends the script where the settings of the
    former were others.
    """
    known = records(asked.out)
    settings = {
        key: value if isinstance(value, (int, float)) else str(value)
        for key, value in vars(asked).items()
        if key not in ("again", "plot")
    }
    for name, record in known.items():
        if "short_loss_change" not in record:
            theirs = record["asked"]
            if apart := [f"{key}={theirs.get(key)}" for key, value in settings.items() if theirs.get(key) != value]:
                raise SystemExit(
                    f"{asked.out / name} was broken off with {', '.join(apart)}: give the same, or a new folder."
                )
            return name, record
    name = f"extended-{len(known)}" if known else "extended"
    return name, {"asked": settings, "seconds": {}, "runs": {}, "models": {}}


def main() -> None:
    asked = arguments()
    if asked.plot:
        return plot(asked.plot)
    name, record = opened(asked)
    seconds, runs, found = record["seconds"], record["runs"], record["models"]
    data, base, extended = (asked.out / folder for folder in ("data", "base", name))
    began = time.perf_counter()

    def done(what: str) -> None:
        nonlocal began
        seconds[what] = time.perf_counter() - began
        began = time.perf_counter()
        print(f"{what}: {seconds[what]:.0f} s", flush=True)
        keep()

    def keep() -> None:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / f"{name}.json").write_text(json.dumps(record, indent=1, default=str))

    keep()
    fresh = not (base / "result.json").exists()
    if fresh and not (data / "whole").exists():
        shutil.rmtree(data, ignore_errors=True)
        gather_corpus(asked, data)
        (data / "whole").touch()
    corpus = open_corpus(asked, data)
    done("text and tokenizer")
    if fresh:
        runs["base"] = train_anew(pretraining(asked, corpus), 60 * asked.minutes, asked.pretrain_steps)
        done("pre-training")
    if not (extended / "result.json").exists():
        runs["extended"] = train_anew(extension(asked, corpus, name), 60 * asked.extend_minutes, asked.extend_steps)
        done("extension")
    judge = Judge(asked, corpus)
    for title, folder, yarn in (
        ("base", base, False),
        ("base with YaRN, not tuned", base, True),
        ("extended", extended, False),
    ):
        if title not in found:
            found[title] = judge.measure(folder / "model", yarn)
            keep()
    done("measuring")
    change = record["short_loss_change"] = found["extended"]["short_loss"] / found["base"]["short_loss"] - 1
    keep()
    print(table(found, asked))
    print(
        f"The loss of rows of {asked.context} tokens changed by {change:+.2%}. {sum(seconds.values()):.0f} s in all."
    )
    plot(asked.out / f"{name}.json")


def train_anew(config: Any, seconds: float, most: int) -> dict[str, Any]:
    """train_for(), without what a call that was broken off left of it."""
    for folder in (config.run.dir, f"{config.run.dir}-trial"):
        shutil.rmtree(folder, ignore_errors=True)
    return train_for(config, seconds, most)


if __name__ == "__main__":
    main()
