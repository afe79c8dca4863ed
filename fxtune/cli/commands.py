"""The words of the command line: which file each calls, what may follow it, and the help."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    module: str
    """Whose `run(config)` is called."""
    line: str
    reads_data: bool = False
    plain: str | None = None
    """The module's function for plain words after this one (`fxtune merge ADAPTER FOLDER`), which gets them one by one."""
    plain_only: bool = False
    flags: tuple[str, ...] = ()
    """Options of this word alone, which `run` gets by name: true or false."""
    values: tuple[str, ...] = ()
    """Likewise, those that take a value: its text, or None."""
    told: bool = False
    """`run` also gets `overrides`, the recipes, groups and keys as they were typed: it starts processes with them."""
    alone: bool = False
    """Without a recipe or a key there is nothing to compose: `run(None)`."""


WORDS = {
    "train": Word("fxtune.training.trainer", "train as the recipe says; the word can be left out", reads_data=True),
    "preview": Word("fxtune.cli.preview", "print the first samples as the model will see them", reads_data=True),
    "verify": Word(
        "fxtune.cli.verify",
        "build the model, take a step, and show of each technique that it acted",
        reads_data=True,
        flags=("loss", "each"),
        values=("json",),
    ),
    "bench": Word(
        "fxtune.cli.bench",
        "measure the recipe: speed, memory, energy, money, what each technique is worth",
        reads_data=True,
        flags=("ablate", "profile"),
        values=("steps", "warm_up", "price", "json"),
        told=True,
    ),
    "tune": Word(
        "fxtune.cli.tune",
        "try settings for speed at equal loss, and write the fastest as a recipe",
        reads_data=True,
        flags=("dry_run", "again"),
        values=("axes", "minutes", "steps", "output", "json"),
        told=True,
    ),
    "doctor": Word(
        "fxtune.cli.doctor",
        "what this machine has, and whether it works; a recipe is optional",
        values=("json",),
        alone=True,
    ),
    "eval": Word(
        "fxtune.cli.evaluate", "loss and exact match of a base model, an adapter or a trained model", reads_data=True
    ),
    "merge": Word(
        "fxtune.cli.merge", "fold an adapter into its base, one model; or: merge ADAPTER FOLDER", plain="merge"
    ),
    "sync": Word(
        "fxtune.cli.sync", "send W&B what it does not have of a run: sync RUN_FOLDER", plain="run", plain_only=True
    ),
    "recipes": Word(
        "fxtune.cli.recipes",
        "list the recipes; `recipes copy NAME FILE.yaml` gives one to edit",
        plain="run",
        plain_only=True,
    ),
}

HELP = """\
fxtune {version}: fine-tune Hugging Face language models from short recipes

usage: fxtune [WORD] +recipe=NAME [key=value ...]

words
{words}

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
  --loss, --each      verify: compare loss and gradients with plain transformers; --each: with each technique off in turn
  --ablate            bench: also with each technique off in turn; --steps N, --warm-up N, --price AN_HOUR
  --profile           bench: also where the time of a step goes, kernel by kernel
  --axes A,B          tune: vary only these; --minutes N, --steps N, --output FILE.yaml, --dry-run, --again (ignore the cache)
  --json FILE         verify, doctor, bench, tune: also write what was seen to FILE
  -h, --help          this text
  -V, --version       versions of fxtune and of what it stands on
  completion of recipes, groups and keys in bash:  eval "$(fxtune -sc install=bash)"

exit codes: 0 done, 1 verify or doctor found something wrong (with a traceback: a bug of fxtune),
            2 config, 3 data, 4 hardware, 5 numbers, 6 storage,
            75 told to end (SIGTERM, SIGUSR1), 130 by Ctrl-C: saved, and the same command goes on"""
