"""The command line: `python -m fxtune [COMMAND] +recipe=NAME key=value ...`, also installed as `fxtune`.

The config is composed and validated once (fxtune/config/compose.py), and the command's `run(config)` is called. Slow
libraries are imported late, so help appears at once, and a mistake is reported before a model or data is read.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import inspect
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from fxtune import __version__, plugins
from fxtune.cli.answer import ANSWER
from fxtune.cli.commands import COMMANDS, HELP, Command, print_result
from fxtune.config import discovery
from fxtune.distributed.failure import conclude, keeps_connections
from fxtune.distributed.ranks import LAUNCHER, act_alone, end_with_launcher, process_rank
from fxtune.errors import ConfigError, Ended, Stopped, StorageError, UserError, did_you_mean
from fxtune.system.machine.host import process_age
from fxtune.system.machine.packages import installed_version
from fxtune.system.process.signals import SIGNALS
from fxtune.system.terminal.library_log import LIBRARY_LOG
from fxtune.system.terminal.redact import redacted_output
from fxtune.system.terminal.startup import STARTUP
from fxtune.system.terminal.streams import open_closed_streams
from fxtune.upstream.tokenizers import panics_as_errors

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def main(argv: list[str] | None = None) -> int:
    """Run one command line (by default this process's own) and return the exit code.

    A rank that failed on a GPU ends inside this call: on its own exit, Python would close connections, and wait for
    other ranks.
    """
    open_closed_streams()
    try:
        return _ended_by_signals(argv)
    except KeyboardInterrupt as stop:  # a signal came while the signal handlers were set or removed
        stop = stop if isinstance(stop, Stopped) else Stopped(signal.SIGINT)
        print(f"\nfxtune: {stop}", file=sys.stderr)
        return stop.exit_code


def _ended_by_signals(argv: list[str] | None) -> int:
    # The handlers stay until all is printed. A second signal ends a process that a stopped terminal blocks.
    with SIGNALS, redacted_output():
        try:
            code = _main(argv)
        except Stopped as stop:  # a signal came before the command began, or while an error was printed
            if process_rank().rank == 0:
                print(f"\nfxtune: {stop}", file=sys.stderr)
            code = stop.exit_code
        except BaseException:
            if not keeps_connections():
                raise
            sys.excepthook(*sys.exc_info())
            code = 1
        with SIGNALS.held():
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # the reader of the stream may be gone
                    stream.flush()
    if keeps_connections():
        os._exit(code)
    if process_rank().size > 1:
        gc.collect()  # frees the process groups of a stopped run: their threads may abort the process
        if argv is None:
            from fxtune.upstream.torch import end_rank

            end_rank(code)
    elif argv is None:  # the process ends now, and would search its million objects for cycles for a second
        gc.freeze()
    return code


def _main(argv: list[str] | None) -> int:
    end_with_launcher()
    if argv is None:  # the process was started for this command
        before, launcher = {"imports": process_age()}, os.environ.get(LAUNCHER)
        if launcher:
            before = {"starting the ranks": max(process_age(launcher) - before["imports"], 0.0), **before}
        STARTUP.begin(before)
    try:
        with LIBRARY_LOG.collecting(), _leaving(), panics_as_errors():
            _run(ANSWER.begin(list(sys.argv[1:] if argv is None else argv)))
        ANSWER.end()
    except Ended as ended:
        ANSWER.end(ended.exit_code)
        return ended.exit_code
    except BaseException as error:
        shown = _told(error)
        if shown is None:
            if process_rank().rank == 0:
                ANSWER.fail(error, 1)
            raise
        tells, code = conclude(shown)
        if tells:
            ANSWER.fail(shown, code)
            _show(shown)
        return code
    finally:
        ANSWER.close()
    return 0


def _told(error: BaseException) -> UserError | Stopped | None:
    """The error to show. None for an error that ends the process with a traceback or with an exit code of its own."""
    if isinstance(error, (UserError, Stopped)):
        return error
    if isinstance(error, KeyboardInterrupt):  # fxtune's signal handlers are not set, as in a thread
        return Stopped(signal.SIGINT, "interrupted. The same command continues from the newest checkpoint.")
    if not isinstance(error, (MemoryError, RuntimeError)):
        return None
    from fxtune.system.process.oom import process_out_of_memory

    return process_out_of_memory(error)


def _show(error: UserError | Stopped) -> None:
    if isinstance(error, Stopped):
        print(f"\nfxtune: {error}", file=sys.stderr)
        return
    from fxtune.system.terminal.console import show_error

    show_error(error)


@contextmanager
def _leaving() -> Iterator[None]:
    """If the body raises in a run of several ranks, ignore signals until this process ends (Signals.ignore())."""
    try:
        yield
    except BaseException:
        if process_rank().size > 1:
            SIGNALS.ignore()
        raise


def _run(argv: list[str]) -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise StorageError("The working directory does not exist any more. Change to one that does.") from error
    name, words = _split_command(argv)
    # `help train` explains the section of keys, and `help --json` without a key writes all keys.
    if name == "help" and (words[0] in COMMANDS.keys() - {"train"} if words else not ANSWER.file):
        name, words = words[0] if words else "train", ["--help"]
    command = COMMANDS[name]
    parser = _parser(command)
    with SIGNALS.interruptible():  # argparse turns an interruption into an argparse error
        options = _parse(parser, words)
    with plugins.files_used(options.plugin or ()):
        _run_parsed(command, parser, options, argv)


def _run_parsed(
    command: Command, parser: argparse.ArgumentParser, options: argparse.Namespace, argv: list[str]
) -> None:
    given = vars(options)
    names = (option.removeprefix("--").replace("-", "_") for option in command.options or ())
    own = {name: given[name] for name in names if name in given}
    if not (command.ranks and own.keys().isdisjoint(command.alone_with)) and not act_alone():
        return
    if process_rank().rank:
        from fxtune.system.terminal.console import console

        console().quiet = True  # rank 0 talks to the user
    named = [text for text in options.overrides if not _is_key(text)]
    if command is COMMANDS["train"] and (late := [text for text in named if text in COMMANDS]):
        raise ConfigError(f"`{late[0]}`: a command is the first word: fxtune {late[0]} ..., then its options.")
    if not argv or (options.help and (argv[0] not in (command.name, "help") or argv == ["help"])):
        commands = "\n".join(f"  {name:<9} {each.summary}" for name, each in COMMANDS.items())
        places = {kind: discovery.place(discovery.shipped(kind)) for kind in ("recipes", "docs")}
        text = HELP.format(version=__version__, commands=commands, **places)
        print("\n\n".join(filter(None, [text, plugins.summary()])))
    elif options.help:
        print(_explained(parser, command), end="")
    elif command.positional_only:
        _call_positional(command, "run", options.overrides, own)
    elif command.positional and named and not (options.cfg or options.info):
        _call_positional(command, command.positional, sorted(options.overrides, key=_is_key), own)
    elif options.version:
        print(_versions())
    elif options.shell_completion:
        _complete(options.overrides)
    else:
        _run_command(command, options, own)


def _is_key(text: str) -> bool:
    """Whether a word sets a recipe, a group or a key, or is a data file: then load() names its key. Other words name a
    run, an adapter or a model."""
    is_file = discovery.names_data(text) and os.path.isfile(text)
    folder = os.path.dirname(text)
    in_folder = "=" in folder and os.path.isdir(folder)  # a sweep makes folders with `=` in their names
    return text.startswith(("+", "~")) or ("=" in text and not in_folder) or is_file


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
    if argv[0] == "serve":
        raise ConfigError("fxtune is no server. `fxtune export RUN --to vllm` (or ollama) gives the command of one.")
    raise ConfigError(f"unknown command `{argv[0]}`{did_you_mean(argv[0], COMMANDS)} `fxtune --help` explains them.")


def _explained(parser: argparse.ArgumentParser, command: Command) -> str:
    """The help of one command: the docstring of its module, and its options. The module is parsed, not imported."""
    spec = importlib.util.find_spec(command.module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    parser.description = ast.get_docstring(ast.parse(source))
    return parser.format_help()


def _call_positional(command: Command, function: str, words: list[str], own: dict[str, Any]) -> None:
    call = getattr(importlib.import_module(command.module), function)
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
        raise ConfigError(f"usage: fxtune {command.name} {names}") from error
    from fxtune.system.terminal import progress

    with (
        progress.shown("none" if command.positional_only or process_rank().rank else "auto"),
        progress.phase("Working", announce=False),
    ):
        result = call(*words, **own)
    print_result(result)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise ConfigError(f"{message}. `{self.prog} --help` lists the options.")


def _parser(command: Command) -> argparse.ArgumentParser:
    """A parser of the command's options, and of Hydra's options except those that read unchecked files
    (--config-dir)."""
    what = "WORD ..." if command.positional_only else "+recipe=NAME key=value ..."
    parser = _Parser(
        prog=f"fxtune {command.name}",
        usage=f"fxtune {command.name} {what} [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--help", "-h", action="store_true", help="this text")
    plugin = "a Python file with row formats, objectives, metrics or techniques (docs/plugins.md); may be repeated"
    parser.add_argument("--plugin", action="append", metavar="FILE.py", help=plugin)
    parser.add_argument("--json", metavar="FILE", help="also write the results or the error to FILE (-: print them)")
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
    from fxtune.system.terminal import progress

    # A recipe may set the display, too, but no recipe is read before the libraries are loaded.
    typed = [text.partition("=")[2] for text in options.overrides if text.startswith("tracking.display=")]
    with progress.shown("none" if options.cfg or options.info or process_rank().rank else (typed or ["auto"])[-1]):
        # The phase is not announced, so that a mistake in the command prints one message and nothing before it.
        with progress.phase("Loading the libraries", announce=False, part="imports"):
            from fxtune.cli.invocation import invoke
        invoke(command, options, own)


def _complete(arguments: list[str]) -> None:
    """Print the shell completion of the line in COMP_LINE. Hydra completes keys; this function completes commands,
    recipes and groups."""
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
        choices = compose.prepare([], register_all=True)  # the line is not complete yet, so it may be wrong
    os.environ["COMP_LINE"] = " ".join([program, *(choice.text for choice in choices), rest.split(" ")[-1]])
    compose.complete(arguments)


def _versions() -> str:
    names = ("torch", "transformers", "peft", "datasets", "hydra-core")
    found = [f"{name} {installed_version(name) or 'is missing'}" for name in names]
    return f"fxtune {__version__} (Python {sys.version.split()[0]}, {', '.join(found)})"
