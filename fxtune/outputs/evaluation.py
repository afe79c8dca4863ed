"""Measures loss on held-out data, exact match on held-out questions and benchmarks, for a recipe's model or a run's
output. Benchmarks of a run's output stand beside the benchmarks of the model that the run started from."""

from __future__ import annotations

import gc
import math
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxtune.checkpoint.run_folder import ROLLOUTS
from fxtune.config import compose
from fxtune.config.root import Config, SamplerName
from fxtune.data.batches.build import prepare_evaluation
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, QuestionsConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.distributed.parallel import ParallelConfig
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, NumbersError
from fxtune.models import load as models
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.teacher import BASE, WithTeacher
from fxtune.outputs.checkpoint_model import load_checkpoint
from fxtune.outputs.run_output import OutputKind, find_output, is_checkpoint
from fxtune.settle.images import image_processor
from fxtune.system.process.oom import RowsPerPass
from fxtune.system.terminal import console
from fxtune.techniques.lora.trained_tokens import ids_of_adapter
from fxtune.training.answers import Question, answer, load_questions, scores
from fxtune.training.benchmarks import Benchmarks, Scores
from fxtune.training.builder import RunBuilder
from fxtune.training.data.run_data import rows_to_read
from fxtune.training.evaluation import HeldOutEvaluation
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.rollouts.collector import make_collector
from fxtune.training.rollouts.evaluation import RewardEvaluation
from fxtune.training.rollouts.folder import Rollouts


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on held-out data and questions."""

    model: str
    figures: dict[str, float]
    """The values of the metrics by name: eval/loss, questions/exact_match, ..."""
    answers: list[tuple[Question, str]]
    notes: list[str]
    supervised_tokens: int | None
    """Number of supervised tokens in the held-out data; None without such data."""
    dtype: str
    shown_answers: int
    """Number of answers that are printed: data.questions.show."""
    scores: Scores = field(default_factory=dict)
    """The benchmarks of the model."""

    def require_finite(self) -> None:
        """Raise NumbersError if the loss is not finite."""
        if not math.isfinite(loss := self.figures.get("eval/loss", 0.0)):
            raise NumbersError(
                f"The loss of {self.model} is {loss}: its weights are finite, but what it computes in {self.dtype} is "
                "not. Use another copy of it or an earlier checkpoint, or model.dtype=float32."
            )


def evaluate_output(output: str, *keys: str, trust_remote_code: bool = False, url: str | None = None) -> Evaluation:
    """Evaluate the exported weights or a checkpoint of a run, with the run's config changed by `keys`. `url`: of a
    vLLM server with the output; only benchmarks are measured then, by the server.

    If the objective needs a reference that the folder does not have, questions and benchmarks are measured.

    Raises ConfigError for an adapter or a model that lies in no run, or if nothing can be measured. Also raises the
    errors of evaluate() and Benchmarks.ask().
    """
    found = find_output(output)
    if found.run is None:
        raise ConfigError(
            f"{found.folder} lies in no run, whose config would say what to evaluate on. Give a recipe: fxtune eval "
            f"+recipe=NAME model.{'path' if found.kind is OutputKind.model else 'adapter'}={found.folder}"
        )
    # The run may have divided its weights over more ranks than this machine has.
    config = replace(compose.of_run(found.run, trust_remote_code, keys), parallel=ParallelConfig())
    if found.kind is OutputKind.model:
        # A merged model is in 16 bits, and it has no adapters whose base could be a teacher. The command's keys count.
        if not any(key.startswith("techniques") for key in keys):
            config.techniques.quantize.enabled = False
        if isinstance(config.objective, WithTeacher) and config.objective.teacher == BASE and config.model.path:
            config.objective.teacher = config.model.path
    if url is not None:
        if (benchmarks := Benchmarks.open(config, World(torch.device("cpu")))) is None:
            raise ConfigError("--url is for benchmarks: name some with --tasks.")
        judged = benchmarks.ask(url, found.folder, found.run.resolve().name)
        return Evaluation(f"{found.folder} at {url}", judged, [], [], None, "", 0)
    compares = config.objective.needs.reference and config.data.holds_out
    base = _base_scores(config)
    if found.kind is OutputKind.checkpoint or (compares and found.kind is OutputKind.adapter):
        return evaluate(config, found.folder, base=base)
    notes = []
    if compares:
        notes.append(
            f"{found.folder}: objective={config.objective.name} compares the model with what its run started from, "
            "which this folder does not hold, so held-out data is left out. To measure on it: fxtune eval "
            f"{found.run / ('adapter' if config.techniques.lora.enabled else 'step-N')}."
        )
        config = replace(config, data=_without_held_out(config.data))
        if not (config.data.questions.path or config.eval.tasks):
            raise ConfigError(f"{notes[0]} Nothing is left to measure: set data.questions.path or eval.tasks.")
    result = evaluate(replace(config, model=models.starting_from(config.model, found.folder)), base=base)
    return replace(result, notes=[*notes, *result.notes])


def _without_held_out(data: DataConfig) -> DataConfig:
    sources = [replace(source, eval_fraction=None) for source in data.sources]
    return replace(data, sources=sources, eval_fraction=0.0, eval_sources=[])


def _base_scores(config: Config) -> Scores:
    """The benchmarks of the model that a run of `config` starts from."""
    if not config.eval.tasks:
        return {}
    alone = replace(_without_held_out(config.data), questions=QuestionsConfig())
    try:
        return evaluate(replace(config, data=alone)).scores
    finally:
        gc.collect()  # frees the model


def evaluate(
    config: Config, trained: Path | None = None, trust_remote_code: bool = False, base: Scores | None = None
) -> Evaluation:
    """Evaluate the model of a recipe. `trained`: a checkpoint or an adapter of a run of this config. Its weights
    replace the weights that the run started from. The reference keeps the weights of the start. `base`: the
    benchmarks of the start, to stand beside the benchmarks of this model.

    Raises ConfigError if the config names nothing to evaluate on, and the errors of a run.
    """
    config.model.trust_remote_code |= trust_remote_code
    notes, data = config.data.unasked(), replace(config.data, questions=config.data.applicable_questions())
    config = replace(config, data=data)
    data.validate()
    if not (data.holds_out or data.questions.path or config.eval.tasks):
        raise ConfigError(
            "There is nothing to evaluate on: set data.eval_sources, data.eval_fraction, data.questions.path or "
            "eval.tasks." + "".join(f" {note}" for note in notes)
        )
    techniques = config.techniques
    if not (trained or config.model.adapter or techniques.quantize.enabled):
        # Untrained adapters add nothing. Only a quantized base needs them.
        techniques = replace(techniques, lora=replace(techniques.lora, enabled=False))
    builder = RunBuilder(replace(config, techniques=techniques.of_evaluation()))
    world = builder.world
    benchmarks = Benchmarks.open(config, world)
    tokenizer = world.main_first(
        partial(models.load_tokenizer, config.model, builder.settled.hf_config), "waiting for the tokenizer"
    )
    rows, accept = config.train.micro_batch_size, config.objective.accept
    images = image_processor(config.model, data, tokenizer, builder.settled.hf_config, builder.facts.dtype)
    read = rows_to_read(builder.config)
    prepare = partial(prepare_evaluation, read, tokenizer, rows, progress=world.main, accept=accept, images=images)
    plan = world.main_first(prepare, "waiting for rank 0 to tokenize")
    questions = []
    if data.questions.path and world.main:
        questions = load_questions(data, tokenizer, images)
    if plan is not None:
        builder.inform(plan.tables)
        builder.compare_on([plan], from_base=trained is None and techniques.lora.enabled)
    if trained is not None and not is_checkpoint(trained):
        builder.special_tokens = ids_of_adapter(str(trained))  # techniques.lora.train_tokens=auto chose these
    language_model, _ = builder.proven_model()
    if trained is not None and is_checkpoint(trained):
        load_checkpoint(trained, language_model.model)
    elif trained is not None:
        builder.techniques.lora.start_from(language_model.prepared, str(trained))

    error = partial(builder.out_of_memory, phase=MemoryPhase.forward)
    sizes = RowsPerPass(builder.world.device, note=console.say, error=error)
    figures: dict[str, Any] = {}
    if plan is not None:
        with closing(_held_out(builder, plan, language_model, tokenizer, sizes, images)) as held_out:
            figures.update(held_out.figures(sizes, config.train.micro_batch_size))
    limits: Any = dict(max_new_tokens=data.questions.max_new_tokens, batch_sizes=sizes)
    answers = answer(language_model.prepared, tokenizer, questions, **limits, images=images) if questions else []
    if questions:
        found = scores(answers, questions, data.questions.metrics)
        figures.update({f"questions/{name}": value for name, value in found.items()})
    if benchmarks:
        benchmarks.scores["base"] = base or {}
        figures.update(benchmarks.measure(language_model.prepared.module, tokenizer, "tuned", rows, world))
    name = str(trained or config.model.adapter or config.model.path or "a model of random weights")
    asked, notes = list(zip(questions, answers, strict=True)), [*builder.notes, *notes]
    supervised = plan.summary()["supervised_tokens"] if plan is not None else None
    own = benchmarks.scores.get("tuned", {}) if benchmarks else {}
    return Evaluation(name, figures, asked, notes, supervised, builder.facts.dtype, data.questions.show, own)


def _held_out(
    builder: RunBuilder,
    plan: Plan,
    model: LanguageModel,
    tokenizer: Any,
    sizes: RowsPerPass,
    images: ImageProcessor | None,
) -> HeldOutEvaluation | RewardEvaluation:
    config, precision = builder.config, builder.techniques.precision
    if not config.objective.needs.rollouts:
        return builder.held_out(plan, model, config.objective)
    own = replace(config, sampler=replace(config.sampler, name=SamplerName.model, url=None))
    rollouts = Rollouts(Path(ROLLOUTS), images)  # an evaluation writes none
    made = make_collector(own, model, tokenizer, rollouts, precision, builder.world, sizes, console.say)
    return RewardEvaluation(plan, made)
