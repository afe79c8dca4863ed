"""The commands of the command line: the file that each calls, its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    module: str
    """Its `run(config)` is called."""
    summary: str
    reads_data: bool = False
    """A config without data.sources is refused."""
    positional: str | None = None
    """The module's function for arguments that are not keys (`fxtune merge ADAPTER FOLDER`). It
    gets each as an argument."""
    positional_only: bool = False
    """It takes no config."""
    flags: tuple[str, ...] = ()
    """Options of this command, passed to `run` by name: true or false."""
    values: tuple[str, ...] = ()
    """Options with a value, passed to `run` by name: its text, or None."""
    gets_overrides: bool = False
    """`run` also gets `overrides`, the recipes, groups and keys as they were typed, to start processes with them."""
    config_optional: bool = False
    """Without a recipe or key, `run(None)` is called."""


COMMANDS = {
    "train": Command("fxtune.training.trainer", "train the recipe's model; this is the default", reads_data=True),
    "preview": Command("fxtune.cli.preview", "print the first samples as the model will see them", reads_data=True),
    "verify": Command(
        "fxtune.cli.verify",
        "build the model, take a step, and show that each technique acted",
        reads_data=True,
        flags=("loss", "each"),
        values=("json",),
    ),
    "bench": Command(
        "fxtune.cli.bench",
        "measure speed, memory, energy, cost and the gain of each technique",
        reads_data=True,
        flags=("ablate", "profile"),
        values=("steps", "warm_up", "price", "json"),
        gets_overrides=True,
    ),
    "tune": Command(
        "fxtune.cli.tune",
        "search for faster settings with the same loss, and write them as a recipe",
        reads_data=True,
        flags=("dry_run", "again"),
        values=("axes", "minutes", "steps", "output", "json"),
        gets_overrides=True,
    ),
    "doctor": Command(
        "fxtune.cli.doctor",
        "show what this machine has and whether it works; a recipe is optional",
        values=("json",),
        config_optional=True,
    ),
    "eval": Command(
        "fxtune.cli.evaluate", "loss and exact match of a base model, an adapter or a trained model", reads_data=True
    ),
    "merge": Command(
        "fxtune.cli.merge", "merge an adapter into its base model; or: merge ADAPTER FOLDER", positional="merge"
    ),
    "sync": Command(
        "fxtune.cli.sync", "send W&B what it lacks of a run: sync RUN_FOLDER", positional="run", positional_only=True
    ),
    "recipes": Command(
        "fxtune.cli.recipes",
        "list the recipes; `recipes copy NAME FILE.yaml` copies one to edit",
        positional="run",
        positional_only=True,
    ),
}

HELP = """\
fxtune {version}: fine-tune Hugging Face language models from short recipes

usage: fxtune [COMMAND] +recipe=NAME [key=value ...]

commands
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
  {shipped}; +recipe=./mine.yaml is a file of yours.
  Start your own: fxtune recipes copy quickstart recipes/mine.yaml

options
  -m, --multirun      one run for each combination of key=a,b
  -c, --cfg job       print the composed config (--resolve: with ${{...}} filled in, -p KEY: only that part)
  -i, --info [WHAT]   how it was composed (defaults-tree, defaults, config, plugins, ...)
  --loss, --each      verify: compare loss and gradients with plain transformers; --each: also with each technique off
  --ablate            bench: also with each technique off in turn; --steps N, --warm-up N, --price PER_HOUR
  --profile           bench: also the time of each kernel in a step
  --axes A,B          tune: vary only these; --minutes N, --steps N, --output FILE.yaml, --dry-run, --again (no cache)
  --json FILE         verify, doctor, bench, tune: also write the results to FILE
  -h, --help          this text
  -V, --version       versions of fxtune and of the libraries it uses
  completion of recipes, groups and keys in bash:  eval "$(fxtune -sc install=bash)"

exit codes: 0 done, 1 verify or doctor found a problem (with a traceback: a bug of fxtune),
            2 config, 3 data, 4 hardware, 5 numbers, 6 storage,
            75 stopped by SIGTERM or SIGUSR1, 130 by Ctrl-C: progress is saved, and the same command continues"""
