"""The commands of the command line: the module and the options of each command, and the help text."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fxtune.cli.answer import ANSWER


@dataclass(frozen=True)
class Command:
    summary: str
    reads_data: bool = False
    """A config without data.sources is refused."""
    positional: str | None = None
    """The module's function that is called instead of `run` if there are words that are no keys
    (`fxtune merge ADAPTER FOLDER`). Each word is an argument."""
    positional_only: bool = False
    """The command takes no config: each word is an argument of `run`."""
    options: dict[str, dict[str, Any]] | None = None
    """The command's own options, as argparse takes them. `run` gets the options that were given, by name."""
    gets_overrides: bool = False
    """`run` also gets `overrides`: the recipes, groups and keys as typed, to start processes with them."""
    space_prefix: str = ""
    """Words with this prefix are no keys. `run` gets them as `space`."""
    config_optional: bool = False
    """Without a recipe or key, `run(None)` is called."""
    ranks: bool = False
    """The command works on all ranks of `run.gpus`. Others run in one process, even if torchrun starts several."""
    alone_with: tuple[str, ...] = ()
    """Options with which the command runs in one process. It then starts the processes of the ranks itself."""
    name: str = ""
    file: str = ""
    """The file of the command in fxtune/cli, if it is not called NAME.py."""

    @property
    def module(self) -> str:
        """The module whose function `run(config)` is called. The module's docstring is the command's help."""
        return f"fxtune.cli.{self.file or self.name}"


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of an option's value, for argparse's `type`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text}: give a whole number, {least} or more")
        return int(text)

    return parse


def positive_number(what: str) -> Callable[[str], float]:
    """A parser of numbers above 0. `what`: the meaning of the number, for the error message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ArgumentTypeError(f"{text}: give {what}, a number above 0")
        return value

    return parse


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _value(metavar: str, text: str, kind: Callable[[str], Any] = str) -> dict[str, Any]:
    return {"metavar": metavar, "type": kind, "help": text}


def _words(text: str) -> list[str]:
    return [word.strip().lower() for word in text.split(",") if word.strip()]


def _number(metavar: str, text: str, what: str) -> dict[str, Any]:
    return _value(metavar, text, positive_number(what))


_TRUST = {"--trust-remote-code": _flag("run the Python code that comes with the model")}

_TABLE = {
    "train": Command("train the recipe's model; this is the default", reads_data=True, ranks=True),
    "finish": Command(
        "end a run early, with a finished model: finish RUN", positional_only=True, ranks=True, options=_TRUST
    ),
    "refresh": Command(
        "test a run on new rows, and if it is worse there, train it further: refresh RUN data.sources=[...]",
        positional_only=True,
        options={"--force": _flag("train although the new rows show no drift"), **_TRUST},
    ),
    "plan": Command(
        "memory, time, cost and disk of a run by arithmetic, for any card, without a GPU",
        reads_data=True,
        options={
            "--gpu": _value("NAME", "the card (H200, L4, ...), or cpu; without it: every known card"),
            "--gpus": _value("N", "how many of them (1)", whole_number(1)),
            "--price": _number(
                "PER_HOUR", "also the cost, if one GPU costs so much per hour", "what one GPU costs per hour"
            ),
            "--tokens": _number("N", "the tokens of an epoch, for data that is not here", "the tokens of an epoch"),
            "--host-gib": _number("N", "host memory for each GPU (128)", "host memory for each GPU in GiB"),
        },
    ),
    "preview": Command(
        "print the first samples as the model will see them; or a run's newest rollouts: preview RUN",
        reads_data=True,
        positional="of_run",
        options={"--html": _value("FILE", "also write the page to FILE, in colour", Path)},
    ),
    "verify": Command(
        "build the model, take a step, and show that each technique acted; or: is RUN still what was proven",
        reads_data=True,
        positional="saved",
        options={
            "--loss": _flag("compare loss and gradients with plain transformers"),
            "--each": _flag("the same, also with each technique off in turn"),
            "--canary": _flag("of rollouts: reward long answers in a few steps; do answers grow longer?"),
        },
        ranks=True,
    ),
    "bench": Command(
        "measure speed, memory, energy, cost and the gain of each technique",
        reads_data=True,
        options={
            "--ablate": _flag("also with each technique off in turn"),
            "--profile": _flag("also the time of each kernel in a step"),
            "--steps": _value("N", "measured steps", whole_number(1)),
            "--warm-up": _value("N", "steps before them", whole_number(1)),
            "--price": _number("PER_HOUR", "also the cost of a million tokens", "what this machine costs per hour"),
        },
        gets_overrides=True,
        ranks=True,
        alone_with=("ablate",),
    ),
    "tune": Command(
        "search for faster settings with the same loss, and write them as a recipe",
        reads_data=True,
        options={
            "--axes": _value("A,B", "vary only these"),
            "--minutes": _value("N", "how long to search", positive_number("the minutes of the search")),
            "--steps": _value("N", "measured steps of a trial", whole_number(1)),
            "--output": _value("FILE.yaml", "where the recipe goes"),
            "--dry-run": _flag("list what would be tried, and run nothing"),
            "--again": _flag("measure anew, and do not read the cache"),
        },
        gets_overrides=True,
    ),
    "lr": Command(
        "test learning rates in a short run, and suggest one",
        reads_data=True,
        options={
            "--steps": _value("N", "steps of the test", whole_number(20)),
            "--lowest": _value("LR", "the rate of the first step", positive_number("the rate of the first step")),
            "--highest": _value("LR", "the rate of the last step", positive_number("the rate of the last step")),
            "--plot": _value("FILE.svg", "draw the curve", Path),
        },
        ranks=True,
    ),
    "sweep": Command(
        "search for good hyper-parameters and stop the losers early: sweep ... sweep.KEY=VALUES",
        reads_data=True,
        options={
            "--trials": _value("N", "configurations (8)", whole_number(2)),
            "--method": {
                "choices": ["halving", "hyperband", "median", "none"],
                "help": "how the losers are found (halving)",
            },
            "--workers": _value("N", "runs at a time (all GPUs, or 1)", whole_number(1)),
            "--output": _value("FILE.yaml", "where the recipe goes"),
            "--max-kl": _number(
                "NATS",
                "how far the winner may have moved from its base (KL a token of general text)",
                "the largest KL",
            ),
        },
        gets_overrides=True,
        space_prefix="sweep.",
    ),
    "doctor": Command(
        "show what this machine has and whether it works (a recipe is optional); or how it differs from RUN's",
        positional="of_run",
        config_optional=True,
    ),
    "eval": Command(
        "loss, exact match and benchmarks of a recipe's model; or of what a run has trained: eval RUN [key=value ...]",
        file="evaluate",
        reads_data=True,
        positional="of_output",
        options={
            "--tasks": _value("NAME,NAME", "also these benchmarks of lm-eval (eval.tasks)"),
            "--url": _value("URL", "measure the benchmarks of RUN by this vLLM server"),
            **_TRUST,
        },
        ranks=True,
    ),
    "merge": Command(
        "merge an adapter into its base model: merge RUN [FOLDER]",
        positional="of_output",
        options={"--unmerged": _flag("of a checkpoint: write its adapter alone"), **_TRUST},
    ),
    "export": Command(
        "what a run has trained, for a server: export RUN --to vllm [FOLDER]",
        positional_only=True,
        options={
            "--to": _value("TARGET", "vllm, gguf, ollama, or model: a folder for transformers"),
            "--quantize": _value("TYPE,TYPE", "types of the GGUF files (f16): q8_0, q4_k_m, ...", _words),
            "--merged": _flag("vLLM: merge an adapter that vLLM could serve beside its base"),
            "--unmerged": _flag("GGUF: the base and the adapter as two files"),
            "--url": _value("URL", "prove it by this vLLM, which serves it already"),
            "--venv": _value("FOLDER", "prove it by the vLLM of this virtual environment"),
            "--llama-cpp": _value("FOLDER", "llama.cpp's source, built in FOLDER/build (LLAMA_CPP, PATH)"),
            **_TRUST,
        },
    ),
    "chat": Command(
        "talk to the model that a run has trained: chat RUN, or RUN/step-70",
        positional_only=True,
        options={
            "--show": {"choices": ["tuned", "base", "both"], "help": "who answers (tuned)"},
            "--system": _value("TEXT", "the system turn of each conversation (the recipe's data.system)"),
            "--max-new-tokens": _value("N", "the longest answer (512)", whole_number(1)),
            "--temperature": _number(
                "T",
                "draw tokens at random instead of the most likely tokens",
                "the temperature at which tokens are drawn",
            ),
            **_TRUST,
        },
    ),
    "push": Command(
        "upload a run's adapter or model to the hub: push RUN org/name",
        positional_only=True,
        options={
            "--merged": _flag("the base with the adapter in its weights, as one model"),
            "--public": _flag("a new repository is for everyone to see, and not private"),
            "--trust-remote-code": _flag("run the Python code that comes with the base"),
        },
    ),
    "diff": Command("how two runs differ, and from which step on: diff RUN RUN", positional_only=True),
    "report": Command(
        "a page about a run, or several side by side: report RUN [RUN ...]",
        positional_only=True,
        options={
            "--output": _value(
                "FILE.html",
                "where it goes (report.html in the run's folder; of several, beside the first run's)",
                Path,
            )
        },
    ),
    "why": Command("where the time of a run went, and what to change: why RUN", positional_only=True),
    "sync": Command("send W&B the missing steps of a run: sync RUN", positional_only=True),
    "recipes": Command("list the recipes; `recipes copy NAME FILE.yaml` copies one to edit", positional_only=True),
    "new": Command(
        "a recipe for your rows, with a reason on each line: new NAME --data FILE [key=value ...]",
        positional_only=True,
        options={
            "--data": _value("PATH", "a file, a folder or a hub id of rows"),
            "--model": _value("ID", "the model (the largest proposed one that fits the card)"),
            "--gpu": _value("NAME", "the card (this machine's)"),
            "--columns": _value("COLUMN=NAME,...", "columns with other names than fxtune reads"),
        },
    ),
    "import": Command(
        "a recipe from a config of Axolotl, LLaMA-Factory, ms-swift, TRL or OpenAI: import FILE [NAME]",
        file="import_config",
        positional_only=True,
        options={
            "--tool": {"choices": ["axolotl", "llamafactory", "swift", "trl", "openai"], "help": "whose config it is"},
            "--method": {"choices": ["sft", "dpo", "kto", "reward", "orpo"], "help": "of TRL: trl METHOD (sft)"},
            "--model": _value("ID", "train this model instead"),
            "--data": _value("PATH", "train on these rows instead"),
            "--gpus": _value("N", "on how many cards the config ran (1)", whole_number(1)),
            "--without": _value("KEY,KEY", "leave out keys that fxtune cannot do"),
        },
    ),
    "schema": Command("the JSON Schema of recipes, for editors and programs", positional_only=True),
    "help": Command("explain a key: its type, range, default, meaning and where it acts", positional_only=True),
}
COMMANDS = {name: replace(command, name=name) for name, command in _TABLE.items()}

HELP = """\
fxtune {version}: fine-tune Hugging Face language models from short recipes

usage: fxtune [COMMAND] +recipe=NAME [key=value ...]

commands (each has its own help: fxtune COMMAND --help)
{commands}

examples
  fxtune +recipe=quickstart                            a tiny model learns a task, on a CPU, in half a minute
  fxtune preview +recipe=quickstart                    look at the samples first
  fxtune verify +recipe=quickstart --loss              is every technique on, is the loss right?
  fxtune +recipe=quickstart optimizer.lr=1e-3          change any key of the recipe
  fxtune -m +recipe=quickstart optimizer.lr=1e-3,5e-3  one run for each value, each in its own folder
  fxtune +recipe=quickstart --cfg job                  print the whole config and train nothing

recipes
  +recipe=NAME is recipes/NAME.yaml of this folder, else the one that ships in
  {recipes}; +recipe=./mine.yaml is a file of yours.
  Start your own: fxtune recipes copy quickstart recipes/mine.yaml
  A page that a message names, such as docs/data.md, is in {docs}.

options
  -m, --multirun      one run for each combination of key=a,b
  -c, --cfg job       print the composed config (--resolve: with ${{...}} filled in, -p KEY: only that part)
  -i, --info [WHAT]   how it was composed (defaults-tree, defaults, config, plugins, ...)
  --plugin FILE.py    load row formats, objectives, metrics or techniques of yours (docs/plugins.md)
  -h, --help          this text; after a command, its own
  -V, --version       versions of fxtune and of the libraries it uses
  completion of recipes, groups and keys in bash:  eval "$(fxtune -sc install=bash)"

exit codes: 0 done, 1 verify or doctor found a problem (with a traceback: a bug of fxtune),
            2 config, 3 data, 4 hardware, 5 numbers, 6 storage, 7 another rank died,
            10 refresh found no drift, 11 rejected what it trained, 12 found another model promoted since,
            75 SIGTERM, SIGUSR1 or SIGHUP, 130 Ctrl-C: progress is saved, and the same command continues"""


def print_result(result: Any) -> None:
    """Print where a command has written a model, if its result is a folder."""
    if isinstance(result, Path):
        kind = "adapter" if (result / "adapter_config.json").exists() else "merged model"
        ANSWER.put({"folder": str(result), "kind": kind})
        print(f"The {kind} is in {result}")
