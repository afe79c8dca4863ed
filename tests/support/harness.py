"""Runs of a tiny model as real processes, kills, and small disks, for the fault tests.

    line = command(folder, "train.max_steps=8")          # the command of a run: a small model on 48 random chats
    done = run(line, folder)                             # runs it to its end: .code, .text (its output)
    process = start(line, folder); kill(process)         # runs it in the background; kills it and its children
    with small_disk(folder / "disk", "4m"): ...          # a tmpfs; skips the test if mounting is not allowed

killing.py kills runs at chosen moments, and endings.py compares their results.
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
FOR_TESTS = {
    # Most tests train in the process of a test worker, and the workers share few cores.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Without this each compiling process builds C++ programs to find the supported vector instructions: 8 s of CPU
    # time.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}
"""Variables that conftest.py sets and users do not. A run whose bits are compared must not see them."""
KEPT = {
    # No test may use the network.
    "HF_HUB_OFFLINE": "1",
    # A terminal wide enough for every message.
    "COLUMNS": "200",
    # The code of this checkout comes before installed code.
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
}
"""Variables that users do not set either, and that a run of a test has nevertheless."""
CHOSEN_BY_FXTUNE = {"OMP_WAIT_POLICY"}
"""Variables that `import fxtune` sets where they are missing, in the process of the tests, too."""


def user_environment(**own: str) -> dict[str, str]:
    """The environment in which a user's command runs, but for KEPT: torch chooses the number of threads. `own`:
    further variables of a test."""
    ours = {*FOR_TESTS, *CHOSEN_BY_FXTUNE}
    users = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("PYTEST_")}
    return {**users, **KEPT, **own}


def write_chats(file: Path, rows: int = 48, seed: int = 0) -> Path:
    """Write `rows` different conversations of one to three turns, each at most 128 tokens of the tiny tokenizer."""
    draw = random.Random(seed)
    words = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair", "please", "blue", "four"]
    with file.open("w") as out:
        for row in range(rows):
            messages = []
            for turn in range(draw.randint(1, 3)):
                question = [str(row)] * (turn == 0) + draw.choices(words, k=draw.randint(2, 6))
                messages += [
                    {"role": "user", "content": " ".join(question)},
                    {"role": "assistant", "content": " ".join(draw.choices(words, k=draw.randint(1, 6)))},
                ]
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


def write_texts(file: Path, rows: int = 90, seed: int = 0) -> Path:
    """Write `rows` different texts of some 10 to 120 tokens of the tiny tokenizer."""
    draw = random.Random(seed)
    words = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair", "please", "blue", "four"]
    texts = [" ".join([str(row), *draw.choices(words, k=draw.choice([3, 6, 12, 25, 40]))]) for row in range(rows)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def write_companions(labelled: Path, triplets: Path, rows: int = 48, seed: int = 0) -> None:
    """Write texts with two classes, and queries with a positive and a negative."""
    draw, words = random.Random(seed), ["lamp", "chair", "red", "blue", "Rome", "Oslo"]
    with labelled.open("w") as texts, triplets.open("w") as queries:
        for number in range(rows):
            text, other = (" ".join(draw.choices(words, k=draw.randint(2, 12))) for _ in range(2))
            texts.write(json.dumps({"text": text, "label": "ab"[number % 2]}) + "\n")
            queries.write(json.dumps({"query": f"{text} {number}", "positive": text, "negative": other}) + "\n")


def write_preferences(pairs: Path, judged: Path, rows: int = 48, seed: int = 0) -> None:
    """Write `rows` pairs of answers, two to a prompt, each pair at most 128 tokens of the tiny tokenizer; and as many
    answers that are each judged good or bad."""
    draw = random.Random(seed)
    words = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair", "please", "blue", "four"]
    with pairs.open("w") as out, judged.open("w") as single:
        for row in range(rows):
            prompt = f"{row // 2} {' '.join(words[: 2 + row // 2 % 5])}"
            good, bad = ([str(row), *draw.choices(words, k=draw.randint(1, 6))] for _ in range(2))
            pair = {"chosen": " ".join(good), "rejected": " ".join(["no", *bad])}
            out.write(json.dumps({"prompt": prompt, **pair}) + "\n")
            label = row % 3 > 0
            single.write(json.dumps({"prompt": prompt, "completion": pair["chosen"], "label": label}) + "\n")


def command(folder: Path, *words: str) -> list[str]:
    """The command-line words of a run in `folder`/run: LoRA on a small random Llama, two epochs of 48 chats, 24 steps
    of four rows.

    `words` override the defaults. The chats and the token cache are also in `folder`.
    """
    chats = folder / "chats.jsonl"
    if not chats.exists():
        write_chats(chats)
    defaults = [
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
    return [*(word for word in defaults if word.partition("=")[0] not in keys), *words]


STARTED: list[subprocess.Popen[bytes]] = []
"""Programs of the current test that lead process groups. tests/conftest.py ends the programs that it leaves."""


@dataclass
class Done:
    code: int
    text: str


def start(words: list[str], folder: Path, log: str = "log.txt", **environ: str) -> subprocess.Popen[bytes]:
    """Start `python -m fxtune WORDS` in `folder`, in its own process group, with its output in `folder`/`log`."""
    with (folder / log).open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "fxtune", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=user_environment(**environ),
            start_new_session=True,
        )
    STARTED.append(process)
    return process


def run(words: list[str], folder: Path, timeout: float = 600, **environ: str) -> Done:
    """Run `python -m fxtune WORDS` in `folder` until it ends."""
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
        env=user_environment(**environ),
    )
    return Done(done.returncode, done.stdout)


def wait_for(
    condition: Callable[[], Any],
    process: subprocess.Popen[bytes] | None = None,
    timeout: float = 600,
    every: float = 0.01,
) -> Any:
    """Wait for a true value of `condition()` and return it.

    AssertionError after `timeout` seconds or if `process` ends.
    """
    until = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < until, f"the condition did not hold within {timeout} s"
        assert process is None or process.poll() is None, f"the process ended with {process.returncode}"
        time.sleep(every)
    return value


def limit_counts_from(monkeypatch: Any, condition: Callable[[], Any]) -> None:
    """Let time limits of processes (subprocess.Popen.wait) count from the moment when `condition()` holds, so that a
    short limit does not depend on how fast a process starts.
    """
    wait = subprocess.Popen.wait

    def from_then_on(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        wait_for(condition)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", from_then_on)


def kill(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGKILL) -> int:
    """Send the signal `how` to a process of start() and its children. Waits for its end and returns its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    return process.wait(600)


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "4m") -> Iterator[Path]:
    """Mount a tmpfs of `size` at the new folder `folder`. Skips the test if it cannot be mounted."""
    import pytest

    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
