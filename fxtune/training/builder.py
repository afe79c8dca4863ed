"""What a run is made of before its first step, in the order in which it comes to be. Training, evaluation, `fxtune verify`
and `fxtune doctor` share it, so that what they say of a recipe is what training does with it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.run_folder import CHECKPOINTS, RunFolder
from fxtune.config.root import Config
from fxtune.data.batches.build import PreparedData, prepare_data
from fxtune.data.config import SourceConfig
from fxtune.data.read.sources import missing_reason
from fxtune.data.tokenized.tokenize import cache_root
from fxtune.distributed.world import World
from fxtune.errors import HardwareError, HubError, UserError
from fxtune.models import load as models
from fxtune.objectives.causal_lm import Loss
from fxtune.optim import config as update_rule
from fxtune.system.hub import locate
from fxtune.system.oom import out_of_memory_reason
from fxtune.techniques.base import Evidence
from fxtune.techniques.facts import Facts
from fxtune.techniques.pipeline import make_probe, require_acted
from fxtune.tracking.tracker import Display
from fxtune.training import oom_advice
from fxtune.training.oom_advice import Stage
from fxtune.training.resume_check import ResumeCheck


class RunBuilder:
    """The machine, the techniques as they act on it, and on demand the data and the model.

    Making one refuses what cannot work from configs alone: no weight is loaded, no row is read. Raises ConfigError with every
    reason at once, HardwareError and StorageError as World.create() and load_config() do.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        _afresh()
        self.world = World.create(config.run.device, config.run.memory_gib)
        if config.run.deterministic:
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # cuBLAS reads it once, when the first matmul runs
        torch.use_deterministic_algorithms(config.run.deterministic)
        # Else each torch.empty is filled with NaN, to show who reads what nobody wrote: a pass over memory for every result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with _obstacles_together(config):
            self.hf_config = models.load_config(config.model)
        self.facts = Facts.of(
            self.world,
            model=self.hf_config.to_dict(),
            dtype=str(models.resolve_dtype(config.model, self.world)).removeprefix("torch."),
            packing=config.data.packing,
            sequence_length=config.data.sequence_length,
            rows=config.data.row_lengths(),
            micro_batch_size=config.train.micro_batch_size,
            optimizer=config.optimizer.name.value,
            stochastic_rounding=config.optimizer.stochastic_rounding,
            deterministic=config.run.deterministic,
            techniques=config.techniques,
        )
        self.techniques, self.decided = config.techniques.resolved(
            self.facts, list(update_rule.check(config.optimizer, self.facts))
        )
        """Every `auto` decided, and what was decided and why."""
        self.facts = replace(self.facts, techniques=self.techniques)

    def read(self, quarantine: Path | None = None) -> tuple[Any, PreparedData]:
        """The tokenizer and the data. They come before the weights: a bad row is found in seconds, an 8B model takes a minute
        to load. `quarantine`: see tokenize().
        """
        config = self.config
        with _obstacles_together(config):
            tokenizer = models.load_tokenizer(config.model)
        return tokenizer, prepare_data(
            config.data,
            tokenizer,
            micro_batch_size=config.train.micro_batch_size,
            global_batch_size=config.train.global_batch_size,
            max_steps=config.train.max_steps,
            epochs=config.train.epochs,
            seed=config.run.seed,
            quarantine=quarantine,
            progress=config.tracking.display is not Display.none,
        )

    def build(self) -> nn.Module:
        """The model with every technique applied."""
        with self.oom_context("Building the model"):
            return self.techniques.build(self.config.model, self.hf_config, self.world, self.config.run.seed)

    def loss(self, model: nn.Module) -> Loss:
        """The loss of `model`, as the techniques want it."""
        # It looks at the model as training will run it.
        with self.oom_context("Trying the loss on a small row"), self.techniques.precision.context(self.world.device):
            return Loss(model, self.techniques.liger)

    def prove(self, loss: Loss) -> list[Evidence]:
        """What is observed of every technique on the model of `loss`, and of that. Raises ConfigError where one did not act."""
        return require_acted(self.observe(loss))

    def observe(self, loss: Loss) -> list[Evidence]:
        """prove() without the error."""
        with self.oom_context("Trying the techniques on a small row"):
            return [
                *self.techniques.verify(loss.model, make_probe(loss.model, self.config.data.packing)),
                *loss.evidence,
            ]

    @contextmanager
    def oom_context(self, part: str, stage: Stage = Stage.weights) -> Iterator[None]:
        """Raise out_of_memory() where memory runs out inside. `part`: what is done there."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if found := out_of_memory_reason(error):
                raise self.out_of_memory(f"{part} ran out of memory: {found}", stage) from error
            raise

    def out_of_memory(
        self, what: str, stage: Stage, rows: int | None = None, width: int | None = None
    ) -> HardwareError:
        """The error that says `what` and lists what would help most. `rows`, `width`: of the batch that did not fit, if it was
        not the largest that the recipe may have.
        """
        rows = rows or self.facts.micro_batch_size
        width = width or self.facts.row_length
        facts = replace(self.facts, micro_batch_size=rows, rows=(width,))
        found = oom_advice.remedies(facts, self.techniques, self.config.optimizer, stage)
        return HardwareError(f"{what}\n{oom_advice.told(*found, stage, rows, width)}")


def of_run(config: Config, folder: RunFolder, note: Callable[[str], None]) -> tuple[RunBuilder, ResumeCheck]:
    """The setting of the run in `folder`, and what watches that it is the same one where the run goes on: each `auto` is then
    what it was when the run started, and not decided again. Raises what Setting and Sameness do.
    """
    setting = RunBuilder(config)
    goes_on = folder.resumed and any(stored.paths(folder.path / CHECKPOINTS))
    same = ResumeCheck(folder.path, goes_on, config.run.deterministic, note)
    if was := same.decided(config.techniques, setting.techniques):
        setting = RunBuilder(replace(config, techniques=was))
    same.open(config.model, config.optimizer, setting.techniques.options(), setting.facts)
    return setting, same


@contextmanager
def _obstacles_together(config: Config) -> Iterator[None]:
    """Where the hub cannot be reached for one thing, name all that the recipe wants of it and that is not here, in one error:
    whoever fetches them elsewhere goes there once.
    """
    try:
        yield
    except HubError as error:
        model, data, found = config.model, config.data, [str(error)]
        wanted: list[tuple[str, str | None, str | None]] = [
            ("model.adapter", model.adapter, None),
            ("model.tokenizer", model.tokenizer, None),
        ]
        if "model_type" not in model.architecture:
            wanted.insert(0, ("model.path", model.path, model.revision))
        for key, name, revision in wanted:
            if name is not None:
                try:
                    locate(name, revision, key)
                except UserError as other:
                    found.append(str(other))
        sources = {source.path: source for source in [*data.sources, *data.eval_sources]}
        if data.questions.path is not None:
            sources.setdefault(data.questions.path, SourceConfig(path=data.questions.path))
        cache = cache_root(data) / "datasets" if data.cache_dir else None
        found += [f"data.sources: {why}" for source in sources.values() if (why := missing_reason(source, cache))]
        found = list(dict.fromkeys(found))
        if len(found) == 1:
            raise
        listed = "\n".join(f"  {why}" for why in found)
        raise HubError(f"{len(found)} things of this recipe are not here:\n{listed}") from error


def _afresh() -> None:
    """Put away what a run before this one in the same process left on the card: the first of a sweep must not decide what
    there is room for in the second, nor what its matmuls round to.
    """
    if not torch.cuda.is_initialized():
        return
    gc.collect()  # wrapped forwards refer to their own modules, so a model does not go with its last name
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    # What techniques.precision sets, for a run that has it off.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
