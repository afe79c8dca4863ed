"""The command line: `python -m fxtune [COMMAND] +recipe=NAME key=value ...`, also installed as `fxtune`.

It is composed and validated once (fxtune/config/compose.py), and the command's `run(config)` is called. Nothing slow
is imported before it is needed: help answers at once, and a mistake is reported before a model or data is touched.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fxtune import __version__, plugins
from fxtune.cli.commands import COMMANDS, HELP, Command
from fxtune.config import discovery
from fxtune.distributed import choice, failure
from fxtune.distributed.failure import conclude, keeps_connections
from fxtune.distributed.ranks import LAUNCHER, act_alone, end_with_launcher, place
from fxtune.errors import ConfigError, Ended, RankError, Stopped, StorageError, UserError, did_you_mean
from fxtune.system.host import process_age
from fxtune.system.library_log import LIBRARY_LOG
from fxtune.system.redact import redact_text, redacted_output
from fxtune.system.signals import SIGNALS
from fxtune.system.startup import STARTUP

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fxtune.config.overrides import Choice
    from fxtune.config.root import Config

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def main(argv: list[str] | None = None) -> int:
    """Run one command line (by default this process's own) and return the exit code.

    A rank that failed on a GPU ends here: Python's own end would wait for other ranks as it closes connections.
    """
    try:
        code = _main(argv)
    except BaseException:
        if not keeps_connections():
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    if keeps_connections():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(code)
    return code


def _main(argv: list[str] | None) -> int:
    end_with_launcher()
    if argv is None:  # the process was started for this command
        before, launcher = {"imports": process_age()}, os.environ.get(LAUNCHER)
        if launcher:
            before = {"starting the ranks": max(process_age(launcher) - before["imports"], 0.0), **before}
        STARTUP.begin(before)
    try:
        with SIGNALS, redacted_output(), LIBRARY_LOG.collecting(), _leaving():
            _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        tells, code = conclude(error)
        if tells:
            show(error)
        return code
    except (MemoryError, RuntimeError) as error:
        return _out_of_memory(error)
    except Ended as ended:
        return ended.exit_code
    except Stopped as stop:
        tells, code = conclude(stop)
        if tells:
            print(f"\nfxtune: {stop}", file=sys.stderr)
        return code
    except KeyboardInterrupt:  # without our signal handlers, as in a thread
        print("\nfxtune: interrupted. The same command continues from the newest checkpoint.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fxtune recipes | head`: the reader has closed the pipe, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def show(error: UserError) -> None:
    """Print an error to stderr. It may quote a stranger's file: no markup is read, control characters are shown."""
    from rich.console import Console
    from rich.text import Text

    from fxtune.system.console import plain

    text = Text.assemble(("fxtune: ", "bold red"), plain(redact_text(str(error))))
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def _out_of_memory(error: MemoryError | RuntimeError) -> int:
    """Report an out-of-memory error that nothing else handles, and return its exit code. Raises other errors."""
    from fxtune.system.oom import process_out_of_memory

    shown = process_out_of_memory(error)
    if shown is None:
        raise error
    tells, code = conclude(shown)
    if tells:
        show(shown)
    return code


@contextmanager
def _leaving() -> Iterator[None]:
    """A rank that ends with an error ignores signals from here on: see Signals.ignore()."""
    try:
        yield
    except BaseException:
        if place()[1] > 1:
            SIGNALS.ignore()
        raise


def _run(argv: list[str]) -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise StorageError("The working directory does not exist any more. Change to one that does.") from error
    name, words = _split_command(argv)
    if name == "help" and (not words or words[0] in COMMANDS.keys() - {"train"}):  # train is also a section of keys
        name, words = words[0] if words else "train", ["--help"]
    command = COMMANDS[name]
    parser = _parser(name, command)
    with SIGNALS.interruptible():  # argparse turns an interruption into an error of its own
        options = _parse(parser, words)
    with plugins.files_used(options.plugin or ()):
        _run_parsed(name, command, parser, options, argv)


def _run_parsed(
    name: str,
    command: Command,
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    argv: list[str],
) -> None:
    given = vars(options)
    own = {name: given[name] for name in (_argument(option) for option in command.options or ()) if name in given}
    if not (command.ranks and own.keys().isdisjoint(command.alone_with)) and not act_alone():
        return
    if place()[0]:
        from fxtune.system.console import console

        console().quiet = True  # rank 0 talks to the user
    named = [text for text in options.overrides if not _is_key(text)]
    if not argv or (options.help and argv[0] not in (name, "help")) or argv == ["help"]:
        print(_help())
    elif options.help:
        print(_explained(parser, command), end="")
    elif command.positional and (command.positional_only or (named and not (options.cfg or options.info))):
        words = options.overrides if command.positional_only else sorted(options.overrides, key=_is_key)
        _call_positional(name, command.positional, words, own)
    elif options.version:
        print(_versions())
    elif options.shell_completion:
        _complete(options.overrides)
    else:
        _run_command(command, options, own)


def _is_key(text: str) -> bool:
    """Whether a word is a recipe, a group or a key, and names no run, adapter or model."""
    return text.startswith(("+", "~")) or ("=" in text and not _in_folder(text))


def _in_folder(text: str) -> bool:
    """Whether a word is a path below a folder with `=` in its name, as a sweep makes them."""
    folder = os.path.dirname(text)
    return "=" in folder and os.path.isdir(folder)


def _split_command(argv: list[str]) -> tuple[str, list[str]]:
    """The name of the command and the arguments after it. `train` may be left out."""
    if not argv or argv[0].startswith(("-", "+", "~")) or "=" in argv[0]:
        return "train", argv
    if argv[0] in COMMANDS:
        return argv[0], argv[1:]
    if argv[0] in discovery.recipes() or argv[0].endswith(discovery.ENDINGS):
        raise ConfigError(f"`{argv[0]}` is a recipe: fxtune +recipe={shlex.join([argv[0]])}")
    if discovery.names_data(argv[0]):
        raise ConfigError(
            f"`{argv[0]}` is a data file: fxtune +recipe=NAME {shlex.join([f'data.sources.0.path={argv[0]}'])} "
            "(`fxtune recipes` lists the names)"
        )
    raise ConfigError(f"unknown command `{argv[0]}`{did_you_mean(argv[0], COMMANDS)} `fxtune --help` explains them.")


def _help() -> str:
    commands = "\n".join(f"  {name:<9} {command.summary}" for name, command in COMMANDS.items())
    text = HELP.format(version=__version__, commands=commands, shipped=discovery.place(discovery.shipped("recipes")))
    return "\n\n".join(filter(None, [text, plugins.summary()]))


def _explained(parser: argparse.ArgumentParser, command: Command) -> str:
    """The help of one command: its `about`, or the docstring of its file, read without an import, and its options."""
    spec = importlib.util.find_spec(command.module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    parser.description = command.about or ast.get_docstring(ast.parse(source))
    return parser.format_help()


def _call_positional(name: str, function: str, words: list[str], own: dict[str, Any]) -> None:
    call = getattr(importlib.import_module(COMMANDS[name].module), function)
    signature = inspect.signature(call)
    try:
        signature.bind(*words, **own)
    except TypeError as error:
        parameters = [item for item in signature.parameters.values() if item.kind is not item.KEYWORD_ONLY]
        names = " ".join(
            f"[{item.name.upper()} ...]"
            if item.kind is item.VAR_POSITIONAL
            else item.name.upper()
            if item.default is item.empty
            else f"[{item.name.upper()}]"
            for item in parameters
        )
        raise ConfigError(f"usage: fxtune {name} {names}") from error
    from fxtune.system import progress

    with (
        progress.shown("none" if COMMANDS[name].positional_only or place()[0] else "auto"),
        progress.phase("Working", announce=False),
    ):
        result = call(*words, **own)
    _print_result(result)


def _argument(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise ConfigError(f"{message}. `{self.prog} --help` lists the options.")


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    """The command's options and those of Hydra that read no unchecked files (so no --config-dir)."""
    what = "WORD ..." if command.positional_only else "+recipe=NAME key=value ..."
    parser = _Parser(
        prog=f"fxtune {name}",
        usage=f"fxtune {name} {what} [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--help", "-h", action="store_true", help="this text")
    plugin = "a Python file with row formats, objectives, metrics or techniques (docs/plugins.md); may be repeated"
    parser.add_argument("--plugin", action="append", metavar="FILE.py", help=plugin)
    for option, settings in (command.options or {}).items():
        parser.add_argument(option, default=argparse.SUPPRESS, **settings)
    shown = argparse.SUPPRESS if command.positional_only else None
    parser.add_argument("--version", "-V", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resolve", action="store_true", help=shown or "--cfg: with ${...} filled in")
    parser.add_argument("--package", "-p", metavar="KEY", help=shown or "--cfg: only this part")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help=shown or "print the config, run nothing")
    modes.add_argument("--info", "-i", choices=_INFO, help=shown or "how the config was composed")
    modes.add_argument("--multirun", "-m", action="store_true", help=shown or "one run for each value of key=a,b")
    modes.add_argument("--shell-completion", "-sc", action="store_true", help=argparse.SUPPRESS)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    argv = [
        "--info=all" if text in ("-i", "--info") and after not in _INFO else text
        for text, after in itertools.pairwise([*argv, ""])
    ]
    options = parser.parse_intermixed_args(argv)
    if (options.resolve or options.package) and not options.cfg:
        raise ConfigError("--resolve and --package say how --cfg prints: add --cfg job")
    return options


def _run_command(command: Command, options: argparse.Namespace, own: dict[str, Any]) -> None:
    """Compose the config. Then call the command with it, print it (--cfg, --info), or run each job of a multirun."""
    if command.space_prefix:
        words = {word: word.startswith(command.space_prefix) for word in options.overrides}
        own["space"] = [word for word, swept in words.items() if swept]
        options.overrides = [word for word, swept in words.items() if not swept]
    if command.gets_overrides:
        own["overrides"] = options.overrides
    if command.config_optional and not (options.overrides or options.cfg or options.info):
        importlib.import_module(command.module).run(None, **own)
        return
    from fxtune.system import progress

    # A recipe may set the display, too, but that is known only when the libraries are there.
    typed = [text.partition("=")[2] for text in options.overrides if text.startswith("tracking.display=")]
    with progress.shown("none" if options.cfg or options.info or place()[0] else (typed or ["auto"])[-1]):
        # Not announced: a mistake in the command is answered first, with one message.
        with progress.phase("Loading the libraries", announce=False, part="imports"):
            from fxtune.config import compose
        _compose_and_call(command, options, own, compose)


def _compose_and_call(command: Command, options: argparse.Namespace, own: dict[str, Any], compose: Any) -> None:
    if options.cfg or options.info:
        choices = compose.prepare(options.overrides, register_all=bool(options.info))
        text = compose.inspect(choices, options.cfg, options.info, options.package, options.resolve)
        print(redact_text(text), end="")
    elif options.multirun:
        if own.get("json"):
            raise ConfigError("--json names one file, and -m makes several runs: leave one of them out")
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
    from fxtune.system import progress

    progress.show("none" if place()[0] else config.tracking.display.value)
    with progress.phase("Loading the libraries", announce=False, part="imports"):
        from fxtune.settle.ranks import ranks_of

    if command.ranks and own.keys().isdisjoint(command.alone_with) and (ranks := ranks_of(config)) > 1:
        from fxtune.distributed.launch import launch

        name = next(name for name, each in COMMANDS.items() if each is command)
        if code := launch(ranks, [name, *overrides, *_words(own)]):
            raise Ended(code)
        return None
    with progress.phase("Loading the libraries", announce=command.module not in sys.modules, part="imports"):
        module = importlib.import_module(command.module)
    with progress.phase("Working", announce=False):  # the parts that have no phase of their own
        result = module.run(config, **own)
    _print_result(result)
    return result


def _words(own: dict[str, Any]) -> Iterator[str]:
    """A command's own options as they are typed."""
    for name, value in own.items():
        if name != "overrides":
            yield f"--{name.replace('_', '-')}"
            yield from [] if value is True else [str(value)]


def _print_result(result: Any) -> None:
    if isinstance(result, Path):
        kind = "adapter" if (result / "adapter_config.json").exists() else "merged model"
        print(f"The {kind} is in {result}")


class _JobError(BaseException):
    """Carries an error that ends a sweep out of Hydra, which would run the other jobs first and cut the traceback."""

    def __init__(self, error: Exception):
        self.error = error


def _sweep(command: Command, own: dict[str, Any], choices: list[Choice]) -> None:
    """Call the command for each job of a multirun, each with its own run.dir. One that fails stops no other."""
    from fxtune.checkpoint.run_folder import RESULT, sweep_folder
    from fxtune.cli.sweep_results import SweepRun, show_results
    from fxtune.config import compose
    from fxtune.config.root import completed
    from fxtune.system.atomic_files import read_json
    from fxtune.system.redact import redact

    swept = {choice.key for choice in choices if choice.sweeps}
    # Not the errors themselves: their tracebacks would keep each failed job's model in memory.
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
            as_written = redact(json.loads(json.dumps(asdict(config))))  # as config.yaml of the run's folder has it
            root, resume = parent / title, config.run.resume.value
            folder = choice.of_rank_0(lambda: str(sweep_folder(root, resume, as_written, completed)))
            run.folder = config.run.dir = folder
            if place()[0] == 0:
                print(f"\nrun {len(runs)}: {title} -> {config.run.dir}", file=sys.stderr, flush=True)
            result = _call(command, config, own, [*overrides, compose.path_override("run.dir", config.run.dir)])
            if result is None and (Path(run.folder) / RESULT).exists():  # several ranks trained it
                result = read_json(Path(run.folder) / RESULT)
            run.figures = result if isinstance(result, dict) else {}
        except UserError as error:
            if keeps_connections():  # this rank can join no other run
                raise _JobError(error) from error
            if conclude(error)[0]:
                show(error)
            failures.append(type(error))
            run.error = redact_text(str(error))
        except Ended:
            failures.append(RankError)
            run.error = "a rank failed, for the reason above"
        except Exception as error:
            raise _JobError(error) from error

    try:
        compose.sweep(choices, job)
    except _JobError as carrier:
        raise carrier.error from carrier.error.__cause__
    if command is COMMANDS["train"] and any(run.figures for run in runs) and place()[0] == 0:
        show_results(runs, parent)
    failure.leave_run()
    if failures:
        raise failures[0](f"{len(failures)} of {len(runs)} runs failed, for the reasons above")


def title_of(overrides: list[str], number: int) -> str:
    """A job's folder name: what it changes (`optimizer.lr=0.001,train.epochs=2`), as every file system allows it."""
    changes = ",".join(text.lstrip("+") for text in overrides) or f"job-{number}"
    title = re.sub(r"[^\w.=,+-]+", "_", changes)
    if title == changes and len(title) <= 120:
        return title
    # The hash keeps apart two titles that are cut to the same text.
    return f"{title[:100]}-{hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def _complete(arguments: list[str]) -> None:
    """Shell completion of the line in COMP_LINE: commands, recipes and groups here, keys by Hydra."""
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
