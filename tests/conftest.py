"""Fixtures for several test folders: small chat data, small configs, and hooks that keep the tests fast."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, register_random, settings
from hypothesis.internal.conjecture import providers
from support.harness import FOR_TESTS, STARTED
from support.stopping import family

import fxtune  # noqa: F401  before torch: it chooses how OpenMP's threads wait

import torch  # isort: skip

from fxtune.config.root import Config, TrainConfig
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.models.load import Init, ModelConfig
from fxtune.tracking.tracker import DisplayKind, TrackingConfig

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may use the network
os.environ.update(FOR_TESTS)
for name in (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "COLUMNS",
):  # secrets, and the width of the terminal that started the tests
    os.environ.pop(name, None)
# A busy machine must pass: hypothesis limits neither the time of an example nor the time to draw one.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SHARE = 3
"""`make test` tries one example in so many; `make test-all` tries all, and others each time."""
# The same examples on every machine, every time.
settings.register_profile("same", PATIENT, derandomize=True, max_examples=settings.default.max_examples // SHARE)
settings.register_profile("random", PATIENT, print_blob=True)  # `make test-all`: --hypothesis-profile=random
settings.load_profile("same")


class TorchRandom:
    """torch's numbers. hypothesis seeds them for each example, as it does those of random and numpy, so that a
    failure repeats."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH = TorchRandom()
register_random(TORCH)


@pytest.hookimpl(trylast=True)  # after hypothesis has loaded the profile of the command line
def pytest_configure():
    """Draw the same examples whichever modules the tests before have imported.

    hypothesis also draws constants that it reads in the imported modules of the project, under derandomize too, and
    has no option for it.
    """
    if settings.default.derandomize:
        providers._get_local_constants = providers.Constants  # none


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Disable garbage collection while modules are imported. It would take a seventh of the collection time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Mark vital tests as slow, too.

    Run files with slow tests first, so that no worker is still busy with one when the others have finished.
    """
    for item in items:
        if item.get_closest_marker("vital"):
            item.add_marker(pytest.mark.slow)
        own = getattr(item.obj, "_hypothesis_internal_use_settings", None)  # by @settings, which overrides the profile
        if own is not None and own.derandomize and own is not settings.default:
            item.obj._hypothesis_internal_use_settings = settings(own, max_examples=-(-own.max_examples // SHARE))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module", autouse=True)
def _freeze_imported_objects():
    """Freeze the objects of torch and transformers.

    Each run collects garbage, which takes 0.3 s if it scans them too.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_program_outlives_its_test():
    """A test that fails may leave a program that has stopped itself, or that only a signal ends."""
    yield
    while STARTED:
        process = STARTED.pop()
        for pid in family(process.pid) if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pytest_unconfigure():
    gc.unfreeze()  # libraries free objects at the end of the process


@pytest.fixture(autouse=True)
def _same_numbers():
    """Use one thread and one seed: sums on the CPU depend on the number of threads, and two test workers share two
    cores; what a test draws must not depend on the tests before it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _reset_compiler():
    """Reset the compiler: code of other tests counts towards its limit of recompilations per function."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def cwd(tmp_path, monkeypatch) -> Path:
    """An empty working directory, without the runs and recipes of the checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def canary(tmp_path, monkeypatch) -> Path:
    """The file that the stranger's code makes when it runs."""
    monkeypatch.setenv("CANARY", str(tmp_path / "ran"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "ran"


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
    """LoRA on the built-in model for six steps of eight rows, float32 on the CPU. A test changes the keys it needs."""
    config = Config(
        data=DataConfig(
            sources=[SourceConfig(path=str(chats))],
            sequence_length=256,
            packing=False,
            cache_dir=str(tmp_path / "cache"),
        ),
        train=TrainConfig(max_steps=6, epochs=100, micro_batch_size=4, global_batch_size=8),
        tracking=TrackingConfig(display=DisplayKind.none),
    )
    config.techniques.lora.enabled = True
    config.run.report = False
    config.schedule.warmup_steps = 2
    config.optimizer.lr = 1e-3
    return config


@pytest.fixture
def narrow(small) -> Config:
    """`small` with a random model of two narrow layers, for tests that do not depend on the model's quality."""
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
def base(tmp_path_factory) -> Path:
    """A small base model on disk, which all tests of a worker share and none changes."""
    from support.architectures import on_disk

    return on_disk(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def copy(base, tmp_path) -> Path:
    """A copy of the base that a test may break."""
    return shutil.copytree(base, tmp_path / "copy")


@pytest.fixture(scope="session")
def forks():
    """The process that forks runs. All tests of a worker share it, since its imports take seconds."""
    from support.killing import ForkServer

    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def ranks(forks):
    """Runs of two ranks."""
    from support.ranks import Ranks

    return Ranks(forks)


@pytest.fixture
def leave_unfinished(monkeypatch) -> Callable[[Config], None]:
    """Trains the run of a config to its last checkpoint. It is unfinished: the same config resumes it."""
    from fxtune.training import trainer

    def leave(config: Config) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.Trainer, "_finish", lambda self: self.run_state.checkpoints.wait() or {})
            trainer.run(config)

    return leave


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """The notes that runs in this process print, in their order."""
    from fxtune.tracking import display

    notes: list[str] = []
    monkeypatch.setattr(display.Display, "note", lambda self, text: notes.append(text))
    return notes


@pytest.fixture
def build(cwd):
    """A function that builds a Trainer without running it. The run folder is released at the end of the test."""
    from fxtune.checkpoint.run_folder import claim
    from fxtune.tracking.display import display
    from fxtune.training import trainer

    made = []

    def make(config, note=None) -> trainer.Trainer:
        plain = json.loads(json.dumps(dataclasses.asdict(config)))
        folder = claim(config.run.name, config.run.dir, config.run.resume.value, plain)
        made.append(folder)
        screen = display(DisplayKind.none)
        screen.note = note or screen.note
        return trainer.Trainer(config, folder, screen, plain)

    yield make
    for folder in made:
        folder.release()
