"""What a config leads to, observed at the artefacts and not at the config: batches, a step, rates, a run's folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import re
import shutil
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support import lm_eval_standin
from support.runs import history
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxtune.config.root import Config
from fxtune.data.batches import loader as loader_module
from fxtune.data.batches.loader import Loader
from fxtune.data.batches.plan import Plan
from fxtune.data.config import SourceConfig
from fxtune.data.tokenized import tokenize
from fxtune.models.load import load_tokenizer
from fxtune.optim.schedule import Schedule
from fxtune.outputs.document_losses import DocumentLosses
from fxtune.outputs.refresh_data import RefreshData, find_drift, judge
from fxtune.settle.ranks import ranks_of
from fxtune.system.process.oom import RowsPerPass
from fxtune.tracking import tracker
from fxtune.training.benchmarks import Benchmarks
from fxtune.training.builder import RunBuilder
from fxtune.training.general_text import general_plan
from fxtune.training.monitors.clock import RunClock
from fxtune.training.step import TrainStep
from fxtune.training.trainer import train

STEPS = 6
"""Steps whose batches are compared."""


def digest(value: Any) -> str:
    """The bits of a tensor, or the text of anything else."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):  # quantized
            value = value.dequantize()
        plain = value.detach().float().contiguous()
        return hashlib.sha256(plain.numpy().tobytes()).hexdigest()[:12]
    return str(value)


def batches_of(plan: Plan | None) -> list[Any]:
    """The batches of the first steps of a plan, and how many steps it has."""
    if plan is None:
        return []
    seen: list[Any] = [plan.steps]
    for step in range(min(plan.steps, STEPS)):
        for micro in range(plan.micro_batches(step)):
            batch = plan.batch(step, micro)
            seen.append([(name, digest(value)) for name, value in sorted(vars(batch).items())])
    return seen


def batches(config: Config) -> Any:
    """Batches of training, of the evaluation and of general text."""
    builder = RunBuilder(config)
    tokenizer, data = builder.read(Path("quarantine.jsonl"))
    general = general_plan(builder, tokenizer, data.images)
    return tuple(batches_of(plan) for plan in (data.training, data.evaluation, general))


class _Operators(TorchDispatchMode):
    """Records each operator with the shapes and dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, operator: Any, kinds: Any, inputs: Any = (), options: Any = None) -> Any:
        shapes = [(tuple(one.shape), one.dtype) for one in inputs if isinstance(one, torch.Tensor)]
        self.seen.append((str(operator), shapes))
        return operator(*inputs, **(options or {}))


def _weights(model: nn.Module) -> list[Any]:
    return [
        (name, tuple(weight.shape), weight.dtype, weight.requires_grad, digest(weight))
        for name, weight in (*model.named_parameters(), *model.named_buffers())
    ]


def built(config: Config) -> Any:
    """The weights and the buffers of the model with its techniques."""
    return _weights(RunBuilder(config).build().module)


def step(config: Config) -> Any:
    """The model before and after two optimizer steps, and the operators of the first."""
    builder = RunBuilder(config)
    _, data = builder.read()
    plan = builder.own(data.training)
    language_model = builder.language_model(builder.build())
    model = language_model.model
    before = _weights(model)
    train_step = builder.train_step(language_model, builder.config.objective)
    model.train()
    with closing(Loader(plan, config.loader, builder.world.device)) as loader:
        for recorder, taken in zip((operators := _Operators(), nullcontext()), loader.steps(), strict=False):
            with recorder:
                train_step(data.training, taken, builder.config.optimizer.lr)
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for part in train_step.optimizer.parts
        for group in part.param_groups
    ]
    flags = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
    return before, _weights(model), operators.seen, str(groups), builder.world.device.type, flags


def rates(config: Config) -> list[float]:
    """The learning rates of a run of 40 steps."""
    schedule = Schedule.of(config.schedule, 1.0, 40)
    return [schedule.rate(step) for step in range(40)]


TIMED = ("second", "time", "wait", "memory", "energy", "joules", "watts", "utilization", "flops", "mfu")
"""Parts of names of figures that differ from run to run."""


def trained(config: Config) -> Any:
    """A whole run: the files in its folder, its figures, the lines that it prints, and the weights that it exports."""
    printed, random_state = io.StringIO(), random.getstate()
    halving, asked = RowsPerPass.run, []

    def noted(self: RowsPerPass, name: str, rows: int, work: Any, multiple: int = 1) -> Any:
        asked.append((name, rows))
        return halving(self, name, rows, work, multiple)

    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        patch.object(RowsPerPass, "run", noted),
    ):
        folder, _ = train(config)
    random.setstate(random_state)
    figures = [
        {name: value for name, value in line.items() if not any(part in name for part in TIMED)}
        for line in history(folder)
    ]
    answers = [digest_of_file(path) for path in sorted(folder.glob("answers_*.jsonl"))]
    places = sorted(path.name for path in Path().iterdir() if path.is_dir())
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    exported = [digest_of_file(path) for path in sorted(folder.glob("adapter/*.safetensors"))]
    lines = re.sub(r"\d[\d.,:]*", "#", printed.getvalue())
    return str(folder), figures, sorted(files), exported, answers, asked, places, lines


def spiking(config: Config) -> Any:
    """trained(), where a loss is a spike if it is a tenth of the least spread above the loss before."""
    with patch.multiple("fxtune.training.step", WINDOW=1, THRESHOLD=0.1):
        return trained(config)


def digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def tracked(config: Config) -> Any:
    """What the tracker gives to the trackers' clients, and the files that it makes."""
    with patch.object(tracker, "TrackerClient") as client:
        client.return_value.id = None
        made = tracker.Tracker(config.tracking, "tracked", config.run.name, {})
        made.finish()
    files = sorted(path.name.partition(".")[0] for path in Path("tracked").rglob("*"))
    shutil.rmtree("tracked")
    return str(client.call_args_list), files


def loaded(config: Config) -> Any:
    """What the loader gives to torch's DataLoader."""
    builder = RunBuilder(config)
    _, data = builder.read()
    with patch.object(loader_module, "DataLoader") as made:
        Loader(data.training, config.loader, builder.world.device)
    given = made.call_args.kwargs
    return {name: given.get(name) for name in ("num_workers", "prefetch_factor")}


def compiled(config: Config) -> Any:
    """What is compiled, with which options of torch.compile."""
    builder = RunBuilder(config)
    with patch.object(torch, "compile", side_effect=lambda forward, **_: forward) as compiler:
        builder.build()
    return [(call.args[0].__qualname__, call.kwargs) for call in compiler.call_args_list]


def benched(config: Config) -> Any:
    """The documents and prompts of benchmarks, as a stand-in for lm-eval gets them."""
    builder = RunBuilder(config)
    with pytest.MonkeyPatch.context() as patches:
        lm_eval_standin.install(patches)
        benchmarks = Benchmarks.open(config, builder.world)
        assert benchmarks is not None
        model, tokenizer = builder.build().module, load_tokenizer(config.model)
        benchmarks.measure(model, tokenizer, "tuned", 1, builder.world)
    documents = {name: score["documents"] for name, score in benchmarks.scores["tuned"].items()}
    return documents, lm_eval_standin.PROMPTS.copy()


def refreshed(config: Config) -> Any:
    """The verdicts of a refresh on fixed losses, and the run that it would start."""
    draw = np.random.default_rng(0)

    def losses(means: np.ndarray) -> DocumentLosses:
        return DocumentLosses(np.arange(len(means), dtype=np.uint64), means * 10, np.full(len(means), 10.0))

    old, new = draw.lognormal(0, 0.5, 40), draw.lognormal(0, 0.5, 30)
    verdicts = []
    for change in (0.0, 0.02, 0.1):
        verdicts.append(find_drift(losses(old), losses(new * (1 + change)), config.refresh).found)
    for kept in (0.0, 0.1):
        after = old + kept + draw.normal(0, 0.01, 40), new - 0.01 + draw.normal(0, 0.01, 30)
        pairs = (losses(old), losses(after[0])), (losses(new), losses(after[1]))
        verdict = judge(*pairs, config.refresh, general=(1.0, 1.05))
        verdicts.append(verdict.passed)
    Path("parent").mkdir(exist_ok=True)
    Path("parent/setting.json").write_text("{}")
    sources = [SourceConfig(path="new.jsonl")]
    data = RefreshData(
        Path("parent"), config.data, replace(config, data=replace(config.data, sources=sources)), config.model
    )
    run = data.candidate(Path("parent"), Path("run-1"), data.write_new_rows(Path("parent"), "run-1"))
    weights = [source.weight for source in run.data.sources]
    return verdicts, len(data.old.digests), len(data.new_held_out), run.train.epochs, weights


def priced(config: Config) -> float | None:
    """The cost of two card-hours and three kilowatt-hours."""
    return config.tracking.cost.of(2 * 3600, 3 * 3.6e6)


def exhausted(config: Config) -> Any:
    """A run whose first pass runs out of memory."""
    backward, failed = TrainStep.backward, []

    def fail_once(self: TrainStep, *given: Any, **named: Any) -> Any:
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return backward(self, *given, **named)

    with patch.object(TrainStep, "backward", fail_once):
        return trained(config)


def tokenizing(config: Config) -> Any:
    """How many processes tokenize a large source into an empty cache, and from which age on tokens are removed."""
    processes, ages = [], []

    def inline(setup: Any, state: bytes, shards: Any, workers: int) -> Any:
        processes.append(workers)
        work = setup(state)
        yield from map(work, shards)

    shutil.rmtree(config.data.cache_dir or "cache", ignore_errors=True)
    with (
        patch.object(tokenize, "IN_PROCESS_BYTES", 0),
        patch.object(tokenize, "map_in_order", inline),
        patch.object(tokenize.cache, "remove_unused", lambda folder, days: ages.append(days) or ([], 0)),
    ):
        batches(config)
    return processes, ages


def launched(config: Config) -> int:
    """How many ranks fxtune starts."""
    return ranks_of(config)


def evaluated_slowly(config: Config) -> Any:
    """The steps after which a run evaluates, where an evaluation takes as long as a step."""
    clock = iter(range(10**6))
    with patch("fxtune.training.trainer.RunClock", partial(RunClock, clock=lambda: next(clock))):
        return trained(config)
