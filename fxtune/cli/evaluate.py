"""`fxtune eval`: loss and perplexity on held-out data, exact match on held-out questions, and benchmarks of lm-eval.
Nothing is written.

    fxtune eval +recipe=quickstart                                              # the base model
    fxtune eval +recipe=quickstart model.adapter=runs/quickstart/adapter        # with the adapter of a LoRA run
    fxtune eval +recipe=full_quickstart model.path=runs/full_quickstart/model   # the model of a full fine-tuning
    fxtune eval quickstart                        # what a run has exported, on the held-out data of its config
    fxtune eval quickstart/step-87                # any checkpoint, adapter or model of a run
    fxtune eval quickstart --tasks hellaswag,arc_challenge     # benchmarks, beside the base (docs/after_training.md)
    fxtune eval quickstart --tasks hellaswag --url http://host:8000   # measured by vLLM, which serves both
    fxtune eval quickstart 'data.eval_sources=[{path: new.jsonl}]'              # on other data; any key can be set

Data, masks and loss are made as in training, so the figures can be compared with a run's figures. Several GPUs share
the held-out data of a recipe; the first GPU answers the questions.
"""

from __future__ import annotations

from fxtune.cli.answer import ANSWER
from fxtune.config.overrides import refuse
from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.outputs.evaluation import Evaluation, evaluate, evaluate_output
from fxtune.reports.held_out import IN_TABLES, figure_tables
from fxtune.system.terminal.console import answers_table, say, table


def of_output(
    output: str, *keys: str, trust_remote_code: bool = False, tasks: str | None = None, url: str | None = None
) -> dict[str, float]:
    """Print and return the figures of a run's output. Raises the errors of evaluate_output(), and NumbersError if the
    loss is not finite."""
    named = [f"eval.tasks=[{tasks}]"] if tasks else []
    return _show(evaluate_output(output, *keys, *named, trust_remote_code=trust_remote_code, url=url))


def run(
    config: Config, trust_remote_code: bool = False, tasks: str | None = None, url: str | None = None
) -> dict[str, float]:
    """Print and return the figures of a recipe's model, by metric name. Raises the errors of evaluate(), and
    NumbersError if the loss is not finite."""
    if url is not None:
        raise ConfigError("--url asks a server for a run's model: fxtune eval RUN --tasks NAME,NAME --url URL")
    if tasks:
        config.eval.tasks = tasks.split(",")
        refuse(config.refusals())
    return _show(evaluate(config, trust_remote_code=trust_remote_code))


def _show(found: Evaluation) -> dict[str, float]:
    answered = [{"question": asked.label, "right": asked.answer, "answer": answer} for asked, answer in found.answers]
    ANSWER.put({"model": found.model, "figures": found.figures, "answers": answered, "notes": found.notes})
    rows = [[name, f"{value:.4f}"] for name, value in found.figures.items() if not name.startswith(IN_TABLES)]
    if found.supervised_tokens is not None:
        rows.insert(0, ["supervised tokens", f"{found.supervised_tokens:,}"])
    if found.answers:
        rows.append(["questions", str(len(found.answers))])
    if shown := found.answers[: found.shown_answers]:
        say(answers_table([(asked.label, asked.answer, None, answer) for asked, answer in shown]))
    say(*found.notes)
    if rows:
        say(table(f"Evaluation of {found.model}", ["figure", "value"], rows))
    say(*(table(*content) for content in figure_tables(found.figures)))
    found.require_finite()
    return found.figures
