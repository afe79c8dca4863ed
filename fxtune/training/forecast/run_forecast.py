"""Forecasts a run before it starts: its memory, steps, time and disk. The machine of the run may be another one than
this.

Everything is arithmetic on the model's config and the recipe (fxtune/estimate). Of the data, only the lengths of
documents matter. They come from the cache of tokens or from the rows. Of large files only the first rows are read.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fxtune.config.root import Config
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.read.sources import missing_reason
from fxtune.data.tokenized.cache import cache_root
from fxtune.errors import UserError
from fxtune.estimate.cards import rates
from fxtune.estimate.cpu_speed import cpu_speed
from fxtune.estimate.memory import Need
from fxtune.estimate.step_time import forward_seconds, image_seconds, micro_batch_seconds, update_seconds
from fxtune.estimate.traffic import step_traffic
from fxtune.estimate.weights import BYTES, beside_of, shape_of, trained_parameters
from fxtune.facts.run import Facts
from fxtune.models.kinds.image_decoder.encoder_shape import EncoderShape, ImageWork
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import load_config, load_tokenizer, with_shipped_config
from fxtune.objectives.base import Objective
from fxtune.objectives.reference import Reference, WithReference
from fxtune.settle.freed_gradients import change_for
from fxtune.settle.images import image_processor
from fxtune.settle.rows import decide_rows
from fxtune.settle.settled import settle, settle_frozen_model
from fxtune.settle.stages import Stage
from fxtune.system.machine.facts import MachineFacts
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.data.run_data import run_data
from fxtune.training.forecast import oom_advice
from fxtune.training.forecast.oom_advice import Change, MemoryPhase
from fxtune.training.forecast.step_count import few_steps
from fxtune.training.rollouts.made_up import made_up_plan

WHOLE_BYTES = 16 << 20
"""If all files together are no larger, they are tokenized whole."""
HEAD_BYTES = 2 << 20
"""How many bytes of larger JSONL and text files are tokenized."""
START_SECONDS = {"cuda": 40.0, "cpu": 6.0}
"""Seconds from the start of the process to the second step, with warm caches. They were measured with a large model on
a card (docs/performance.md) and a small model on a CPU (README)."""
SHORT = 10.0
"""The steps of a run on a CPU are forecast only if they take at least this number of seconds."""
IMAGE_SHARE, IMAGE_TOKENS = 0.5, 1024
"""Assumptions without data: the share of image tokens in all tokens, and the tokens of an image if its size decides
them."""
WITHOUT_SAMPLING = (
    "answers are assumed to have from 1 to sampler.max_tokens tokens; the time to sample and score them is not in the "
    "forecast"
)
FORWARD = 0.35
"""The time of a forward pass, as a share of the time of a training step without recomputation."""


@dataclass(frozen=True)
class Lengths:
    """The tokens of a run's data."""

    epoch: int
    """Tokens of the documents in the rows of an epoch. The prompt of a pair counts once if both answers share it."""
    padded: int
    """Tokens of the rows of an epoch, with padding."""
    supervised_share: float
    attended: float
    """The length of the document that a token is in, as a mean over tokens."""
    rows: float = 0.0
    """Rows of an epoch; 0: full rows."""
    steps: int | None = None
    """Steps of the run; None if not all of its data was counted."""
    epochs: float | None = None
    """How many epochs these steps take."""
    held_out: int = 0
    """Tokens of the held-out documents."""
    whole: float = 1.0
    """Tokens of whole documents, divided by `epoch`. Whole documents count a shared prompt for both answers."""
    sampled: str = ""
    """The part of the data that was counted, for messages; empty: all."""
    images: ImageWork | None = None
    """The images of an epoch; None without images."""
    fullest: int = 0
    """The largest number of image features in a row."""
    image_bytes: int = 0
    """Bytes of images in the rows of files. These images are stored beside the cached tokens."""
    distinct: tuple[int, int] = (0, 0)
    """The number of distinct images, and of their features."""
    assumed: str = ""
    """The assumption about images, if the data is not here; empty: no assumption."""
    group: int = 1
    """Rows that must be in one micro-batch: the documents of a group without packing."""

    @staticmethod
    def full_rows(tokens: int, config: Config) -> Lengths:
        """Assume an epoch of `tokens` tokens: full rows of one document, with every token supervised. If the model
        reads images, IMAGE_SHARE of the tokens belong to images of one size."""
        lengths = Lengths(tokens, tokens, 1.0, config.data.mean_row_length())
        shape = _encoder_shape(config)
        if shape is None:
            return lengths
        each = shape.tile or config.data.image_tokens.max or IMAGE_TOKENS
        work = replace(shape, tiles=None).work(*np.array([[each], [0], [0]])).scaled(IMAGE_SHARE * tokens / each)
        assumed = f"as if {IMAGE_SHARE:.0%} of the tokens were of images, {each:,} for each"
        return replace(lengths, images=work, fullest=int(IMAGE_SHARE * config.data.sequence_length), assumed=assumed)


def _encoder_shape(config: Config) -> EncoderShape | None:
    hf_config = load_config(config.model, config.objective.needs.head)
    images = kind_of(hf_config).images
    return images.shape(hf_config) if images else None


@dataclass(frozen=True)
class RunForecast:
    techniques: Pipeline
    """The techniques, with every `auto` decided."""
    facts: Facts
    """Facts of one rank."""
    notes: list[str]
    """Lines on what was decided, and why."""
    need: Need
    step_seconds: float
    step_tokens: float
    """Tokens of documents in a step of all ranks, without padding. A shared prompt counts for both answers."""
    lengths: Lengths | None
    """The lengths of the data; None: the data is not here."""
    steps: int | None
    """Steps of the run; None if their number depends on data that is not here."""
    evaluations: int
    evaluation_seconds: float
    """Seconds of one evaluation."""
    checkpoint_bytes: int
    checkpoints: int
    """The largest number of checkpoints on the disk at a time."""
    export_bytes: int
    reference_seconds: float = 0.0
    """Seconds before the first step, in which the log-probabilities of a stored reference are computed."""
    reference_bytes: int = 0
    """Bytes of the files of a stored reference beside the cached tokens: a float32 for each token."""
    feature_seconds: float = 0.0
    """Seconds before the first step, in which features of images are computed (data.image_features=stored)."""
    feature_bytes: int = 0
    """Bytes of their files beside the cached tokens."""
    image_seconds: float = 0.0
    """The part of `step_seconds` that the vision encoder and its projector take."""
    assumed: str = ""
    """The assumption about images, because the data is not here; empty: no assumption."""
    few_steps: list[str] = field(default_factory=list)
    """A line if the steps are too few to learn from."""

    @property
    def fits(self) -> bool:
        return self.need.device <= self.facts.free_memory and self.need.pinned <= self.facts.host_memory

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole run, including its start, stored numbers and its evaluations."""
        if self.steps is None:
            return None
        start, evaluations = START_SECONDS[self.facts.device], self.evaluations * self.evaluation_seconds
        return start + self.reference_seconds + self.feature_seconds + self.steps * self.step_seconds + evaluations

    @property
    def tokens(self) -> float | None:
        """Tokens of documents in all steps; None if the number of steps is not known."""
        return None if self.steps is None else self.steps * self.step_tokens

    @property
    def disk_bytes(self) -> int:
        return self.checkpoints * self.checkpoint_bytes + self.export_bytes


def forecast_run(config: Config, machine: MachineFacts, gpus: int, lengths: Lengths | None) -> RunForecast:
    """The forecast of `config` on `gpus` cards of `machine`. `lengths`: of the run's data, see count_tokens().

    Reads the model's config and no weight. Raises errors as settle() does.
    """
    settled = settle(config, machine, gpus, present=gpus)
    assumed = lengths or Lengths.full_rows(settled.facts.row_length, settled.config)
    stage = Stage.first(settled).with_images(assumed.fullest)
    config, facts = stage.config, stage.facts
    train, plan = config.train, facts.execution.recompute
    images = assumed.images and assumed.images.scaled(train.micro_batch_size * facts.row_length / assumed.padded)
    supervised, attended = (lengths.supervised_share, lengths.attended) if lengths else (1.0, None)
    used = lengths.epoch / lengths.padded if lengths else 1.0
    own = -(-train.global_batch_size // train.micro_batch_size // facts.degrees.data_ranks)
    row_tokens = train.global_batch_size * facts.row_length
    steps, rows = train.max_steps, 0.0
    if lengths is not None:
        rows = lengths.rows or lengths.padded / facts.row_length
        epochs = train.epochs or (None if train.max_steps else 1.0)
        by_epochs = max(1, math.ceil(epochs * rows / train.global_batch_size)) if epochs else None
        steps = lengths.steps or min(limit for limit in (train.max_steps, by_epochs) if limit)
    # If epochs limit the steps, the number of passes is not computed from steps: rounding up the last step would make
    # one epoch more than one.
    passes = train.epochs or 1.0
    if lengths and lengths.epochs:
        passes = lengths.epochs
    elif lengths and steps and steps == train.max_steps:
        passes = min(steps * row_tokens / lengths.padded, train.epochs or math.inf)
    objective = _compared(config, passes)
    micro = micro_batch_seconds(facts, plan, supervised, attended, objective.forward_passes, images)
    of_images = image_seconds(facts, images) + objective.forward_passes * image_seconds(facts, images, trains=False)
    compute = own * micro + update_seconds(facts)
    step = compute + _exchange_seconds(facts, own, compute)
    stored, stored_bytes = 0.0, 0
    if lengths:
        tokens = lengths.padded + lengths.held_out
        batches = tokens / facts.row_length / train.micro_batch_size / facts.degrees.data_ranks
        if isinstance(objective, WithReference) and objective.reference is Reference.stored:
            stored_bytes = int(4 * lengths.whole * (lengths.epoch + lengths.held_out))
            stored = batches * forward_seconds(facts, supervised, attended, images)
        if objective.stored_tokens and (frozen := settle_frozen_model(config, facts)):
            stored_bytes = int((6 * objective.stored_tokens + 4) * supervised * (lengths.epoch + lengths.held_out))
            stored = batches * forward_seconds(frozen.facts, supervised, attended)
    feature_seconds, feature_bytes = 0.0, 0
    if facts.stores_images and lengths and lengths.images and (shape := beside_of(facts).shape):
        feature_bytes = lengths.distinct[1] * shape.levels * shape_of(facts).hidden * BYTES.get(facts.dtype, 4)
        every = lengths.images.scaled(lengths.distinct[1] / lengths.images.features / facts.degrees.ranks)
        feature_seconds = image_seconds(replace(facts, stores_images=False), every, trains=False)
    held_out = 0
    if lengths and steps and (lengths.held_out or config.data.eval_sources):
        held_out = 1 + (steps // train.eval_every if train.eval_every else 0)
    evaluation = FORWARD * step * (lengths.held_out if lengths else 0) / max(row_tokens * used, 1)
    trained, size = trained_parameters(facts), 2 if facts.dtype in ("bfloat16", "float16") else 4
    if facts.execution.adapters:
        size = 4  # adapters are float32
    return RunForecast(
        stage.techniques,
        facts,
        [*stage.notes, *[WITHOUT_SAMPLING] * stage.config.objective.needs.rollouts],
        stage.techniques.memory_need(facts),
        step,
        row_tokens * used * (lengths.whole if lengths else 1.0),
        lengths,
        steps,
        held_out,
        evaluation,
        int(trained * size * (1 + facts.optimizer.moments)),
        config.checkpoint.keep + (config.checkpoint.keep_best and held_out > 0) + 1,
        trained * size,
        stored,
        stored_bytes,
        feature_seconds,
        feature_bytes,
        own * of_images,
        assumed.assumed,
        list(few_steps(config, steps, rows, lengths.group)) if lengths else [],
    )


def _compared(config: Config, epochs: float) -> Objective:
    """The objective, with its reference settled for this number of epochs."""
    objective: Objective = config.objective
    if not isinstance(objective, WithReference):
        return objective
    return replace(objective, reference=objective.settle_reference(config.techniques.lora.enabled, epochs))


def seconds_here(facts: Facts, plan: Plan, forward_passes: int = 0) -> float | None:
    """Seconds of the steps of `plan` on the cores of this machine. The cores are timed (estimate/cpu_speed.py) only if
    the steps take long enough; otherwise the result is None. `facts`: with techniques decided. `forward_passes`: see
    micro_batch_seconds()."""
    summary, kept = plan.summary(), facts.execution.recompute
    computed = summary["computed_tokens"]
    row = computed / (1 - summary["padding_share"]) / summary["rows"]
    supervised = summary["supervised_tokens"] / computed
    micro = micro_batch_seconds(
        facts, kept, supervised, _attended(plan), forward_passes, micro_batch_images(facts, plan)
    )
    micro *= row / facts.row_length
    seconds = plan.steps * (plan.micro_batches(0) * micro + update_seconds(facts))
    return seconds / cpu_speed(facts.cores) if seconds >= SHORT else None


def changes_to_fit(config: Config, forecast: RunForecast) -> list[tuple[Change, bool]]:
    """The single changes of the recipe that save the most memory, largest saving first. Each comes with whether it is
    enough for the run to fit."""
    facts = forecast.facts
    keys = change_for(config, facts)
    _, changes = oom_advice.advice(facts, forecast.techniques, config.optimizer, MemoryPhase.training, keys)
    return [(change, forecast.need.device - change.saved_bytes <= facts.free_memory) for change in changes]


def fitting_count(config: Config, forecast: RunForecast, gpus: int, lengths: Lengths | None) -> int | None:
    """The least number of cards (2, 4 or 8) on which the run fits; None if it fits on none of these. `gpus`: the
    number of cards on which it does not fit."""
    facts = forecast.facts
    for count in (count for count in (2, 4, 8) if count > gpus):
        try:
            if forecast_run(config, facts, count, lengths).fits:
                return count
        except UserError:  # a number that does not divide a step
            continue
    return None


def _exchange_seconds(facts: Facts, micro_batches: int, compute: float) -> float:
    """Seconds of a step in which ranks send and do not compute. Only replicas in full fine-tuning sum their gradients
    while they compute. With divided weights, two and four cards were measured to take as long as if nothing were
    computed during the exchange (docs/distributed.md)."""
    if facts.degrees.ranks == 1:
        return 0.0
    traffic, link = step_traffic(facts, micro_batches), rates(facts).peer
    if facts.degrees.shard == 1 and facts.execution.adapters is None:
        return traffic.rows / link + max(traffic.gradients / link - compute, 0.0)
    return traffic.total / link


def with_lengths(config: Config, card: MachineFacts, tokens: float | None) -> tuple[Config, Lengths | str]:
    """Returns (`config`, with a shipped config if the hub does not give the model; the lengths of an epoch, or why
    they are not known). `tokens`: the tokens of an epoch; None: they are counted in the data."""
    model = with_shipped_config(config.model, plans=True)
    no_tokenizer = model is not config.model and model.tokenizer is None
    config = replace(config, model=model, objective=config.objective.for_plan())
    if tokens is not None or no_tokenizer:
        return config, "The tokenizer is not here." if tokens is None else Lengths.full_rows(int(tokens), config)
    decided, _, _ = decide_rows(config, card, load_config(model, config.objective.needs.head))
    return config, count_tokens(replace(config, data=decided))


def count_tokens(config: Config) -> Lengths | str:
    """The lengths of the data of `config`, or why they are not known. Nothing is downloaded. Raises an error if data
    that is here cannot be read."""
    cache = cache_root(config.data) / "datasets" if config.data.cache_dir else None
    for source in [*config.data.sources, *config.data.eval_sources]:
        if reason := missing_reason(source, cache):
            return reason
    with _small(config.data) as (data, scale, sampled):
        tokenizer = load_tokenizer(config.model)
        images_here = image_processor(config.model, data, tokenizer)
        data = replace(data, length_schedule=[]) if sampled else data
        counted = replace(config, data=data)
        prepared = run_data(counted, tokenizer, images_here, complete=not sampled, progress=False)
    if config.objective.needs.rollouts:
        with tempfile.TemporaryDirectory(prefix="fxtune-plan-") as folder:
            made_up = made_up_plan(config, prepared.training, Path(folder))
            prepared = replace(prepared, training=made_up)
    summary, plan = prepared.training.summary(), prepared.training
    held_out = prepared.evaluation.summary()["computed_tokens"] if prepared.evaluation else 0
    images, fullest = _epoch_images(_encoder_shape(config), plan)
    distinct = [table.distinct_images for table in prepared.tables if table.images is not None]
    whole = bool(config.data.eval_limit or config.data.eval_sources)
    computed = summary["computed_tokens"]
    padded = computed / (1 - summary["padding_share"])
    return Lengths(
        int(computed * scale),
        int(padded * scale),
        summary["supervised_tokens"] / computed,
        _attended(plan),
        summary["rows"] * scale,
        None if sampled else summary["steps"],
        None if sampled else summary["epochs"],
        held_out if whole else int(held_out * scale),
        summary["tokens"] / computed,
        sampled,
        images and images.scaled(scale),
        fullest,
        int(sum(table.embedded_bytes for table in prepared.tables) * scale),
        (int(sum(len(first) for first, *_ in distinct) * scale), int(sum(ends[-1] for *_, ends in distinct) * scale)),
        group=plan.stream.rows_of_group,
    )


def micro_batch_images(facts: Facts, plan: Plan) -> ImageWork | None:
    """The images of a micro-batch of the longest rows, if these have the first epoch's average number of images a
    token."""
    if (images := _epoch_images(beside_of(facts).shape, plan)[0]) is None:
        return None
    summary = plan.summary()
    padded = summary["computed_tokens"] / (1 - summary["padding_share"])
    return images.scaled(facts.micro_batch_size * facts.row_length / padded)


def _epoch_images(shape: EncoderShape | None, plan: Plan) -> tuple[ImageWork | None, int]:
    """(the images of the first epoch, the largest number of features in a row); (None, 0) without images."""
    images, fullest = plan.epoch_images()
    if shape is None or not len(images):
        return None, 0
    return shape.work(images.features, images.heights, images.widths), fullest


def _attended(plan: Plan) -> float:
    """Compute Lengths.attended. An answer after a shared prompt counts as a document that takes the same time."""
    found = plan.stream.spans(plan.stream.epoch(0).segments)
    length, before = found.length.astype(float), found.shared.astype(float)
    return float(((length + before) ** 2 - before**2).sum() / length.sum())


@contextmanager
def _small(data: DataConfig) -> Iterator[tuple[DataConfig, float, str]]:
    """A context with the data config restricted to the first rows of large files, the factor by which the data is
    larger, and a line about the part that is read."""
    files = [Path(source.path) for source in data.sources]
    sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
    if sum(sizes) <= WHOLE_BYTES or not all(file.suffix in (".jsonl", ".txt", ".md") for file in files):
        yield data, 1.0, ""
        return
    with tempfile.TemporaryDirectory(prefix="fxtune-plan-") as folder:
        sources, taken = list[SourceConfig](), 0
        for at, (source, file, size) in enumerate(zip(data.sources, files, sizes, strict=True)):
            with file.open("rb") as stream:
                head = stream.read(max(HEAD_BYTES * size // sum(sizes), 4096))
                head += stream.readline()
            part = Path(folder) / f"{at}{file.suffix}"
            part.write_bytes(head)
            sources.append(replace(source, path=str(part)))
            taken += len(head)
        said = f"the first {taken / 1e6:.1f} MB of {sum(sizes) / 1e6:,.0f} MB"
        yield replace(data, sources=sources), sum(sizes) / taken, said
