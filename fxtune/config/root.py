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
    """The name of the run's folder below runs/ and of the run in W&B. By default the recipe's name."""
    dir: Optional[str] = None
    """The run's folder. null: runs/NAME, or runs/NAME-2 and so on if runs/NAME is taken."""
    seed: int = field(default=0, metadata={"min": 0, "max": 2**63 - 1})
    """The seed of the data's order, of new weights and of dropout."""
    resume: Resume = Resume.auto
    """`auto`: continue an unfinished run of the same config, or start a new run. `never`: start a new run.
    `must`: continue a run, and fail if there is none to continue."""
    deterministic: Any = field(default=AUTO, metadata={"kind": bool, "words": (AUTO,)})
    """Give the same bits each time on the same GPU; a CPU always does. `auto`: use deterministic kernels where they
    cost at most 2 % by measurement; a line says which. `true`: use only deterministic kernels, and decide nothing by
    timing or free memory; an option that cannot do this is refused. `false`: use the fastest kernels
    (docs/faults.md)."""
    device: Device = Device.auto
    """`auto`: the GPU if the machine has one, otherwise the CPU."""
    gpus: str = count_or_auto()
    """How many GPUs of this machine train together, each with its own process (a rank). `auto`: the largest number
    that divides the micro-batches of a step. With run.device=cpu: the number of processes on the CPU. torchrun starts
    ranks on several machines (docs/distributed.md)."""
    memory_gib: Optional[float] = field(default=None, metadata={"above": 0})
    """Limit torch to this much of the GPU's memory, in GiB, as if the card were smaller. null: all of it."""
    export: Export = Export.best
    """Which weights are exported when the run ends. `best`: the weights with the lowest held-out loss (or the best
    train.stop.metric). Without held-out data or with checkpoint.keep_best=false, `best` is the last weights. `last`:
    the weights after the last step."""
    report: bool = True
    """Write a page about the run, RUN/report.html, when the run ends. `fxtune report RUN` writes it at any time."""

    def __post_init__(self) -> None:
        if self.deterministic != AUTO:  # OmegaConf reads true, "true", 1, yes and on as true
            self.deterministic = BooleanNode().validate_and_convert(self.deterministic)

    @property
    def strict(self) -> bool:
        """Whether the run may decide nothing by a clock or by free memory."""
        return self.deterministic is True


class SamplerName(str, Enum):
    model = "model"
    vllm = "vllm"


@dataclass
class SamplerConfig:
    """The answers that an objective with rollouts learns from. In each step the model writes them to the
    train.global_batch_size prompts of the step."""

    name: SamplerName = SamplerName.model
    """What writes the answers. `model`: the trained model, in this process. `vllm`: vLLM, in a process
    that the run starts and ends (docs/rl.md)."""
    url: Optional[str] = None
    """The address of a vLLM server of yours, or several, separated by commas. null: see sampler.name."""
    venv: Optional[str] = None
    """The virtual environment that has vLLM."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of `vllm serve`: [--gpu-memory-utilization, "0.4"]."""
    answers: int = field(default=8, metadata={"min": 1})
    """Answers to each prompt."""
    max_tokens: int = field(default=256, metadata={"min": 1})
    """The number of tokens after which an answer is cut off."""
    turns: int = field(default=8, metadata={"min": 1})
    """Turns of an answer in which the model calls tools. sampler.max_tokens counts for all turns and results."""
    temperature: float = field(default=1.0, metadata={"above": 0})
    """Divides the logits, in sampling and in the loss. Above 1, answers differ more."""
    batch: int = field(default=64, metadata={"min": 1})
    """Answers that a rank writes at once, if the trained model writes them."""
    ahead: bool = False
    """Let vLLM write the answers of a step while the step before it is trained, by the weights from before that step.
    So the answers are one step older, and sampling and training take place at the same time."""
    sleep: bool = False
    """Let vLLM give its part of the card's memory back while the model trains on the same card."""
    request_seconds: float = field(default=600.0, metadata={"above": 0})
    """How long vLLM may take for an answer before it is asked again."""
    request_seeds: bool = True
    """Send a seed with each request, so that vLLM may write the same answers again. On a CPU vLLM takes none."""
    reward_seconds: float = field(default=30.0, metadata={"above": 0})
    """A reward that takes longer than this for the answers to one prompt is a bad reward (objective.on_bad_reward)."""
    reward_workers: int = field(default=2, metadata={"min": 1, "max": 256})
    """Processes that compute rewards."""

    @property
    def is_vllm(self) -> bool:
        return self.url is not None or self.name is SamplerName.vllm


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
        """The figure of an evaluation that is highest for the best weights. None: the best have the lowest loss."""
        figures = {self.exact_match: "questions/exact_match", self.reward_accuracy: "eval/reward_accuracy"}
        return figures.get(self)

    @property
    def words(self) -> str:
        """The name of the metric, for messages."""
        words = {self.exact_match: "share of exact answers", self.reward_accuracy: "held-out reward_accuracy"}
        return words.get(self, "held-out loss")


@dataclass
class StopConfig:
    """Early stopping: the run ends when its evaluations no longer become better."""

    patience: int = field(default=0, metadata={"min": 0})
    """End the run after this many evaluations in a row without a new best evaluation; 0: never. The best weights are
    exported. With schedule.name=wsd the learning rate decays from the best weights before the run ends."""
    min_delta: float = field(default=0.0, metadata={"min": 0})
    """An evaluation is a new best one only if it is better by more than this."""
    metric: StopMetric = StopMetric.loss
    """The metric that decides which evaluation and which weights are best. `loss`: the held-out loss. `exact_match`:
    the share of right answers to data.questions; each evaluation asks the questions. `reward_accuracy`: the share of
    held-out pairs whose chosen answer has the higher reward, for objectives of preferences."""


@dataclass
class TrainConfig:
    max_steps: Optional[int] = field(default=None, metadata={"min": 1})
    """Number of optimizer steps. If train.epochs is also set, the limit that comes first ends the run. If neither is
    set, the run takes one epoch."""
    epochs: Optional[float] = field(default=None, metadata={"above": 0, "max": 10_000})
    """Number of passes over the data; may be a fraction."""
    micro_batch_size: int = field(default=1, metadata={"min": 1})
    """Rows that go through the model at once on each rank."""
    global_batch_size: int = field(default=8, metadata={"min": 1})
    """Rows of one optimizer step over all ranks; a multiple of train.micro_batch_size."""
    batch_ramp: list[list[Any]] = field(default_factory=list)
    """Let the global batch grow. With [[0.5, 16]] a step has global_batch_size rows in the first half of the run's
    steps, and 16 rows in the second half. All numbers of rows are multiples of global_batch_size. The learning rate's
    schedule counts steps. The order of the rows stays the same."""
    eval_every: int = field(default=0, metadata={"min": 0})
    """Steps between two evaluations; 0: only at the end, and with train.stop 20 times in the run."""
    eval_share: Optional[float] = field(default=None, metadata={"above": 0, "below": 1})
    """The largest share of the time that evaluations may take. The run times its first evaluation, and then evaluates
    at the multiple of train.eval_every that keeps to this share. null: 0.05 with train.stop, otherwise any share."""
    stop: StopConfig = field(default_factory=StopConfig)
    max_minutes: Optional[float] = field(default=None, metadata={"above": 0})
    """End the run within this many minutes. The time between a stop and a resume does not count. With
    schedule.name=wsd the decay begins early enough to end in time; other schedules are cut off."""
    pause_after: Optional[int] = field(default=None, metadata={"min": 1})
    """Save after this step and end, without an export. The same command with a later step, or without this key,
    continues with the same bits. The learning rate follows the schedule of the whole run."""
    log_every: int = field(default=1, metadata={"min": 1})
    """Steps between two log lines. The training loop waits for the device only when it logs."""
    noise_scale: bool = False
    """Measure the gradient noise scale (arXiv 1812.06162) from the micro-batches of each step, and log it in rows as
    `train/noise_scale`. The run ends with advice on train.global_batch_size. Needs two micro-batches in a step."""
    max_grad_norm: float = field(default=1.0, metadata={"min": 0})
    """Clip the gradient to this norm; 0: off."""
    max_skipped_steps: int = field(default=5, metadata={"min": 1})
    """Stop after this many consecutive steps with a non-finite loss or gradient (such a step never changes the
    weights). Steps that float16 skips while it searches for its loss scale do not count."""
    spikes: Spikes = Spikes.report
    """What happens to a step whose loss is far above the losses of the 64 steps before it: above their median by 8 x
    1.4826 x their median absolute deviation. `report`: log the step with its samples. `skip`: also leave the weights
    unchanged (the device decides this). `off`: nothing."""
    out_of_memory: OutOfMemory = OutOfMemory.halve
    """What happens when training, evaluation or generation runs out of memory. `halve`: repeat the step with half of
    the batch in memory, and keep this size. The global batch and the loss stay the same. `stop`: end with an error."""

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step over all ranks."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def largest_batch(self) -> int:
        """Rows of the largest global batch, at the end of train.batch_ramp."""
        return int(self.batch_ramp[-1][1]) if self.batch_ramp else self.global_batch_size


@dataclass
class RefreshConfig:
    """Options of `fxtune refresh RUN data.sources=[...]`: it tests a run's model on new rows and trains it further."""

    alpha: float = field(default=0.01, metadata={"min": 0.001, "below": 0.5})
    """The rate of false alarms of each test: how often rows like the old rows count as drift, and how often a model
    that is not better passes the gate's test."""
    held_out: float = field(default=0.2, metadata={"above": 0, "below": 1})
    """The share of the new rows that is held out for the tests. The eval_fraction of a source overrides it."""
    replay: float = field(default=0.5, metadata={"above": 0, "below": 1})
    """The share of the supervised tokens that comes from the old rows, so that the model does not forget them."""
    epochs: float = field(default=3.0, metadata={"above": 0, "max": 10_000})
    """The largest number of passes over the new rows. Early stopping may end the run earlier."""
    bound: float = field(default=0.02, metadata={"above": 0})
    """A test must show that the new model is worse on the old held-out rows by less than this, in nats per supervised
    token. 0.02 is a perplexity 2 % higher. For preferences the unit is the objective's loss of a pair or an answer."""
    gain: float = field(default=0.001, metadata={"min": 0})
    """A test must show that the new model is better on the new held-out rows by more than this, in the unit of
    refresh.bound."""
    forgotten: Optional[float] = field(default=0.1, metadata={"min": 0})
    """The new model's loss on general text (data.general) may be higher than the old model's by this, in nats a token.
    null: any loss."""


@dataclass
class EvalConfig:
    """Benchmarks of lm-eval (pip install 'fxtune[eval]'), before and after training, and in `fxtune eval`."""

    tasks: list[str] = field(default_factory=list)
    """Names of tasks and groups of lm-eval: [hellaswag, arc_challenge]."""
    task_folder: Optional[str] = None
    """A folder with YAML files of tasks. eval.tasks then names these tasks only. Such files can run any code, so only
    the command line may set this key."""
    limit: Optional[int] = field(default=None, metadata={"min": 1})
    """Measure only the first documents of each task. null: all documents."""
    chat_template: bool = False
    """Write each prompt as a user's turn, by the chat template."""


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
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    techniques: Pipeline = field(default_factory=Pipeline)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    refresh: RefreshConfig = field(default_factory=RefreshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        # OmegaConf cannot describe a section whose class depends on its values, so the section comes as a dict.
        if isinstance(self.objective, dict):
            self.objective = from_options(self.objective)

    @property
    def judges_text(self) -> bool:
        """Whether held-out rows or questions judge a model that writes text."""
        has_held_out = self.data.holds_out or self.data.applicable_questions().path is not None
        return has_held_out and self.objective.needs.head == "lm"

    def plugins(self) -> dict[str, str]:
        """The plugins that this config uses, each with its version or the sha256 of its file."""
        data, questions = self.data, self.data.questions
        sources = {source.plugin_format for source in (*data.sources, *data.eval_sources, *data.general)}
        used = (
            (ROW_FORMATS, sources),
            (OBJECTIVES, {self.objective.name}),
            (METRICS, questions.metrics),
            (TECHNIQUES, self.techniques.plugins.use),
        )
        added = [registry.added()[name] for registry, names in used for name in names if name in registry.added()]
        return {plugin.name: plugin.identity for plugin in sorted(added, key=lambda plugin: plugin.name)}

    def refusals(self) -> Iterator[str]:
        """Yield a message with what to change, for values that are in their own ranges but do not fit together."""
        run, data, train = self.run, self.data, self.train
        plugins = self.techniques.plugins
        for name, options in plugins.use.items():
            key = f"techniques.plugins.use.{name}"
            if name not in TECHNIQUES:
                yield f"`{key}`: {TECHNIQUES.unknown(name)}"
                continue
            validator = Validator(plugins.schema(name), _place_in(key))
            validator.check(Slot(plugins.schema(name)), options or {}, ())
            yield from validator.problems
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
                "Set data.questions.path=null"
            )
        if self.eval.tasks and not self.objective.needs.writes:
            yield (
                f"`eval.tasks`: objective={self.objective.name} trains a model without a language-model head, and "
                "benchmarks need one. Remove it"
            )
        yield from self.parallel.refusals(self.techniques.lora.enabled)
        if train.global_batch_size % train.micro_batch_size:
            yield (
                f"`train.global_batch_size={train.global_batch_size}` must be a multiple of "
                f"`train.micro_batch_size={train.micro_batch_size}`"
            )
        if self.objective.needs.rollouts:
            yield from self._rollout_refusals()
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

    def _rollout_refusals(self) -> Iterator[str]:
        """Yield each reason why a run whose answers are sampled in each step cannot act as asked."""
        data, sampler = self.data, self.sampler
        if sampler.max_tokens >= data.sequence_length:
            yield (
                f"`sampler.max_tokens={sampler.max_tokens}` leaves no room for a prompt in a row of "
                f"`data.sequence_length={data.sequence_length}`: raise data.sequence_length"
            )
        if sampler.answers == 1 and getattr(self.objective, "rewards", None):
            yield "`sampler.answers=1`: rewards compare the answers to a prompt: set it to 2 or more"
        if sampler.ahead and self.train.stop.patience and self.schedule.name is ScheduleName.wsd:
            yield (
                "`sampler.ahead`: train.stop.patience with schedule.name=wsd returns to earlier weights, and the next "
                "step is sampled by then: set sampler.ahead=false, or another schedule"
            )
        if sampler.sleep and sampler.ahead:
            yield "`sampler.sleep`: with `sampler.ahead` vLLM works while the model trains: set either key to false"
        if self.loader.num_workers:
            yield "`loader.num_workers`: the rollouts of a step are read by the main process: set it to null"
        for key, value in (
            ("train.batch_ramp", self.train.batch_ramp),
            ("data.length_schedule", data.length_schedule),
            ("data.mix.long_share", data.mix.long_share),
        ):
            if value:
                yield f"`{key}` is for rows that exist before the run, and rollouts do not: leave it out"
        if self.parallel.average_every > 1:
            yield "`parallel.average_every`: ranks with different weights would sample different answers: set it to 1"

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
        if stop.patience and stop.metric is StopMetric.loss and not self.objective.judges_held_out:
            yield f"{patience}, but without objective.rewards no evaluation is better than another: leave it out"
        if stop.patience and not self.checkpoint.keep_best:
            yield f"{patience} exports the best weights: it needs checkpoint.keep_best=true"
        if self.run.strict and self.train.max_minutes is not None:
            yield "`run.deterministic=true` decides nothing by a clock: leave train.max_minutes out"
        if self.run.strict and share is not None:
            yield "`run.deterministic=true` decides nothing by a clock: leave train.eval_share out"


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """`values`, the plain config of an earlier run, with the defaults of the keys that it lacks."""
    train = values.get("train")
    if isinstance(train, dict) and "objective" in train:  # early versions had the objective's name here
        train = dict(train)
        values = {**values, "objective": {"name": train.pop("objective")}, "train": train}
    return with_defaults(Config, values)
