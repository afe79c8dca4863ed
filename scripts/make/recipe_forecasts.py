"""Writes the forecasts of memory in the headers of the recipes: each line `#   fxtune plan ...: FORECAST`.

    python scripts/make/recipe_forecasts.py            # rewrite the lines with what the planner says now
    python scripts/make/recipe_forecasts.py --check    # print the lines that differ, and end with 1 if there are some

A line's command is what a user types. It names a shape in place of a model, so it needs neither the hub nor the data.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fxtune.cli.plan import HOST_GIB  # noqa: E402
from fxtune.config import compose  # noqa: E402
from fxtune.estimate.machines import machine  # noqa: E402
from fxtune.system.terminal.units import GIB  # noqa: E402
from fxtune.training.forecast.run_forecast import forecast_run  # noqa: E402

LINE = re.compile(r"^(#   fxtune plan (\+recipe=.*)): .*$", re.MULTILINE)


def forecast(command: str) -> str:
    """What the planner says of the words behind `fxtune plan`: GiB of a card, and of the host's memory."""
    words = shlex.split(command)
    options = {name: words.pop(at + 1) for name in ("--gpu", "--gpus") if name in words for at in [words.index(name)]}
    config = compose.load([word for word in words if not word.startswith("--")])
    gpus = int(options.get("--gpus", 1))
    found = forecast_run(config, machine(options["--gpu"], HOST_GIB, config.run.memory_gib), gpus, None)
    text = f"{found.need.device / GIB:.1f} GiB" + " on each card" * (gpus > 1)
    host = f", {found.need.pinned / GIB:.1f} GiB pinned by each process" if found.need.pinned else ""
    return text + host + ("" if found.fits else ", does not fit")


def updated(text: str) -> str:
    """The text of a recipe with the planner's forecasts of today."""
    return LINE.sub(lambda line: f"{line[1]}: {forecast(line[2])}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given, different = parser.parse_args(), False
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        old = file.read_text()
        new = updated(old)
        if new == old:
            continue
        different = True
        changed = zip(old.splitlines(), new.splitlines(), strict=True)
        print("\n".join(f"{file.name}\n- {before}\n+ {after}" for before, after in changed if before != after))
        if not given.check:
            file.write_text(new)
    sys.exit(int(different and given.check))


if __name__ == "__main__":
    main()
