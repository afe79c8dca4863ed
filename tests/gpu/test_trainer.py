"""The training loop on a GPU: no host sync between log lines, recorded passes equal plain ones, and batches are copied
early.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support import reference

from fxtune.checkpoint.run_folder import claim
from fxtune.config.root import Config, Spikes, TrainConfig
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.facts.options import Switch
from fxtune.models.load import ModelConfig
from fxtune.optim.config import OptimizerName
from fxtune.tracking.display import display
from fxtune.tracking.tracker import DisplayKind, TrackingConfig
from fxtune.training import trainer as train
from fxtune.training.step_monitor import StepStatistics

SYNCHRONIZE = "torch.cuda.synchronize"
OPTIMIZERS = {
    "adamw": {},
    "sgd": dict(name=OptimizerName.sgd),
    "muon": dict(name=OptimizerName.muon),
    "lion": dict(name=OptimizerName.lion),
    "bitsandbytes": dict(name=OptimizerName.adamw_8bit),
}
PACKAGES = {"lion": "lion_pytorch", "bitsandbytes": "bitsandbytes"}
"""The package that an optimizer needs. Without it the optimizer's tests are skipped."""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Config:
    """LoRA in bfloat16 over a random model with chats of all lengths, packed, two micro-batches a step."""
    monkeypatch.chdir(tmp_path)
    rows = Path("chats.jsonl")
    chats(rows, range(7), range(11))
    config = Config(
        model=ModelConfig(path=str(_with_tokenizer(tmp_path / "base"))),
        data=DataConfig(sources=[SourceConfig(path=str(rows))], sequence_length=512, packing=True, cache_dir="cache"),
        train=TrainConfig(max_steps=40, epochs=1000, micro_batch_size=2, global_batch_size=4, log_every=100),
        tracking=TrackingConfig(display=DisplayKind.none),
    )
    config.techniques.lora.enabled = True
    config.techniques.compile.enabled = True
    config.techniques.compile.cuda_graphs = Switch.off
    config.techniques.liger.enabled = True
    config.techniques.liger.kernels = ["rope", "fused_linear_cross_entropy"]
    return config


def chats(file: Path, asked: range, answered: range) -> None:
    """400 chats of one turn whose questions and answers are of these lengths, in turn."""
    with file.open("w") as out:
        for number in range(400):
            question, answer = (1 + lengths[number % len(lengths)] for lengths in (asked, answered))
            turns = [
                {"role": "user", "content": "a question of some words " * question},
                {"role": "assistant", "content": f"an answer {number % 10} of some " * answer},
            ]
            out.write(json.dumps({"messages": turns}) + "\n")


def _with_tokenizer(folder: Path) -> Path:
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(Path(train.__file__).parents[1] / "assets" / "tiny").save_pretrained(folder)
    reference._config(reference.SMALL).save_pretrained(folder)
    save_file(
        {name: tensor.bfloat16() for name, tensor in reference.weights(reference.SMALL).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@contextmanager
def trainer(config: Config, name: str = "run"):
    config.run.name = name
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    folder = claim(name, config.run.dir, config.run.resume.value, plain)
    try:
        yield train.Trainer(config, folder, display(DisplayKind.none), plain)
    finally:
        folder.release()


@contextmanager
def no_waiting(monkeypatch):
    """Fail if the block waits for the device, and list all places that do: those that torch warns of, and
    torch.cuda.synchronize, of which it does not. A wait in autograd's thread is listed as the call of `backward`.
    """
    places: dict[str, int] = {}

    def waits(why: object, *_: object, **__: object) -> None:
        if (
            "called a synchronizing" not in str(why) and why != SYNCHRONIZE
        ):  # torch warns once that the mode is a prototype
            return
        stack = "".join(traceback.format_list(traceback.extract_stack()[-13:-1]))
        told = f"{why}\n{stack}"
        places[told] = places.get(told, 0) + 1

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("always")
        patched.setattr(warnings, "showwarning", waits)
        patched.setattr(torch.cuda, "synchronize", lambda *_: waits(SYNCHRONIZE))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if places:
        told = [f"{times} times: {place}" for place, times in places.items()]
        print("\n".join(told), file=sys.__stderr__, flush=True)  # immediately, since an interrupted run has no summary
        pytest.fail("\n".join(told), pytrace=False)


@pytest.mark.parametrize("graphs", [Switch.off, Switch.on])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_host_sync_between_log_lines(recipe, optimizer, graphs, monkeypatch):
    if optimizer in PACKAGES:
        pytest.importorskip(PACKAGES[optimizer])
    recipe.techniques.compile.cuda_graphs = graphs
    recipe.techniques.lora.dropout = 0.1
    recipe.train.spikes = Spikes.skip
    chats(
        Path("chats.jsonl"), range(5, 6), range(3, 4)
    )  # the same number of supervised tokens in each row, so that no new shape comes later
    for name, value in OPTIMIZERS[optimizer].items():
        setattr(recipe.optimizer, name, value)
    with trainer(recipe) as built:
        steps = iter(built.steps)
        for _ in range(20):  # compiled, and every number of supervised positions seen and recorded
            next(steps)
        statistics = StepStatistics()
        with no_waiting(monkeypatch):
            for _ in range(10):
                _, _, metrics = next(steps)
                statistics.add(metrics)
            statistics.post()
        figures = statistics.read()
        steps.close()
    assert figures["train/skipped_steps"] == 0
    assert figures["train/loss"] < 8


def run(
    config: Config, name: str, steps: int = 16, pause_at: int | None = None
) -> tuple[list[float], list[torch.Tensor], float]:
    """The loss of each step, the adapter's final weights, and the milliseconds of a step in the second half."""
    losses = []
    with trainer(config, name) as built:
        for step, _, metrics in built.steps:
            losses.append(metrics["loss"])
            if step.index == steps // 2:
                torch.cuda.synchronize()
                begun = time.perf_counter()
            if step.index == steps - 1:
                break
        torch.cuda.synchronize()
        took = (time.perf_counter() - begun) / (steps - 1 - steps // 2) * 1000
        told = built.train_step.recorder.summary() if built.train_step.recorder else ""
        weights = [parameter.detach().float().cpu() for parameter in built.train_step.optimizer.names]
    print(f"\n{name}: {took:.2f} ms a step. {told}")
    return [loss.item() for loss in losses], weights, took


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recorded_passes_train_like_plain_ones(recipe, dropout):
    """The two micro-batches of a step have different numbers of supervised tokens. Random numbers must continue as in
    plain code.
    """
    recipe.techniques.lora.dropout = dropout
    recipe.optimizer.name = OptimizerName.sgd  # Adam would follow the sign of gradients that are only rounding errors
    recipe.optimizer.lr = 0.05
    plain, weights, slow = run(recipe, "plain")
    recipe.techniques.compile.cuda_graphs = Switch.on
    recorded, theirs, fast = run(recipe, "recorded")
    assert recorded == pytest.approx(plain, rel=2e-3)
    moved = torch.cat([weight.flatten() for weight in weights])
    assert reference.relative(torch.cat([weight.flatten() for weight in theirs]), moved) < 2e-2
    print(f"plain {slow:.2f} ms, recorded {fast:.2f} ms a step")


@pytest.mark.timed
def test_recorded_passes_are_replayed_and_faster(recipe):
    recipe.data.sequence_length = 256
    _, _, slow = run(recipe, "plain", 40)
    recipe.techniques.compile.cuda_graphs = Switch.on
    recipe.train.max_steps = 80
    with trainer(recipe, "counted") as built:
        for step, _, _ in built.steps:
            if step.index == 30:
                break
        assert built.train_step.recorder.replayed > 0.5 * built.train_step.recorder.passes, (
            built.train_step.recorder.summary()
        )
    _, _, fast = run(recipe, "recorded", 40)
    assert fast < slow, (fast, slow)


def test_resumed_run_of_recorded_passes_is_bit_for_bit_equal(recipe, monkeypatch):
    """Bit for bit, so that any fault of recording, random numbers or resuming shows.

    run.deterministic=true, because two equal runs differ without it: kernels are chosen by timing (Triton's
    autotuner) and attention's backward pass adds in any order. AdamW turns such rounding into steps of its full size
    where a gradient is near zero.
    """
    from safetensors.torch import load_file

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the run would set it, and leave it for other tests
    recipe.run.deterministic = True
    recipe.techniques.compile.cuda_graphs = Switch.on
    recipe.techniques.lora.dropout = 0.1
    recipe.train.max_steps, recipe.checkpoint.every = 12, 6
    recipe.run.dir = "whole"
    train.run(recipe)
    recipe.run.dir = "interrupted"
    step, taken = train.Steps.take, []

    def interrupted(self, *args):
        if len(taken) == 8:
            raise KeyboardInterrupt
        taken.append(len(taken))
        return step(self, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train.Steps, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(recipe)
    train.run(recipe)
    whole, resumed = (load_file(f"{name}/adapter/adapter_model.safetensors") for name in ("whole", "interrupted"))
    apart = {name: reference.relative(resumed[name], whole[name]) for name in whole}
    assert not {name: error for name, error in apart.items() if error}


def test_next_batch_is_copied_during_the_step(recipe):
    """The copy is issued on its own stream before the step that runs in the meantime."""
    with trainer(recipe) as built:
        steps = iter(built.steps)
        for _ in range(6):
            next(steps)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                next(steps)
            torch.cuda.synchronize()
        steps.close()
    copies = [event for event in profile.events() if "Memcpy HtoD" in event.name]
    assert copies, "the profile holds no copy"
    assert all("Pinned" in event.name for event in copies), {event.name for event in copies}
