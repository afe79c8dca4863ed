"""Words in, one call out: `python -m fxtune [WORD] +recipe=NAME key=value ...`, also installed as `fxtune`.

Nothing heavy is imported before it is needed: help and the list of recipes answer at once, and a command line is vetted
before a model or a dataset is touched.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fxtune import __version__
from fxtune.cli.commands import HELP, WORDS, Word
from fxtune.config import discovery
from fxtune.errors import ConfigError, HardwareError, Stopped, StorageError, UserError
from fxtune.system.redact import redact_text, redacted_output
from fxtune.system.signals import SIGNALS

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: list[str] | None = None) -> int:
    """Run one command line (by default this process's own) and return the exit code."""
    try:
        with SIGNALS, redacted_output():
            _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        show(error)
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        return _without_memory(error)
    except Stopped as stop:
        print(f"\nfxtune: {stop}", file=sys.stderr)
        return stop.exit_code
    except KeyboardInterrupt:  # where signals are not ours to answer, as in a thread
        print(
            "\nfxtune: interrupted. A run goes on from its newest checkpoint when the same command is given again.",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:  # `fxtune recipes | head`: nobody reads on, and that is fine
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _without_memory(error: MemoryError | RuntimeError) -> int:
    """The exit code where memory ran out and nobody had advice: in an import, a table, a merge. Raises other errors."""
    from fxtune.system.oom import out_of_memory_reason

    found = out_of_memory_reason(error)
    if found is None:
        raise error
    told = HardwareError(
        f"This process was given no more memory ({found}). Free some, or raise its limit (`ulimit -v`, the "
        "container's, the batch job's)."
    )
    show(told)
    return told.exit_code


def _run(argv: list[str]) -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise StorageError("The working directory is not there any more. Change to one that is.") from error
    bare = not argv
    name, argv = _word(argv)
    word = WORDS[name]
    plain = word.plain_only or (argv and not any(text.startswith(("-", "+")) or "=" in text for text in argv))
    if word.plain and plain and not {"-h", "--help"} & set(argv):
        _plainly(name, word.plain, argv)
        return
    with SIGNALS.interruptible():  # argparse that is broken off ends in an error of its own
        flags, overrides = _parse(argv, word)
    if flags.help or bare:
        words = "\n".join(f"  {name:<9} {word.line}" for name, word in WORDS.items())
        print(HELP.format(version=__version__, words=words, shipped=discovery.place(discovery.shipped("recipes"))))
    elif flags.version:
        print(_versions())
    elif flags.shell_completion:
        _complete(overrides)
    elif word.alone and not (overrides or flags.cfg or flags.info):
        importlib.import_module(word.module).run(None, **_own(word, flags))
    else:
        _hydra(word, flags, overrides)


def _own(word: Word, flags: argparse.Namespace) -> dict[str, Any]:
    """What the word's own options were set to."""
    told = {"overrides": flags.overrides} if word.told else {}
    return {**told, **{name: getattr(flags, name) for name in (*word.flags, *word.values)}}


def _plainly(name: str, function: str, words: list[str]) -> None:
    """Call a word's function for plain words, if they fit it."""
    call = getattr(importlib.import_module(WORDS[name].module), function)
    wanted = inspect.signature(call)
    try:
        wanted.bind(*words)
    except TypeError as error:
        names = " ".join(item.name.upper() for item in wanted.parameters.values() if item.default is item.empty)
        raise ConfigError(f"usage: fxtune {name} {names}") from error
    _say(call(*words))


def _say(result: Any) -> None:
    """Merging returns where it wrote."""
    if isinstance(result, Path):
        print(f"The merged model is in {result}")


def _word(argv: list[str]) -> tuple[str, list[str]]:
    if not argv or argv[0].startswith(("-", "+", "~")) or "=" in argv[0]:
        return "train", argv
    if argv[0] in WORDS:
        return argv[0], argv[1:]
    known = discovery.recipes()
    if argv[0] in known or argv[0].endswith(".yaml"):
        raise ConfigError(f"`{argv[0]}` is a recipe: fxtune +recipe={shlex.join([argv[0]])}")
    raise ConfigError(
        f"fxtune has no word `{argv[0]}`{discovery.did_you_mean(argv[0], WORDS)} `fxtune --help` explains them."
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `fxtune --help` lists the options.")


def _parse(argv: list[str], word: Word) -> tuple[argparse.Namespace, list[str]]:
    """The word's own flags, and Hydra's, less those that would let it read unvetted files (--config-dir and its like)."""
    what = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    bare = [
        i for i, text in enumerate(argv) if text in ("-i", "--info") and (argv[i + 1 : i + 2] or ["-"])[0] not in what
    ]
    argv = ["--info=all" if i in bare else text for i, text in enumerate(argv)]
    parser = _Parser(prog="fxtune", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", "-V", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    for name in (*word.flags, *word.values):
        parser.add_argument(f"--{name.replace('_', '-')}", action="store" if name in word.values else "store_true")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    modes.add_argument("--info", "-i", choices=what)
    modes.add_argument("--multirun", "-m", action="store_true")
    modes.add_argument("--shell-completion", "-sc", action="store_true")
    flags = parser.parse_intermixed_args(argv)
    if (flags.resolve or flags.package) and not flags.cfg:
        raise ConfigError("--resolve and --package say how --cfg prints: add --cfg job")
    return flags, flags.overrides


def _hydra(word: Word, flags: argparse.Namespace, overrides: list[str]) -> None:
    """Vet, compose and check everything, then let Hydra run the jobs (or print what --cfg and --info ask for)."""
    from fxtune.config import compose as config

    choices = config.prepare(overrides, multirun=flags.multirun, everything=bool(flags.info))
    told = [choice.text for choice in choices]
    if flags.multirun:
        if _own(word, flags).get("json"):
            raise ConfigError("--json names one file, and -m makes several runs: leave one of them out")
        config.check_jobs(choices)
        with tempfile.TemporaryDirectory(prefix="fxtune-") as scratch:  # Hydra leaves a multirun.yaml where it sweeps
            job = _Job(word, _own(word, flags), True, frozenset(choice.key for choice in choices if choice.sweeps))
            _call_hydra(job, ["--multirun", *told, f"hydra.sweep.dir='{scratch}'"])
        if job.failures:
            raise job.failures[0](f"{len(job.failures)} of {job.number} runs failed, for the reasons above")
        return
    cfg = config.composed(told)
    if flags.cfg or flags.info:
        wish = [f"--cfg={flags.cfg}"] if flags.cfg else [f"--info={flags.info}"]
        wish += ["--resolve"] * flags.resolve + ([f"--package={flags.package}"] if flags.package else [])
        with redirect_stdout(io.StringIO()) as printed:
            _call_hydra(print, [*wish, *told])
        print(redact_text(printed.getvalue()), end="")
        return
    config.typed(cfg)
    _call_hydra(_Job(word, _own(word, flags)), told)


def _call_hydra(task: Callable[[DictConfig], Any], argv: list[str]) -> None:
    import hydra

    from fxtune.config.compose import ROOT

    def started(cfg: DictConfig) -> None:
        task(cfg)

    started.__module__ = (
        "__main__"  # so Hydra takes it for a script's; a package it would search for configs nobody vetted
    )
    with _arguments(argv):
        try:
            hydra.main(config_path=None, config_name=ROOT, version_base="1.3")(started)()
        except _Ended as ended:
            raise ended.error from ended.error.__cause__  # with its own traceback, which Hydra would cut down


class _Ended(BaseException):
    """Carries an error through Hydra, which would print it its own way and exit with 1."""

    def __init__(self, error: BaseException):
        self.error = error


class _Job:
    """What Hydra calls for each job: the composed config becomes dataclasses and goes to the word's `run`."""

    def __init__(self, word: Word, flags: dict[str, Any], multirun: bool = False, swept: frozenset[str] = frozenset()):
        self.word, self.flags, self.multirun, self.swept = word, flags, multirun, swept
        self.number = 0
        self.failures: list[
            type[UserError]
        ] = []  # not the errors: their tracebacks would keep each failed job's model in memory

    def __call__(self, cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        from fxtune.checkpoint.run_folder import sweep_folder
        from fxtune.config.compose import typed
        from fxtune.system.redact import redact

        self.number += 1
        try:
            config = typed(cfg)
            if self.word.reads_data and not config.data.sources:
                raise ConfigError(
                    "data.sources is empty: choose a recipe that has some (+recipe=quickstart), "
                    "or give data: 'data.sources=[{path: my.jsonl}]'"
                )
            if self.multirun:
                overrides = list(HydraConfig.get().overrides.task)
                title = title_of(
                    [text for text in overrides if text.lstrip("+").partition("=")[0] in self.swept], self.number
                )
                whole = Path(os.path.expanduser(config.run.dir)) if config.run.dir else Path("runs") / config.run.name
                plain = redact(json.loads(json.dumps(asdict(config))))  # as it is written to a run's folder
                config.run.dir = str(sweep_folder(whole / title, config.run.resume.value, plain))
                print(f"\nrun {self.number}: {title} -> {config.run.dir}", file=sys.stderr, flush=True)
            _say(importlib.import_module(self.word.module).run(config, **self.flags))
        except UserError as error:
            if not self.multirun:
                raise _Ended(error) from None
            show(error)  # the other jobs of a sweep go on: one diverging learning rate must not cost the night
            self.failures.append(type(error))
        except Exception as error:  # noqa: BLE001  not handled here: carried through Hydra whole
            raise _Ended(error) from None


def title_of(overrides: list[str], number: int) -> str:
    """A job's folder name: what it changes (`optimizer.lr=0.001,train.epochs=2`), fit for any file system and not too long."""
    wanted = ",".join(text.lstrip("+") for text in overrides) or f"job-{number}"
    title = re.sub(r"[^\w.=,+-]+", "_", wanted)
    if title == wanted and len(title) <= 120:
        return title
    return f"{title[:100]}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"  # two that were cut alike stay apart


def show(error: UserError) -> None:
    """Print an error to stderr: one block, no traceback. Brackets in it are text, not markup, and control characters are shown:
    it may quote a stranger's file."""
    from rich.console import Console
    from rich.text import Text

    from fxtune.system.console import plain

    text = Text.assemble(("fxtune: ", "bold red"), plain(redact_text(str(error))))
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


@contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    """hydra.main reads sys.argv and nothing else."""
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        yield
    finally:
        sys.argv = before


def _complete(overrides: list[str]) -> None:
    """Shell completion. Bash gives the line in COMP_LINE; words, recipes and groups are offered at once, keys by Hydra."""
    if not any(text.startswith("query=") for text in overrides):
        _call_hydra(print, ["--shell-completion", *overrides])
        return
    program, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    first, space, after = rest.lstrip().partition(" ")
    if not space and re.fullmatch(r"\w*", first):
        offered = [name for name in (*WORDS, "+recipe=") if name.startswith(first)]
        if offered:
            print(" ".join(offered))
            return
    rest = after if space and first in WORDS else rest
    typed = rest.split(" ")[-1]
    plus, name, equals = re.match(r"(\+*)([^=]*)(=?)", typed).groups()  # type: ignore[union-attr]
    names: dict[str, Collection[str]] = {"recipe": discovery.recipes(), **discovery.groups()}
    if equals and name in names:
        print(" ".join(text for option in names[name] if (text := f"{plus}{name}={option}").startswith(typed)))
    elif plus and not equals:
        print(" ".join(f"{plus}{option}=" for option in names if option.startswith(name)))
    elif not (space and first == "recipes"):
        _complete_keys(program, rest, overrides)


def _complete_keys(program: str, rest: str, overrides: list[str]) -> None:
    from fxtune.config import compose as config

    try:
        choices = config.prepare(
            [text for text in rest.split(" ")[:-1] if "=" in text], multirun=True, everything=True
        )
    except ConfigError:
        choices = config.prepare([], everything=True)  # a line that is half typed is no error: offer what is there
    os.environ["COMP_LINE"] = " ".join([program, *(choice.text for choice in choices), rest.split(" ")[-1]])
    _call_hydra(print, ["--shell-completion", *overrides])


def _versions() -> str:
    found = []
    for name in ("torch", "transformers", "peft", "datasets", "hydra-core"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} is missing")
    return f"fxtune {__version__} (Python {sys.version.split()[0]}, {', '.join(found)})"
