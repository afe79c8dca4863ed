"""Runs with less memory than they need, each in a forked process with a limited address space.

    python tests/support/short.py FOLDER NAME...      # runs the scenarios, each in FOLDER/NAME with a result.json

The parent imports torch once and forks a child for each scenario. A child builds its trainer and then limits the
memory that it may add. The kernel enforces the limit (RLIMIT_AS). On a CPU nothing else makes torch's allocator fail,
because Linux overcommits memory and kills processes later.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxtune.checkpoint.run_folder import claim
from fxtune.cli.main import main
from fxtune.config.root import Config, OutOfMemory, TrainConfig
from fxtune.data.config import DataConfig, QuestionsConfig, SourceConfig
from fxtune.errors import UserError
from fxtune.tracking.tracker import DisplayKind, TrackingConfig
from fxtune.training import trainer as train

MIB = 2**20
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""With these settings glibc returns freed tensor memory to the kernel, and a thread reserves no extra address space.
"""
WORDS = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair", "please", "blue", "four"]


def chats(name: str, rows: int, words: int) -> SourceConfig:
    """Write `rows` questions of `words` words, each with an answer of a quarter of that length."""
    draw = random.Random(name)
    with Path(name).open("w") as out:
        for row in range(rows):
            question, answer = (" ".join(draw.choices(WORDS, k=count)) for count in (words, words // 4))
            out.write(
                json.dumps(
                    {
                        "messages": [
                            {"role": "user", "content": f"{row} {question}"},
                            {"role": "assistant", "content": answer},
                        ]
                    }
                )
                + "\n"
            )
    return SourceConfig(path=name)


def config(rows: int, run: str = "run", **data: Any) -> Config:
    """LoRA on the tiny model for three steps of eight packed rows of 256 tokens, with micro-batches of `rows`."""
    data = {"sources": [chats("chats.jsonl", 48, 150)], "packing": True, **data}
    made = Config(
        data=DataConfig(**{"sequence_length": 256, "cache_dir": "cache", **data}),
        train=TrainConfig(max_steps=3, epochs=100, micro_batch_size=rows, global_batch_size=8),
        tracking=TrackingConfig(display=DisplayKind.none),
    )
    made.techniques.lora.enabled = True
    made.optimizer.lr, made.checkpoint.every, made.checkpoint.keep, made.run.dir = 1e-3, 1, 9, run
    return made


def limit_memory(mib: float, *_: Any) -> None:
    """Limit this process to its current address space plus `mib` MiB."""
    found = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    resource.setrlimit(resource.RLIMIT_AS, (int(found[1]) * 1024 + int(mib * MIB), resource.RLIM_INFINITY))


def limit_from_pass(number: int, mib: float, trainer: train.Trainer) -> None:
    """Limit memory from the trainer's n-th forward pass on, counted from 1."""
    passes = itertools.count(1)
    trainer.model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: limit_memory(mib) if next(passes) == number else None
    )


def run_training(config: Config, before: Callable[[train.Trainer], Any] = lambda _: None) -> dict[str, Any]:
    """Build a trainer, call `before`, run it, and return its results."""
    folder = claim(
        config.run.name, config.run.dir, config.run.resume.value, json.loads(json.dumps(dataclasses.asdict(config)))
    )
    notes: list[str] = []
    screen = train.display(DisplayKind.none)
    screen.note = notes.append  # type: ignore[method-assign]
    trainer = train.Trainer(config, folder, screen, json.loads(json.dumps(dataclasses.asdict(config))))
    result: dict[str, Any] = {"notes": notes}
    before(trainer)
    try:
        trainer.run()
    except UserError as error:
        result.update(code=error.exit_code, message=str(error))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    folder.release()
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    result.update(
        rows=trainer.state.rows,
        supervised=trainer.state.supervised_tokens,
        weights=weights(folder.path),
        steps=[[line["train/loss"], line["train/grad_norm"]] for line in lines if "train/loss" in line],
        figures={key: value for line in lines for key, value in line.items()},
    )
    return result


def weights(folder: Path) -> str | None:
    """sha256 of the weights in the newest checkpoint."""
    found = sorted(folder.glob("checkpoints/step-*/weights.safetensors"))
    return hashlib.sha256(found[-1].read_bytes()).hexdigest() if found else None


def training() -> Any:
    """Memory is short from the first step on."""
    return run_training(config(8), lambda _: limit_memory(120))


def middle() -> Any:
    """Memory is short from the second micro-batch of the second step on, after the first one left its gradients.

    The run has loader processes. A second run resumes from that step's checkpoint, and a third run is undisturbed.
    """

    def before(trainer: train.Trainer) -> None:
        limit_from_pass(4, 35, trainer)
        trainer._finish = dict  # type: ignore[method-assign]  # the run stays unfinished, so that it can be resumed

    made = config(4)
    made.loader.num_workers = 2
    short = run_training(made, before)
    shutil.rmtree("run/checkpoints/step-00000003")
    return [short, run_training(made), run_training(config(4, "whole"))]


def looking() -> Any:
    """Train on short rows, evaluate long rows and answer long questions."""
    chats("asked.jsonl", 8, 400)
    made = config(
        8,
        packing=False,
        sequence_length=512,
        sources=[chats("brief.jsonl", 48, 10)],
        eval_sources=[chats("held_out.jsonl", 8, 300)],
        questions=QuestionsConfig(path="asked.jsonl", limit=8, max_new_tokens=3),
    )
    undisturbed = copy.deepcopy(made)
    undisturbed.run.dir = "whole"
    return [run_training(made, partial(limit_from_pass, 1, 45)), run_training(undisturbed)]


def nothing() -> Any:
    """Micro-batches of one row, and memory is short in the third step."""
    made = config(1)
    made.checkpoint.every = 0
    return run_training(made, partial(limit_from_pass, 2 * 8 + 3, 0))


def stop() -> Any:
    made = config(8)
    made.train.out_of_memory = OutOfMemory.stop
    return run_training(made, lambda _: limit_memory(100))


def command(*words: str, mib: float) -> Any:
    chats("chats.jsonl", 24, 150)
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        limit_memory(mib)
        code = main(
            [*words, "model=tiny", "data.sources=[{path: chats.jsonl}]", "data.cache_dir=cache", "run.dir=run"]
        )
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"code": code, "text": output.getvalue()}


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{scenario.__name__: scenario for scenario in (training, middle, looking, nothing, stop)},
    "program": partial(
        command,
        "train.max_steps=2",
        "data.sequence_length=8192",
        "model.init=random",
        "model.architecture={max_position_embeddings: 16384}",
        "data.packing=true",
        "tracking.display=plain",
        "train.global_batch_size=1",
        mib=400,
    ),
    "building": partial(
        command,
        "train.max_steps=2",
        "data.sequence_length=512",
        "data.packing=true",
        "model.init=random",
        "model.architecture={hidden_size: 1024, intermediate_size: 4096}",
        mib=100,
    ),
    "eval": partial(
        command,
        "eval",
        "data.eval_sources=[{path: chats.jsonl}]",
        "data.sequence_length=512",
        "data.packing=true",
        "train.micro_batch_size=16",
        "train.global_batch_size=16",
        mib=100,
    ),
}


def run(folder: Path, name: str) -> None:
    """Run one scenario in a forked child and wait for it."""
    folder.mkdir(parents=True)
    if child := os.fork():
        used = os.wait4(child, 0)[2]
        print(f"{name}: {used.ru_utime + used.ru_stime:.1f} s of CPU time", file=sys.stderr)
        return
    os.chdir(folder)
    code = 1
    try:
        Path("result.json").write_text(json.dumps(SCENARIOS[name]()))
        code = 0
    except BaseException:  # noqa: BLE001  a forked child must not continue the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if not EXACT.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **EXACT})
    torch.set_num_threads(1)
    from peft import LoraConfig  # noqa: F401  here, and not in each child
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

    for name in sys.argv[2:]:
        run(Path(sys.argv[1]) / name, name)
