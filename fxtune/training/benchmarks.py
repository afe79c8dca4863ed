"""lm-eval benchmarks of the model before training (base) and of the trained model (tuned).

A task gives a value for each document, and most metrics are the mean of these values. The standard error of a mean of
n values is s / sqrt(n), with the sample's standard deviation s, as in lm-eval. Both models answer the same documents.
So the standard error of the gain comes from the n differences. It is smaller than the two scores' errors suggest
(Miller 2024, arXiv 2411.00640). Intervals are 1.96 standard errors wide on each side. Intervals are too narrow if n is
small or nearly all values are equal. A metric that is not such a mean (F1, perplexity) has no interval.

The tasks are lm-eval's own, or YAML files of a folder. These files are code: their templates and functions run here.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxtune.checkpoint.run_folder import write_json
from fxtune.config.root import Config, EvalConfig
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, did_you_mean, first_line, readable
from fxtune.models.structure import without_dropout
from fxtune.reports.held_out import BENCHMARKS
from fxtune.system.files.atomic_files import read_json
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.system.terminal.progress import phase
from fxtune.training.rollouts.client import Client, ServerError

FILE = "benchmarks.json"

Scores = dict[str, dict[str, Any]]
"""{"TASK/METRIC": {"value": the metric, "documents": its value for each document; [] if it is not their mean}}."""


@dataclass
class Benchmarks:
    """The tasks of eval.tasks, loaded, and the scores of `base` and `tuned` so far."""

    config: EvalConfig
    folder: Path | None = None
    """The folder of the run, which stores the scores in FILE."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """The result of lm-eval's TaskManager.load(), on rank 0."""
    scores: dict[str, Scores] = field(default_factory=dict)

    @staticmethod
    def open(config: Config, world: World, folder: Path | None = None) -> Benchmarks | None:
        """Load the tasks on rank 0, which measures; None without eval.tasks. Raises ConfigError if
        lm-eval is missing, if a task is unknown or cannot be loaded, or if ranks divide rows or weights."""
        if not config.eval.tasks:
            return None
        if world.shares:
            raise ConfigError(
                "eval.tasks: rank 0 measures alone, and these ranks divide rows or weights. Leave eval.tasks out, and "
                "measure the finished run on one card: fxtune eval RUN --tasks ..."
            )
        made = Benchmarks(config.eval, folder)
        world.from_main(lambda: made.tasks.update(_load(config.eval)), "loading the benchmarks")
        if folder is not None and (folder / FILE).exists():
            with readable(str(folder), "Remove this file; the base is not shown then."):
                made.scores = dict(read_json(folder / FILE))
        return made

    def measure(self, module: Any, tokenizer: Any, side: str, rows: int, world: World) -> dict[str, float]:
        """Measure `module` as `side` (`base` or `tuned`), `rows` texts at once, on rank 0. Returns the figures of both
        sides so far. The model's mode and the random state do not change."""

        def measured() -> dict[str, float]:
            from lm_eval.models.huggingface import HFLM

            own = copy.deepcopy(tokenizer)  # lm-eval may add a token for padding
            with without_dropout(module), torch.compiler.set_stance("force_eager"), torch.no_grad():
                return self._add(side, partial(HFLM, pretrained=module, tokenizer=own, batch_size=rows))

        return world.from_main(measured, "waiting for the benchmarks")

    def ask(self, url: str, output: Path, name: str) -> dict[str, float]:
        """Measure on a vLLM server at `url` the adapter or model in the folder `output` (or else named `name`), and an
        adapter's base. Returns the figures. Raises ConfigError if the server does not serve the adapter or model."""
        from lm_eval.models.huggingface import HFLM
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        class Served(LocalCompletionsAPI):
            def tok_encode(self, text: Any, add_special_tokens: bool | None = None, **options: Any) -> list[Any]:
                """Encode as HFLM: the tokenizer adds a missing BOS token to a text. Also takes a list of texts."""
                if isinstance(text, str):
                    return list(HFLM.tok_encode(self, text, add_special_tokens, **options))
                return [self.tok_encode(each) for each in text]

        try:
            cards = Client(url, seconds=60.0).served()
        except ServerError as error:
            raise ConfigError(f"--url {url}: no vLLM server ({error}). Start one: vllm serve MODEL.") from error
        base = next((card for card in cards if not card.get("parent")), cards[0])
        served = next((card for card in cards if Path(card.get("root") or "/").resolve() == output.resolve()), None)
        served = served or next((card for card in cards if card["id"] == name), None)
        if served is None:
            names, adapter = (", ".join(f"{card['id']} ({card.get('root')})" for card in cards), output.absolute())
            raise ConfigError(
                f"--url {url}: it serves {names}, and neither {output} nor the name {name}. Start it with the model, "
                f"or with the adapter: vllm serve BASE --enable-lora --lora-modules {shlex.quote(f'{name}={adapter}')}"
            )
        made = partial(
            Served,
            add_bos_token=None,
            base_url=f"{url.rstrip('/')}/v1/completions",
            max_length=base.get("max_model_len"),
            tokenizer=str(output),
            tokenizer_backend="huggingface",
        )
        if served is not base:
            self._add("base", partial(made, model=base["id"]))
        return self._add("tuned", partial(made, model=served["id"]))

    def _add(self, side: str, made: Callable[[], Any]) -> dict[str, float]:
        """Measure the lm-eval model that made() returns. Returns the figures of both sides so far."""
        import lm_eval

        for task in self.tasks["tasks"].values():
            task.set_fewshot_seed(1234)  # as in lm-eval; both sides get the same examples
        options = {"limit": self.config.limit, "apply_chat_template": self.config.chat_template}
        try:  # lm-eval draws its own bars
            with phase(f"Measuring benchmarks, {side}"), contextlib.redirect_stderr(io.StringIO()):
                found = lm_eval.evaluate(made(), self.tasks, bootstrap_iters=0, **options)
        except Exception as error:  # a task's file may run any code, and a server may fail in any way
            if reason := out_of_memory_reason(error):  # rank 0 sends it to all ranks
                raise HardwareError(f"eval.tasks: {reason}. Lower train.micro_batch_size, lm-eval's batch.") from error
            raise ConfigError(
                f"eval.tasks: lm-eval cannot measure {', '.join(self.config.tasks)}: {first_line(error)}. Take a task "
                "out, or mend its file."
            ) from error
        self.scores[side] = dict(_scores(found))
        if self.folder is not None:
            write_json(self.folder / FILE, self.scores)
        return figures(self.scores.get("base", {}), self.scores.get("tuned", {}))


def figures(base: Scores, tuned: Scores) -> dict[str, float]:
    """benchmarks/TASK/METRIC/NAME for each metric. NAME is `base` and `tuned`, `gain` (tuned - base), their standard
    errors (`base_error` and so on), and `documents`."""
    found = {}
    for name in {**base, **tuned}:
        sides = {side: scores[name] for side, scores in (("base", base), ("tuned", tuned)) if name in scores}
        parts = {side: (score["value"], np.asarray(score["documents"], float)) for side, score in sides.items()}
        if len(parts) == 2:
            (start, before), (end, after) = parts["base"], parts["tuned"]
            parts["gain"] = end - start, after - before if len(after) == len(before) else np.empty(0)
        for part, (value, of_documents) in parts.items():
            found[f"{BENCHMARKS}{name}/{part}"] = value
            if (count := len(of_documents)) > 1:
                found[f"{BENCHMARKS}{name}/{part}_error"] = float(of_documents.std(ddof=1) / math.sqrt(count))
                found[f"{BENCHMARKS}{name}/documents"] = count
    return found


def _load(config: EvalConfig) -> dict[str, Any]:
    if find_spec("lm_eval") is None:
        raise ConfigError("eval.tasks: lm-eval measures them, and it is not installed. pip install 'fxtune[eval]'")
    folder = config.task_folder
    if folder is not None and not any(Path(folder).rglob("*.y*ml")):
        raise ConfigError(f"eval.task_folder={folder}: there are no YAML files of tasks. Name a folder that has some.")
    with phase("Loading the benchmarks"), contextlib.redirect_stderr(io.StringIO()):
        from lm_eval.tasks import TaskManager

        try:
            manager = TaskManager(include_path=folder, include_defaults=folder is None)
            unknown = next((name for name in config.tasks if name not in manager.all_tasks), None)
            tasks = {} if unknown else dict(manager.load(list(config.tasks)))
        except Exception as error:  # a task's file may run any code, and read any data set
            raise ConfigError(
                f"eval.tasks: {', '.join(config.tasks)} cannot be loaded: {first_line(error)}. Without a network, "
                "name a folder of tasks with their data: eval.task_folder=FOLDER."
            ) from error
    if unknown:
        where = f"eval.task_folder={folder}" if folder else "lm-eval without eval.task_folder=FOLDER"
        raise ConfigError(f"eval.tasks: {where} has no task `{unknown}`{did_you_mean(unknown, manager.all_tasks)}")
    return tasks


def _scores(found: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of Scores from lm-eval's result."""
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            values = [
                sample.get(metric)
                for part in _parts(task, found["group_subtasks"])
                for sample in found["samples"].get(part, [])
                if sample["filter"] == kept
            ]
            numbers = [float(one) for one in values if isinstance(one, (bool, int, float, np.number))]
            is_mean = numbers and len(numbers) == len(values) and math.isclose(np.mean(numbers), value, abs_tol=1e-9)
            name = metric if kept == "none" else key
            yield f"{task}/{name}", {"value": float(value), "documents": numbers if is_mean else []}


def _parts(task: str, groups: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the tasks of a group and of its inner groups. A single task yields itself."""
    inner = groups.get(task) or []
    for part in inner:
        yield from _parts(part, groups)
    if not inner:
        yield task
