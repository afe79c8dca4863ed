"""The command line: `python -m fxtune [COMMAND] +recipe=NAME key=value ...`, also installed as `fxtune`.

It is parsed once, composed and validated once (fxtune/config/compose.py), and the command's `run(config)` is called.
Nothing slow is imported before it is needed: help and the list of recipes answer at once, and a mistake is reported
before a model or a dataset is touched.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Collection
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fxtune import __version__
from fxtune.cli.commands import COMMANDS, HELP, Command
from fxtune.config import discovery
from fxtune.errors import ConfigError, HardwareError, Stopped, StorageError, UserError, did_you_mean
from fxtune.system.redact import redact_text, redacted_output
from fxtune.system.signals import SIGNALS

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fxtune.config.overrides import Choice
    from fxtune.config.root import Config

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def main(argv: list[str] | None = None) -> int:
    """Run one command line (by default this process's own) and return the exit code."""
    try:
        with SIGNALS, redacted_output():
            _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        show(error)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        return _out_of_memory(error)
    except Stopped as stop:
        print(f"\nfxtune: {stop}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:  # without our signal handlers, as in a thread
        print("\nfxtune: interrupted. The same command continues from the newest checkpoint.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fxtune recipes | head`: the reader has closed the pipe, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def show(error: UserError) -> None:
    """Print an error to stderr in one block, without a traceback.

    It may quote a stranger's file, so brackets are not read as markup and control characters are made visible.
    """
    from rich.console import Console
    from rich.text import Text

    from fxtune.system.console import plain

    text = Text.assemble(("fxtune: ", "bold red"), plain(redact_text(str(error))))
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def _out_of_memory(error: MemoryError | RuntimeError) -> int:
    """Report an out-of-memory error that nothing else handles (in an import, a table, a merge), and return its exit
    code. Raises other errors."""
    from fxtune.system.oom import out_of_memory_reason

    found = out_of_memory_reason(error)
    if found is None:
        raise error
    shown = HardwareError(
        f"This process was given no more memory ({found}). Free some, or raise its limit (`ulimit -v`, the "
        "container's, the batch job's)."
    )
    show(shown)
    return shown.exit_code


def _run(argv: list[str]) -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise StorageError("The working directory does not exist any more. Change to one that does.") from error
    show_help = not argv
    name, argv = _split_command(argv)
    command = COMMANDS[name]
    has_keys = any(text.startswith(("-", "+")) or "=" in text for text in argv)
    positional = command.positional_only or (argv and not has_keys)
    if command.positional and positional and not {"-h", "--help"}.intersection(argv):
        _call_positional(name, command.positional, argv)
        return
    with SIGNALS.interruptible():  # argparse turns an interruption into an error of its own
        options = _parse(argv, command)
    if options.help or show_help:
        commands = "\n".join(f"  {name:<9} {command.summary}" for name, command in COMMANDS.items())
        shipped = discovery.place(discovery.shipped("recipes"))
        print(HELP.format(version=__version__, commands=commands, shipped=shipped))
    elif options.version:
        print(_versions())
    elif options.shell_completion:
        _complete(options.overrides)
    else:
        _run_command(command, options)


def _split_command(argv: list[str]) -> tuple[str, list[str]]:
    """The name of the command and the arguments after it. `train` may be left out."""
    if not argv or argv[0].startswith(("-", "+", "~")) or "=" in argv[0]:
        return "train", argv
    if argv[0] in COMMANDS:
        return argv[0], argv[1:]
    if argv[0] in discovery.recipes() or argv[0].endswith(".yaml"):
        raise ConfigError(f"`{argv[0]}` is a recipe: fxtune +recipe={shlex.join([argv[0]])}")
    raise ConfigError(f"unknown command `{argv[0]}`{did_you_mean(argv[0], COMMANDS)} `fxtune --help` explains them.")


def _call_positional(name: str, function: str, arguments: list[str]) -> None:
    """Call a command's function for positional arguments. Raises ConfigError if they do not fit it."""
    call = getattr(importlib.import_module(COMMANDS[name].module), function)
    signature = inspect.signature(call)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        names = " ".join(item.name.upper() for item in signature.parameters.values() if item.default is item.empty)
        raise ConfigError(f"usage: fxtune {name} {names}") from error
    _print_result(call(*arguments))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `fxtune --help` lists the options.")


def _parse(argv: list[str], command: Command) -> argparse.Namespace:
    """Parse the command's options and those of Hydra that read no unchecked files (so no --config-dir)."""
    argv = [
        "--info=all" if text in ("-i", "--info") and after not in _INFO else text
        for text, after in itertools.pairwise([*argv, ""])
    ]
    parser = _Parser(prog="fxtune", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", "-V", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    for name in (*command.flags, *command.values):
        action = "store" if name in command.values else "store_true"
        parser.add_argument(f"--{name.replace('_', '-')}", action=action)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    modes.add_argument("--info", "-i", choices=_INFO)
    modes.add_argument("--multirun", "-m", action="store_true")
    modes.add_argument("--shell-completion", "-sc", action="store_true")
    options = parser.parse_intermixed_args(argv)
    if (options.resolve or options.package) and not options.cfg:
        raise ConfigError("--resolve and --package say how --cfg prints: add --cfg job")
    return options


def _run_command(command: Command, options: argparse.Namespace) -> None:
    """Compose the config. Then call the command with it, print it (--cfg, --info), or run
    each job of a multirun (-m)."""
    own = {name: getattr(options, name) for name in (*command.flags, *command.values)}
    if command.gets_overrides:
        own["overrides"] = options.overrides
    if command.config_optional and not (options.overrides or options.cfg or options.info):
        importlib.import_module(command.module).run(None, **own)
        return
    from fxtune.config import compose

    if options.cfg or options.info:
        choices = compose.prepare(options.overrides, register_all=bool(options.info))
        text = compose.inspect(choices, options.cfg, options.info, options.package, options.resolve)
        print(redact_text(text), end="")
    elif options.multirun:
        if own.get("json"):
            raise ConfigError("--json names one file, and -m makes several runs: leave one of them out")
        _sweep(command, own, compose.prepare(options.overrides, multirun=True))
    else:
        _call(command, compose.load(options.overrides), own)


def _call(command: Command, config: Config, own: dict[str, Any]) -> None:
    if command.reads_data and not config.data.sources:
        raise ConfigError(
            "data.sources is empty: choose a recipe that has some (+recipe=quickstart), "
            "or give data: 'data.sources=[{path: my.jsonl}]'"
        )
    _print_result(importlib.import_module(command.module).run(config, **own))


def _print_result(result: Any) -> None:
    """Print the path that merge returns. The results of other commands are not paths."""
    if isinstance(result, Path):
        print(f"The merged model is in {result}")


class _JobError(BaseException):
    """Carries an error that is not a UserError out of Hydra, which would run the other jobs
    first and cut the traceback."""

    def __init__(self, error: Exception):
        self.error = error


def _sweep(command: Command, own: dict[str, Any], choices: list[Choice]) -> None:
    """Call the command for each job of a multirun, each with its own run.dir. A job that fails
    does not stop the others."""
    from fxtune.checkpoint.run_folder import sweep_folder
    from fxtune.config import compose
    from fxtune.system.redact import redact

    swept = {choice.key for choice in choices if choice.sweeps}
    # Not the errors themselves: their tracebacks would keep each failed job's model in memory.
    failures: list[type[UserError]] = []
    count = 0

    def job(cfg: DictConfig, overrides: list[str]) -> None:
        nonlocal count
        count += 1
        try:
            config = compose.typed(cfg)
            title = title_of([text for text in overrides if text.lstrip("+").partition("=")[0] in swept], count)
            parent = Path(os.path.expanduser(config.run.dir)) if config.run.dir else Path("runs") / config.run.name
            as_written = redact(json.loads(json.dumps(asdict(config))))  # as config.yaml of the run's folder has it
            config.run.dir = str(sweep_folder(parent / title, config.run.resume.value, as_written))
            print(f"\nrun {count}: {title} -> {config.run.dir}", file=sys.stderr, flush=True)
            _call(command, config, own)
        except UserError as error:
            show(error)
            failures.append(type(error))
        except Exception as error:
            raise _JobError(error) from error

    try:
        compose.sweep(choices, job)
    except _JobError as carrier:
        raise carrier.error from carrier.error.__cause__
    if failures:
        raise failures[0](f"{len(failures)} of {count} runs failed, for the reasons above")


def title_of(overrides: list[str], number: int) -> str:
    """A job's folder name: what it changes (`optimizer.lr=0.001,train.epochs=2`), in characters and of a length that
    every file system allows."""
    changes = ",".join(text.lstrip("+") for text in overrides) or f"job-{number}"
    title = re.sub(r"[^\w.=,+-]+", "_", changes)
    if title == changes and len(title) <= 120:
        return title
    # The hash keeps apart two titles that are cut to the same text.
    return f"{title[:100]}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def _complete(arguments: list[str]) -> None:
    """Shell completion. Bash gives the line in COMP_LINE. Commands, recipes and groups are
    completed here, keys by Hydra."""
    if not any(text.startswith("query=") for text in arguments):
        from fxtune.config import compose

        compose.complete(arguments)
        return
    program, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    first, space, after = rest.lstrip().partition(" ")
    if not space and re.fullmatch(r"\w*", first):
        offered = [name for name in (*COMMANDS, "+recipe=") if name.startswith(first)]
        if offered:
            print(" ".join(offered))
            return
    rest = after if space and first in COMMANDS else rest
    typed = rest.split(" ")[-1]
    plus, name, equals = re.match(r"(\+*)([^=]*)(=?)", typed).groups()  # type: ignore[union-attr]
    names: dict[str, Collection[str]] = {"recipe": discovery.recipes(), **discovery.groups()}
    if equals and name in names:
        print(" ".join(text for option in names[name] if (text := f"{plus}{name}={option}").startswith(typed)))
    elif plus and not equals:
        print(" ".join(f"{plus}{option}=" for option in names if option.startswith(name)))
    elif not (space and first == "recipes"):
        _complete_keys(program, rest, arguments)


def _complete_keys(program: str, rest: str, arguments: list[str]) -> None:
    from fxtune.config import compose

    try:
        overrides = [text for text in rest.split(" ")[:-1] if "=" in text]
        choices = compose.prepare(overrides, multirun=True, register_all=True)
    except ConfigError:
        choices = compose.prepare([], register_all=True)  # a half-typed line is no error
    os.environ["COMP_LINE"] = " ".join([program, *(choice.text for choice in choices), rest.split(" ")[-1]])
    compose.complete(arguments)


def _versions() -> str:
    found = []
    for name in ("torch", "transformers", "peft", "datasets", "hydra-core"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} is missing")
    return f"fxtune {__version__} (Python {sys.version.split()[0]}, {', '.join(found)})"
