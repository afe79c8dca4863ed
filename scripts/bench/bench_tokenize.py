"""Measures the speed and the memory of tokenizing a JSONL file of chats.

    python scripts/bench/bench_tokenize.py [--size-mb 1000] [--workers 2] [--keep FOLDER]

Writes chats of one to four turns with log-normal lengths (random words with a Zipf distribution, fixed seed),
tokenizes them into an empty cache and reads them back from it. Memory is the proportional set size (Pss) of all
processes of the tree, read four times a second. Pss divides shared pages among the processes that share them, so the
sum is the memory that the machine needs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.tokenized.tokenize import tokenize

TINY = Path(__file__).resolve().parents[2] / "fxtune" / "assets" / "tiny"


def write_chats(path: Path, size: int, seed: int = 0) -> int:
    """Write about `size` bytes of chats. Returns the number of rows."""
    draw = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = ["".join(draw.choices(letters, range(len(letters), 0, -1), k=draw.randint(1, 10))) for _ in range(20_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    pool = draw.choices(words, weights, k=1_000_000)

    def text(mean: float) -> str:
        count = max(1, int(draw.lognormvariate(mean, 0.8)))
        start = draw.randrange(len(pool) - count)
        return " ".join(pool[start : start + count]).capitalize() + draw.choice(".?!")

    rows = written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            messages = [{"role": "system", "content": "You are helpful."}] if draw.random() < 0.3 else []
            for _ in range(draw.randint(1, 4)):
                messages += [{"role": "user", "content": text(3.2)}, {"role": "assistant", "content": text(4.5)}]
            written += file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            rows += 1
    return rows


def tokenizer_for(path: Path) -> Any:
    """The built-in model's tokenizer, or one trained on the first megabyte if the assets are missing."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (TINY / "tokenizer.json").exists():
        return AutoTokenizer.from_pretrained(TINY)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    with open(path, encoding="utf-8") as file:
        texts = (turn["content"] for line in file.readlines(1 << 20) for turn in json.loads(line)["messages"])
        bpe.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=4096, special_tokens=["<|end|>"], show_progress=False)
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + '<|end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|end|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    return fast


class Memory:
    """Peak Pss in bytes: the sum over the process tree (`total`), and each process by its id (`peak`)."""

    def __init__(self) -> None:
        self.total = 0
        self.peak: dict[int, int] = defaultdict(int)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            now = {pid: _pss_bytes(pid) for pid in _process_tree(os.getpid())}
            self.total = max(self.total, sum(now.values()))
            for pid, size in now.items():
                self.peak[pid] = max(self.peak[pid], size)


def _process_tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            tasks = list(Path(f"/proc/{parent}/task").iterdir())
            found += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # the process has just ended
            continue
    return found


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the data and the cache (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder, arguments.size_mb, arguments.workers)


def measure(folder: Path, size_mb: int, workers: int) -> None:
    path = folder / f"chats-{size_mb}mb.jsonl"
    rows = write_chats(path, size_mb * 1_000_000)
    tokenizer = tokenizer_for(path)
    source = SourceConfig(path=str(path))
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        data = DataConfig(cache_dir=cache, workers=workers)
        with Memory() as memory:
            started = time.perf_counter()
            table = tokenize(source, data, tokenizer)
            seconds = time.perf_counter() - started
        started = time.perf_counter()
        tokenize(source, data, tokenizer, progress=False)
        cached = time.perf_counter() - started
        tokens = len(table.ids)
    own = memory.peak.pop(os.getpid(), 0)
    shown = Table(
        title=f"{path.stat().st_size / 1e6:,.0f} MB of chats, {workers} workers, a vocabulary of {len(tokenizer):,}"
    )
    for column in (
        "rows",
        "tokens",
        "seconds",
        "tokens/s",
        "MB/s",
        "peak MiB",
        "this process",
        "largest other",
        "from cache, s",
    ):
        shown.add_column(column, justify="right")
    shown.add_row(
        f"{rows:,}",
        f"{tokens:,}",
        f"{seconds:,.1f}",
        f"{tokens / seconds:,.0f}",
        f"{path.stat().st_size / 1e6 / seconds:,.2f}",
        *(f"{size / 2**20:,.0f}" for size in (memory.total, own, max(memory.peak.values(), default=0))),
        f"{cached:,.1f}",
    )
    Console(width=120).print(shown)


if __name__ == "__main__":
    main()
