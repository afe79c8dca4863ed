"""Runs a parsed command line: composes and validates the config, and calls the command with it, once or for each job
of a multirun.

main.py imports this file only after it has parsed the command line, because the config's libraries take seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fxtune.checkpoint.run_folder import RESULT, sweep_folder
from fxtune.cli.answer import ANSWER
from fxtune.cli.commands import COMMANDS, Command, print_result
from fxtune.cli.sweep_results import SweepRun, show_results
from fxtune.config import compose
from fxtune.config.overrides import Choice
from fxtune.config.root import Config, completed
from fxtune.data.read.sources import require_usable
from fxtune.distributed import choice, failure
from fxtune.distributed.failure import conclude, keeps_connections
from fxtune.distributed.ranks import process_rank
from fxtune.errors import ConfigError, Ended, RankError, UserError
from fxtune.system.files.atomic_files import read_json
from fxtune.system.terminal import progress
from fxtune.system.terminal.console import show_error
from fxtune.system.terminal.redact import redact, redact_text
from fxtune.system.terminal.startup import STARTUP


def invoke(command: Command, options: argparse.Namespace, own: dict[str, Any]) -> None:
    """Call the command with its config, once or for each job of a multirun; or print the config (--cfg, --info)."""
    if options.cfg or options.info:
        choices = compose.prepare(options.overrides, register_all=bool(options.info))
        text = compose.inspect(choices, options.cfg, options.info, options.package, options.resolve)
        print(redact_text(text), end="")
    elif options.multirun:
        _sweep(command, own, compose.prepare(options.overrides, multirun=True))
    else:
        with STARTUP.part("recipe"):
            config = compose.load(options.overrides)
        _call(command, config, own, options.overrides)


def _call(command: Command, config: Config, own: dict[str, Any], overrides: list[str]) -> Any:
    if command.reads_data and not config.data.sources:
        raise ConfigError(
            "data.sources is empty: choose a recipe that has some (+recipe=quickstart), "
            "or give data: 'data.sources=[{path: my.jsonl}]'"
        )
    # Mistakes in the data show before slow libraries are imported. `plan`, `eval` and a finished run do not read all
    # of the data.
    finished = config.run.dir and os.path.exists(os.path.join(os.path.expanduser(config.run.dir), RESULT))
    if command.reads_data and command.name not in ("plan", "eval") and not finished:
        require_usable(config.objective.data_config(config.data))
    progress.show("none" if process_rank().rank else config.tracking.display.value)
    with progress.phase("Loading the libraries", announce=False, part="imports"):
        from fxtune.settle.ranks import ranks_of

    if command.ranks and own.keys().isdisjoint(command.alone_with) and (ranks := ranks_of(config)) > 1:
        from fxtune.distributed.launch import launch

        if code := launch(ranks, [command.name, *overrides, *_words(own), *ANSWER.words]):
            raise Ended(code)
        return None
    with progress.phase("Loading the libraries", announce=command.module not in sys.modules, part="imports"):
        module = importlib.import_module(command.module)
    with progress.phase("Working", announce=False):  # shown while no other phase runs
        result = module.run(config, **own)
    print_result(result)
    return result


def _words(own: dict[str, Any]) -> Iterator[str]:
    """Yield a command's own options as words of a command line."""
    for name, value in own.items():
        if name != "overrides":
            yield f"--{name.replace('_', '-')}"
            yield from [] if value is True else [str(value)]


class _JobError(BaseException):
    """Carries an error out of Hydra to end a sweep. If a job raised the error itself, Hydra would run the other jobs
    first and cut the traceback."""

    def __init__(self, error: Exception):
        self.error = error


def _sweep(command: Command, own: dict[str, Any], choices: list[Choice]) -> None:
    """Call the command for each job of a multirun, each with its own run.dir. After a UserError the next job runs."""
    swept = {choice.key for choice in choices if choice.sweeps}
    # The list has only the classes of the errors. The traceback of an error would keep a failed job's model in memory.
    failures: list[type[UserError]] = []
    runs: list[SweepRun] = []
    parent = Path()

    def job(cfg: DictConfig, overrides: list[str]) -> None:
        nonlocal parent
        title = title_of([text for text in overrides if text.lstrip("+").partition("=")[0] in swept], len(runs) + 1)
        run = SweepRun(title, "")
        runs.append(run)
        failure.leave_run()
        try:
            config = compose.typed(cfg)
            parent = Path(os.path.expanduser(config.run.dir)) if config.run.dir else Path("runs") / config.run.name
            as_written = redact(json.loads(json.dumps(asdict(config))))  # equals config.yaml in the run's folder
            root, resume = parent / title, config.run.resume.value
            folder = choice.of_rank_0(lambda: str(sweep_folder(root, resume, as_written, completed)))
            run.folder = config.run.dir = folder
            if process_rank().rank == 0:
                print(f"\nrun {len(runs)}: {title} -> {config.run.dir}", file=sys.stderr, flush=True)
            result = _call(command, config, own, [*overrides, compose.path_override("run.dir", config.run.dir)])
            if result is None and (Path(run.folder) / RESULT).exists():  # ranks in other processes trained it
                result = read_json(Path(run.folder) / RESULT)
            run.figures = result if isinstance(result, dict) else {}
        except UserError as error:
            if keeps_connections():  # this rank cannot take part in another run
                raise _JobError(error) from error
            if conclude(error)[0]:
                show_error(error)
            failures.append(type(error))
            run.error = redact_text(str(error))
        except Ended:
            failures.append(RankError)
            run.error = "a rank failed, for the reason above"
        except Exception as error:
            raise _JobError(error) from error
        finally:
            ANSWER.put({"runs": [asdict(run) for run in runs]})

    try:
        compose.sweep(choices, job)
    except _JobError as carrier:
        raise carrier.error from carrier.error.__cause__
    if command is COMMANDS["train"] and any(run.figures for run in runs) and process_rank().rank == 0:
        show_results(runs, parent)
    failure.leave_run()
    if failures:
        raise failures[0](f"{len(failures)} of {len(runs)} runs failed, for the reasons above")


def title_of(overrides: list[str], number: int) -> str:
    """The name of a job's folder: the keys that the job changes (`optimizer.lr=0.001,train.epochs=2`), in characters
    that every file system allows."""
    changes = ",".join(text.lstrip("+") for text in overrides) or f"job-{number}"
    title = re.sub(r"[^\w.=,+-]+", "_", changes)
    if title == changes and len(title) <= 120:
        return title
    # Two titles may be cut to the same text. The hash makes them differ.
    return f"{title[:100]}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"
