"""`fxtune eval`: loss and perplexity on held-out data, and exact match on held-out questions. Nothing is written.

    fxtune eval +recipe=quickstart                                              # the base model
    fxtune eval +recipe=quickstart model.adapter=runs/quickstart/adapter        # what a LoRA run made of it
    fxtune eval +recipe=full_quickstart model.path=runs/full_quickstart/model   # what a full fine-tuning made of it

Data, masks and loss are those of training, so the figures can be set beside a run's own.
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
from fxtune.system import console as screen
from fxtune.system.oom import BatchSizes, out_of_memory_message
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.answers import Question, answer, exact_match, load_questions
from fxtune.training.builder import RunBuilder
from fxtune.training.evaluation import evaluate
from fxtune.training.oom_advice import MemoryPhase

if TYPE_CHECKING:
    from fxtune.config.root import Config


def run(config: Config) -> dict[str, Any]:
    """Print the figures and some answers, and return the figures by their metric names. Errors as the run itself has them.

    Raises ConfigError, too, where the config names nothing to evaluate on, and NumbersError where the loss is not finite.
    """
    data, model = config.data, config.model
    data.validate()
    if not (data.eval_sources or data.eval_fraction or data.questions.path):
        raise ConfigError(
            "There is nothing to evaluate on: set data.eval_sources, data.eval_fraction or data.questions.path."
        )
    setting = RunBuilder(replace(config, techniques=_to_evaluate(config)))
    tokenizer = models.load_tokenizer(model)
    plan = _held_out(config, tokenizer)
    questions = load_questions(data.questions, tokenizer, data.chat_template) if data.questions.path else []
    built = setting.build()
    language_model = setting.language_model(built)
    setting.prove(language_model)

    def does_not_fit(part: str, rows: int, why: str) -> HardwareError:
        return setting.out_of_memory(out_of_memory_message(part, rows, why), MemoryPhase.forward, rows)

    def held_out_figures(rows: int) -> dict[str, float]:
        assert plan is not None
        loader = Loader(plan.with_micro_batch_size(rows), config.loader, setting.world.device)
        try:
            return evaluate(language_model, CausalLM(), loader, setting.techniques.precision)
        finally:
            loader.close()

    console = screen.console()
    halving = BatchSizes(
        setting.world.device, note=lambda text: console.print(screen.plain(text), soft_wrap=True), error=does_not_fit
    )
    figures: dict[str, Any] = {}
    if plan is not None:
        means = halving.run("evaluation", config.train.micro_batch_size, held_out_figures)
        figures.update({f"eval/{name}": value for name, value in means.items()})
    answers = answer(built, tokenizer, questions, data.questions.batch_size, data.questions.max_new_tokens, halving)
    if questions:
        figures["questions/exact_match"] = exact_match(answers, questions)
    _show(config, setting.decided, figures, plan, questions, answers)
    if not math.isfinite(figures.get("eval/loss", 0.0)):
        raise NumbersError(
            f"The loss of {_name(config)} is {figures['eval/loss']}: its weights are finite numbers, and what it "
            f"computes of them in {setting.facts.dtype} is not. Use another copy of it or an earlier checkpoint, "
            "or model.dtype=float32."
        )
    return figures


def _to_evaluate(config: Config) -> Pipeline:
    """The techniques without an adapter that nobody has trained: a fresh one starts as nothing. Over a quantised base, which is
    there for adapters alone, it stays, and adds nothing.
    """
    techniques = config.techniques
    if config.model.adapter or techniques.quantize.enabled:
        return techniques
    return replace(techniques, lora=replace(techniques.lora, enabled=False))


def _held_out(config: Config, tokenizer: Any) -> Plan | None:
    """The evaluation plan that the run has, made without its training plan."""
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
    console = screen.console()
    if questions and config.data.questions.show:
        shown = list(zip(questions, answers, strict=True))[: config.data.questions.show]
        console.print(
            screen.answers_table([(question.text, question.answer, None, given) for question, given in shown])
        )
    for note in notes:
        console.print(screen.plain(note), soft_wrap=True)
    console.print(screen.table(f"Evaluation of {_name(config)}", ["figure", "value"], rows))


def _name(config: Config) -> str:
    return config.model.adapter or config.model.path or "a model of random weights"
