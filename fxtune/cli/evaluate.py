"""`fxtune eval`: loss and perplexity on held-out data, and exact match on held-out questions. Nothing is written.

    fxtune eval +recipe=quickstart                                              # the base model
    fxtune eval +recipe=quickstart model.adapter=runs/quickstart/adapter        # with the adapter of a LoRA run
    fxtune eval +recipe=full_quickstart model.path=runs/full_quickstart/model   # the model of a full fine-tuning

Data, masks and loss are those of training, so the figures compare with those of a run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader
from fxtune.data.batches.plan import Plan
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import ConfigError, HardwareError, NumbersError
from fxtune.models import load as models
from fxtune.objectives.causal_lm import CausalLM
from fxtune.system import console
from fxtune.system.oom import BatchSizes, out_of_memory_message
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.answers import Question, answer, exact_match, load_questions
from fxtune.training.builder import RunBuilder
from fxtune.training.evaluation import evaluate
from fxtune.training.oom_advice import MemoryPhase

if TYPE_CHECKING:
    from fxtune.config.root import Config


def run(config: Config) -> dict[str, Any]:
    """Print the figures and some answers, and return the figures by metric name.

    Raises ConfigError if the config names nothing to evaluate on, NumbersError if the loss is not finite, otherwise as
    a run does.
    """
    data = config.data
    data.validate()
    if not (data.eval_sources or data.eval_fraction or data.questions.path):
        raise ConfigError(
            "There is nothing to evaluate on: set data.eval_sources, data.eval_fraction or data.questions.path."
        )
    builder = RunBuilder(replace(config, techniques=_trained_techniques(config)))
    tokenizer = models.load_tokenizer(config.model)
    plan = _held_out_plan(config, tokenizer)
    questions = load_questions(data.questions, tokenizer, data.chat_template) if data.questions.path else []
    model = builder.build()
    language_model = builder.language_model(model)
    builder.prove(language_model)

    def out_of_memory(part: str, rows: int, why: str) -> HardwareError:
        return builder.out_of_memory(out_of_memory_message(part, rows, why), MemoryPhase.forward, rows)

    def evaluate_held_out(rows: int) -> dict[str, float]:
        assert plan is not None
        loader = Loader(plan.with_micro_batch_size(rows), config.loader, builder.world.device)
        try:
            return evaluate(language_model, CausalLM(), loader, builder.techniques.precision)
        finally:
            loader.close()

    sizes = BatchSizes(builder.world.device, note=console.say, error=out_of_memory)
    figures: dict[str, Any] = {}
    if plan is not None:
        means = sizes.run("evaluation", config.train.micro_batch_size, evaluate_held_out)
        figures.update({f"eval/{name}": value for name, value in means.items()})
    answers = answer(model, tokenizer, questions, data.questions.batch_size, data.questions.max_new_tokens, sizes)
    if questions:
        figures["questions/exact_match"] = exact_match(answers, questions)
    _show(config, builder.decided, figures, plan, questions, answers)
    if not math.isfinite(figures.get("eval/loss", 0.0)):
        raise NumbersError(
            f"The loss of {_name(config)} is {figures['eval/loss']}: its weights are finite, but what it computes in "
            f"{builder.facts.dtype} is not. Use another copy of it or an earlier checkpoint, or model.dtype=float32."
        )
    return figures


def _trained_techniques(config: Config) -> Pipeline:
    """The techniques without an untrained adapter, as it adds nothing. A quantized base needs one, so it stays."""
    techniques = config.techniques
    if config.model.adapter or techniques.quantize.enabled:
        return techniques
    return replace(techniques, lora=replace(techniques.lora, enabled=False))


def _held_out_plan(config: Config, tokenizer: Any) -> Plan | None:
    """The run's evaluation plan, made without its training plan."""
    data = config.data
    sources = data.eval_sources or (data.sources if data.eval_fraction else [])
    if not sources:
        return None
    return plan_evaluation(
        [tokenize(source, data, tokenizer) for source in sources],
        data,
        micro_batch_size=config.train.micro_batch_size,
        pad_id=tokenizer.pad_token_id or 0,
        held_out=not data.eval_sources,
    )


def _show(
    config: Config,
    notes: list[str],
    figures: dict[str, Any],
    plan: Plan | None,
    questions: list[Question],
    answers: list[str],
) -> None:
    rows = [[name, f"{value:.4f}"] for name, value in figures.items()]
    if plan is not None:
        rows.insert(0, ["supervised tokens", f"{plan.summary()['supervised_tokens']:,}"])
    if questions:
        rows.append(["questions", str(len(questions))])
    if shown := list(zip(questions, answers, strict=True))[: config.data.questions.show]:
        console.say(console.answers_table([(one.text, one.answer, None, given) for one, given in shown]))
    for note in notes:
        console.say(note)
    console.say(console.table(f"Evaluation of {_name(config)}", ["figure", "value"], rows))


def _name(config: Config) -> str:
    return config.model.adapter or config.model.path or "a model of random weights"
