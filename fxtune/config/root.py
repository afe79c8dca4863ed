"""The dataclasses of the config: one field for each group of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from omegaconf import BooleanNode

from fxtune.checkpoint.manager import CheckpointConfig
from fxtune.config.introspection import Keys, Slot, with_defaults
from fxtune.config.validate import Validator
from fxtune.data import stages
from fxtune.data.batches.loader import LoaderConfig
from fxtune.data.config import AUTO, DataConfig
from fxtune.distributed.parallel import ParallelConfig, count_or_auto
from fxtune.distributed.world import Device
from fxtune.errors import ConfigError
from fxtune.models.load import ModelConfig
from fxtune.objectives.base import Objective, from_options
from fxtune.objectives.registry import OBJECTIVES
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.schedule import ScheduleConfig, ScheduleName
from fxtune.plugins import METRICS, ROW_FORMATS, TECHNIQUES
from fxtune.techniques.pipeline import Pipeline
from fxtune.tracking.tracker import TrackingConfig


class Resume(str, Enum):
    auto = "auto"
    never = "never"
    must = "must"


class Export(str, Enum):
    best = "best"
    last = "last"


@dataclass
class RunConfig:
    name: str = "run"
    """Names the run's folder below runs/ and the run in W&B. By default the recipe's name."""
    dir: Optional[str] = None
    """The run's folder. null: runs/NAME, or runs/NAME-2 and so on if that one is taken."""
    seed: int = field(default=0, metadata={"min": 0, "max": 2**63 - 1})
    """The seed of the data's order, of new weights and of dropout."""
    resume: Resume = Resume.auto
    """`auto`: continue an unfinished run of the same config, or start one. `never`: start one.
    `must`: fail if there is none."""
    deterministic: Any = field(default=AUTO, metadata={"kind": bool, "words": (AUTO,)})
    """Give the same bits each time on the same GPU; a CPU always does. `auto`: use deterministic kernels where they
    cost at most 2 % by measurement; a line says which. `true`: use no others, and choose nothing by timing or by free
    memory; an option that cannot do this is refused. `false`: use the fastest kernels (docs/faults.md)."""
    device: Device = Device.auto
    """`auto`: the GPU if there is one."""
    gpus: str = count_or_auto()
    """How many GPUs of this machine train together, each with its own process (a rank). `auto`: as many as divide the
    micro-batches of a step. With run.device=cpu: the number of processes on the CPU. torchrun starts ranks on several
    machines (docs/distributed.md)."""
    memory_gib: Optional[float] = field(default=None, metadata={"above": 0})
    """Limit torch to this much of the GPU's memory, in GiB, as if the card were smaller. null: all of it."""
    export: Export = Export.best
    """Which weights are exported when the run ends. `best`: the weights with the lowest held-out loss; without
    held-out data or with checkpoint.keep_best=false, the last weights. `last`: the weights after the last step."""
    report: bool = True
    """Write a page about the run, RUN/report.html, when it ends; `fxtune report RUN` writes it at any time."""

    def __post_init__(self) -> None:
        if self.deterministic != AUTO:  # as OmegaConf reads a bool: true, "true", 1, yes, on
            self.deterministic = BooleanNode().validate_and_convert(self.deterministic)

    @property
    def strict(self) -> bool:
        """Whether nothing may be decided by a clock or by free memory."""
        return self.deterministic is True


class Spikes(str, Enum):
    report = "report"
    skip = "skip"
    off = "off"


class OutOfMemory(str, Enum):
    halve = "halve"
    stop = "stop"


class StopMetric(str, Enum):
    loss = "loss"
    exact_match = "exact_match"
    reward_accuracy = "reward_accuracy"

    @property
    def figure(self) -> str | None:
        """The figure of an evaluation that says which weights are best, the highest; None: the lowest loss does."""
        figures = {self.exact_match: "questions/exact_match", self.reward_accuracy: "eval/reward_accuracy"}
        return figures.get(self)

    @property
    def words(self) -> str:
        """What is judged, for messages."""
        words = {self.exact_match: "share of exact answers", self.reward_accuracy: "held-out reward_accuracy"}
        return words.get(self, "held-out loss")


@dataclass
class StopConfig:
    """Early stopping: the run ends when evaluations do not become better any more."""

    patience: int = field(default=0, metadata={"min": 0})
    """End after so many evaluations in a row without a new best evaluation; 0: never. The best weights are exported.
    With schedule.name=wsd the learning rate decays from the best weights first."""
    min_delta: float = field(default=0.0, metadata={"min": 0})
    """An evaluation is better only by more than this."""
    metric: StopMetric = StopMetric.loss
    """The metric of the best evaluation and the best weights: the held-out `loss`; the share of `exact_match` on
    data.questions, which are then asked at each evaluation; or `reward_accuracy`, the share of held-out pairs whose
    chosen answer has the higher reward, of an objective of preferences."""


@dataclass
class TrainConfig:
    max_steps: Optional[int] = field(default=None, metadata={"min": 1})
    """Optimizer steps. If epochs is set too, whichever comes first; if neither is set, one epoch."""
    epochs: Optional[float] = field(default=None, metadata={"above": 0, "max": 10_000})
    """Passes over the data; may be a fraction."""
    micro_batch_size: int = field(default=1, metadata={"min": 1})
    """Rows in one forward and backward."""
    global_batch_size: int = field(default=8, metadata={"min": 1})
    """Rows in one optimizer step; a multiple of micro_batch_size."""
    batch_ramp: list[list[Any]] = field(default_factory=list)
    """Let the global batch grow: [[0.5, 16]] takes 16 rows a step from half of the run's steps on, and
    global_batch_size before. Multiples of global_batch_size. The schedule counts steps; rows keep their order."""
    eval_every: int = field(default=0, metadata={"min": 0})
    """Evaluate every so many steps; 0: only at the end, and with train.stop 20 times in the run."""
    eval_share: Optional[float] = field(default=None, metadata={"above": 0, "below": 1})
    """The largest share of the time that evaluations may take. The first one is measured and decides, once, the
    multiple of eval_every at which the run evaluates from then on. null: 0.05 with train.stop, else any share."""
    stop: StopConfig = field(default_factory=StopConfig)
    max_minutes: Optional[float] = field(default=None, metadata={"above": 0})
    """End the run within so many minutes of running time; the time between a stop and a resume does not count. With
    schedule.name=wsd the decay begins early enough to end in time; other schedules are cut off."""
    pause_after: Optional[int] = field(default=None, metadata={"min": 1})
    """Save after this step and end, without an export. The same command with a later step, or without this key, goes
    on with the same bits. The schedule of the learning rate is the whole run's."""
    log_every: int = field(default=1, metadata={"min": 1})
    """Steps between two log lines. The loop waits for the device only when it logs."""
    noise_scale: bool = False
    """Measure the gradient noise scale (arXiv 1812.06162) from the micro-batches of each step: `train/noise_scale`, in
    rows, and advice on train.global_batch_size at the end of the run. Needs two micro-batches in a step."""
    max_grad_norm: float = field(default=1.0, metadata={"min": 0})
    """Clip the gradient to this norm; 0: off."""
    max_skipped_steps: int = field(default=5, metadata={"min": 1})
    """Stop after this many consecutive steps with a non-finite loss or gradient (such a step never changes the
    weights). Steps that float16 skips while it searches for its loss scale do not count."""
    spikes: Spikes = Spikes.report
    """What happens to a step with a loss far above the losses of the 64 steps before: above their median by 8 times
    1.4826 x their median absolute deviation. `report`: log it with its samples.
    `skip`: also leave the weights unchanged (decided on the device). `off`: nothing."""
    out_of_memory: OutOfMemory = OutOfMemory.halve
    """What happens when training, evaluation or generation runs out of memory. `halve`: halve the batch in memory from
    there on and repeat the step, whose global batch and loss stay the same. `stop`: end with an error."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, of all ranks."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def largest_batch(self) -> int:
        """Rows in one of the last steps."""
        return int(self.batch_ramp[-1][1]) if self.batch_ramp else self.global_batch_size


@dataclass
class RefreshConfig:
    """`fxtune refresh RUN data.sources=[...]`: a run's model on new rows."""

    alpha: float = field(default=0.01, metadata={"min": 0.001, "below": 0.5})
    """The rate of false alarms of each test: how often rows like the old rows count as drift, and how often a model
    that is not better passes the gate's test."""
    held_out: float = field(default=0.2, metadata={"above": 0, "below": 1})
    """The share of the new rows that is held out to judge by; a source's own eval_fraction comes first."""
    replay: float = field(default=0.5, metadata={"above": 0, "below": 1})
    """The share of the supervised tokens that comes from the old rows, so that the model does not forget them."""
    epochs: float = field(default=3.0, metadata={"above": 0, "max": 10_000})
    """Passes over the new rows at most; early stopping may end the run before."""
    bound: float = field(default=0.02, metadata={"above": 0})
    """The new model must be shown to be worse on the old held-out rows by less than this, in nats per supervised
    token; 0.02 is a perplexity 2 % higher. For preferences, in the objective's loss of a pair, or of an answer."""
    gain: float = field(default=0.001, metadata={"min": 0})
    """The new model must be shown to be better on the new held-out rows by more than this, in the same unit."""


def _place_in(section: str) -> Callable[[Keys], str]:
    return lambda _: f"`{section}`"


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: Any = field(
        default_factory=lambda: {"name": "causal_lm"}, metadata={"kind": Objective, "variants": OBJECTIVES}
    )
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    techniques: Pipeline = field(default_factory=Pipeline)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    refresh: RefreshConfig = field(default_factory=RefreshConfig)

    def __post_init__(self) -> None:
        # OmegaConf has no place for a section whose class depends on its values, so they come as a dict.
        if isinstance(self.objective, dict):
            self.objective = from_options(self.objective)

    def plugins(self) -> dict[str, str]:
        """The plugins that this config uses, each with its version or the sha256 of its file."""
        data, questions = self.data, self.data.questions
        sources = {source.plugin_format for source in (*data.sources, *data.eval_sources)}
        used = (
            (ROW_FORMATS, sources),
            (OBJECTIVES, {self.objective.name}),
            (METRICS, questions.metrics),
            (TECHNIQUES, self.techniques.plugins.use),
        )
        added = [registry.added()[name] for registry, names in used for name in names if name in registry.added()]
        return {plugin.name: plugin.identity for plugin in sorted(added, key=lambda plugin: plugin.name)}

    def _plugin_refusals(self) -> Iterator[str]:
        """Yield each name that no plugin has registered, and each wrong option of a plugin's technique."""
        plugins = self.techniques.plugins
        for name, options in plugins.use.items():
            key = f"techniques.plugins.use.{name}"
            if name not in TECHNIQUES:
                yield f"`{key}`: {TECHNIQUES.unknown(name)}"
                continue
            validator = Validator(plugins.schema(name), _place_in(key))
            validator.check(Slot(plugins.schema(name)), options or {}, ())
            yield from validator.problems

    def refusals(self) -> Iterator[str]:
        """Yield what is wrong although each value is in its own range, worded as what to change."""
        run, data, train = self.run, self.data, self.train
        yield from self._plugin_refusals()
        if not re.fullmatch(r"[^/\\\x00-\x1f\x7f]+", run.name) or run.name.startswith("."):
            yield (
                f"`run.name={run.name}` names a folder below runs/: no slashes, no line breaks, no dot at the start, "
                "not empty (run.dir takes a path)"
            )
        if run.gpus != "auto" and not re.fullmatch(r"[1-9]\d{0,4}", run.gpus):
            yield f"`run.gpus={run.gpus}` must be `auto` or a whole number from 1 on"
        if data.questions.path is not None and not self.objective.needs.writes:
            yield (
                f"`data.questions.path`: objective={self.objective.name} trains a head that answers no questions. "
                "Remove it"
            )
        yield from self.parallel.refusals(self.techniques.lora.enabled)
        if train.global_batch_size % train.micro_batch_size:
            yield (
                f"`train.global_batch_size={train.global_batch_size}` must be a multiple of "
                f"`train.micro_batch_size={train.micro_batch_size}`"
            )
        yield from stages.ramp_refusals(train.batch_ramp, train.global_batch_size)
        for key, grows in (("train.batch_ramp", train.batch_ramp), ("data.length_schedule", data.length_schedule)):
            if grows and train.max_minutes is not None:
                yield (
                    f"`{key}` makes later steps longer, and `train.max_minutes` goes by the steps so far: leave one "
                    "of them out"
                )
        if data.length_schedule and train.noise_scale:
            yield (
                "`train.noise_scale=true` counts rows, and `data.length_schedule` changes what a row is: leave one of "
                "them out"
            )
        if train.noise_scale and train.global_batch_size == train.micro_batch_size:
            yield (
                "`train.noise_scale=true` compares the micro-batches of a step, and "
                f"`train.micro_batch_size={train.micro_batch_size}` leaves only one: set it to "
                f"{max(train.micro_batch_size // 2, 1)}, or raise train.global_batch_size"
            )
        if len(self.optimizer.betas) != 2:
            yield f"`optimizer.betas={self.optimizer.betas}` must be two numbers, as in [0.9, 0.999]"
        if self.optimizer.name is OptimizerName.adamw_schedulefree:
            if self.schedule.name is not ScheduleName.constant:
                yield (
                    f"`optimizer.name=adamw_schedulefree` averages its weights in place of a decay, and "
                    f"`schedule.name={self.schedule.name.value}` decays: set schedule.name=constant, or use adamw"
                )
            if self.parallel.average_every > 1:
                yield (
                    "`optimizer.name=adamw_schedulefree` has state that local steps do not average: set "
                    "parallel.average_every=1, or use adamw"
                )
        try:
            data.validate()
        except ConfigError as error:
            yield str(error)
        yield from self._stop_refusals()
        by_match = train.stop.patience > 0 and train.stop.metric is StopMetric.exact_match
        if train.eval_every and not data.holds_out and not by_match:
            yield (
                f"`train.eval_every={train.eval_every}`, but nothing is held out to evaluate on: set "
                "data.eval_fraction or data.eval_sources, or train.eval_every=0"
            )

    def _stop_refusals(self) -> Iterator[str]:
        """Yield each reason why early stopping, train.eval_share or train.max_minutes cannot act as asked."""
        data, stop, share = self.data, self.train.stop, self.train.eval_share
        patience = f"`train.stop.patience={stop.patience}`"
        if stop.patience and stop.metric is not StopMetric.exact_match and not data.holds_out:
            yield (
                f"{patience}, but nothing is held out to judge by: set data.eval_fraction or data.eval_sources, or "
                "train.stop.patience=0"
            )
        elif stop.patience and stop.metric is StopMetric.exact_match and data.applicable_questions().path is None:
            yield (
                f"{patience} with `train.stop.metric=exact_match`, but there are no questions to ask: set "
                "data.questions.path, or train.stop.metric=loss"
            )
        if stop.patience and stop.metric is StopMetric.reward_accuracy and stop.metric not in self.objective.metrics:
            yield (
                f"`train.stop.metric=reward_accuracy`, and `objective={self.objective.name}` has no such metric: "
                "choose an objective of preferences, or train.stop.metric=loss"
            )
        if stop.patience and not self.checkpoint.keep_best:
            yield f"{patience} exports the best weights: it needs checkpoint.keep_best=true"
        if self.run.strict and self.train.max_minutes is not None:
            yield "`run.deterministic=true` decides nothing by a clock: leave train.max_minutes out"
        if self.run.strict and share is not None:
            yield "`run.deterministic=true` decides nothing by a clock: leave train.eval_share out"


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """The plain config of an earlier run, with the default of each key that it lacks."""
    train = values.get("train")
    if isinstance(train, dict) and "objective" in train:  # where its name was before it had options
        train = dict(train)
        values = {**values, "objective": {"name": train.pop("objective")}, "train": train}
    return with_defaults(Config, values)
