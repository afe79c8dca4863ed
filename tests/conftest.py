"""What several tests need: small chat data, a config that trains the built-in model in seconds, runs read back."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

from fxtune.config.root import Config, TrainConfig
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.models.load import Init, ModelConfig
from fxtune.tracking.tracker import Display, TrackingConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Else each process that compiles finds out which vector instructions work here by building C++ for each kind: 8 s of a processor.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ["OMP_NUM_THREADS"] = (
    "1"  # of the processes that tests start: two threads each on two busy cores wait for each other
)
for name in (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "COLUMNS",
):  # secrets, and how wide the terminal is that tests were started from
    os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported here stays: looking for garbage in it all the while takes a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Files with a slow test come first: at the end none keeps one worker busy while the others have nothing left to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage():
    """Each run collects its garbage, which takes 0.3 s if it has to look through all of torch and transformers, too."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or what libraries let go of at a process's end would seem to be lost


@pytest.fixture(autouse=True)
def _one_thread():
    """The same number of threads everywhere: sums on the CPU depend on it, and two test workers share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    """What other tests compiled counts towards the compiler's limit of recompilations of one function."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def cwd(tmp_path, monkeypatch) -> Path:
    """An empty working directory: runs and recipes of the checkout are out of sight."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    """48 conversations of one to three turns with answers of very different lengths."""
    draw = random.Random(0)
    words = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair", "please", "blue", "four"]
    file = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with file.open("w") as out:
        for _ in range(48):
            messages = []
            for _ in range(draw.randint(1, 3)):
                messages.append({"role": "user", "content": " ".join(draw.choices(words, k=draw.randint(2, 12)))})
                messages.append({"role": "assistant", "content": " ".join(draw.choices(words, k=draw.randint(1, 20)))})
            out.write(json.dumps({"messages": messages}) + "\n")
    return file


@pytest.fixture
def small(chats, tmp_path) -> Config:
    """LoRA on the built-in model for six steps of eight rows, float32 on the CPU. Tests change what they are about."""
    config = Config(
        data=DataConfig(
            sources=[SourceConfig(path=str(chats))],
            sequence_length=256,
            packing=False,
            cache_dir=str(tmp_path / "cache"),
        ),
        train=TrainConfig(max_steps=6, epochs=100, micro_batch_size=4, global_batch_size=8),
        tracking=TrackingConfig(display=Display.none),
    )
    config.techniques.lora.enabled = True
    config.schedule.warmup_steps = 2
    config.optimizer.lr = 1e-3
    return config


@pytest.fixture
def narrow(small) -> Config:
    """`small` with a model of two narrow layers, drawn at random: for runs whose subject is not what a model can do."""
    small.model = ModelConfig(
        init=Init.random,
        architecture={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    )
    return small


@pytest.fixture(scope="session")
def forks():
    """The parent that runs of tests/faults are forked from: one for all tests of a worker, since importing takes seconds."""
    from support.killing import ForkServer

    with ForkServer() as server:
        yield server


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What runs of this process tell beside their figures, as it comes."""
    from fxtune.tracking import display

    notes: list[str] = []
    monkeypatch.setattr(display.Display, "note", lambda self, text: notes.append(text))
    return notes


@pytest.fixture
def build(cwd):
    """A Trainer that is built and not yet run; its folder is released at the end."""
    from fxtune.checkpoint.run_folder import claim
    from fxtune.tracking.display import display
    from fxtune.training import trainer

    made = []

    def make(config, note=None) -> trainer.Trainer:
        plain = json.loads(json.dumps(dataclasses.asdict(config)))
        folder = claim(config.run.name, config.run.dir, config.run.resume.value, plain)
        made.append(folder)
        screen = display(Display.none)
        screen.note = note or screen.note
        return trainer.Trainer(config, folder, screen, plain)

    yield make
    for folder in made:
        folder.release()
