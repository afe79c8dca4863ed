"""Faults for real: runs of a tiny model as processes of their own, small disks, kills, and what is left afterwards.

    line = command(folder, "train.max_steps=8")          # a run of a one-layer model on 48 made-up chats
    done = run(line, folder)                             # the real program: .code, .text (all it printed)
    process = start(line, folder); kill(process)         # in the background, killed with its children
    with small_disk(folder / "disk", "4m"): ...          # a tmpfs; skips the test where mounting is refused

Kills by the hundred, and what two runs that learnt the same have in common, are in killing.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = HERE.parents[1]
SMALLER = (
    "{hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 16}"
)
ENVIRON = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "200",
}
"""Of each process that is started here: few threads, no network, this checkout's code before what is installed or named."""


def write_chats(file: Path, rows: int = 48, seed: int = 0) -> Path:
    """`rows` conversations of one to three turns, no two alike, none longer than 128 of the tiny tokenizer's tokens."""
    draw = random.Random(seed)
    words = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair", "please", "blue", "four"]
    with file.open("w") as out:
        for row in range(rows):
            messages = []
            for turn in range(draw.randint(1, 3)):
                asked = [str(row)] * (turn == 0) + draw.choices(words, k=draw.randint(2, 6))
                messages += [
                    {"role": "user", "content": " ".join(asked)},
                    {"role": "assistant", "content": " ".join(draw.choices(words, k=draw.randint(1, 6)))},
                ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


def command(folder: Path, *words: str) -> list[str]:
    """The words of a run in `folder`/run: LoRA on a small random Llama, two epochs of 48 chats, 24 steps of four rows.

    Words given here win. Its chats and its token cache lie in `folder`, too.
    """
    chats = folder / "chats.jsonl"
    if not chats.exists():
        write_chats(chats)
    given = [
        "run.dir=run",
        "model.init=random",
        f"model.architecture={SMALLER}",
        "data.sources=[{path: chats.jsonl}]",
        "data.sequence_length=128",
        "data.packing=false",
        "data.cache_dir=cache",
        "train.epochs=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "optimizer.lr=1e-3",
        "techniques.lora.enabled=true",
        "checkpoint.every=4",
        "tracking.display=plain",
    ]
    keys = {word.partition("=")[0] for word in words}
    return [*(word for word in given if word.partition("=")[0] not in keys), *words]


@dataclass
class Done:
    code: int
    text: str


def start(words: list[str], folder: Path, log: str = "log.txt", **environ: str) -> subprocess.Popen[bytes]:
    """`python -m fxtune WORDS` in `folder`, in the background and in a process group of its own; it prints to `folder`/`log`."""
    with (folder / log).open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "fxtune", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRON, **environ},
            start_new_session=True,
        )


def run(words: list[str], folder: Path, timeout: float = 120, **environ: str) -> Done:
    """`python -m fxtune WORDS` in `folder`, to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **ENVIRON, **environ},
    )
    return Done(done.returncode, done.stdout)


def wait_for(
    what: Callable[[], Any], process: subprocess.Popen[bytes] | None = None, timeout: float = 600, every: float = 0.01
) -> Any:
    """The first true value of `what()`. AssertionError after `timeout` seconds, or where `process` ended before."""
    until = time.monotonic() + timeout
    while not (seen := what()):
        assert time.monotonic() < until, f"waited {timeout} s in vain"
        assert process is None or process.poll() is None, f"it ended with {process.returncode} before"
        time.sleep(every)
    return seen


def kill(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGKILL) -> int:
    """Send `how` to a process of start() and all its children, wait for its end and return its code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    return process.wait(60)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "4m") -> Iterator[Path]:
    """A file system of `size` (as tmpfs takes it) at `folder`, which is made. Skips the test where it cannot be mounted."""
    import pytest

    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
