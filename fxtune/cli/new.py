"""`fxtune new`: a recipe for your rows, with a reason on each line.

    fxtune new support --data chats.jsonl                  # for this machine
    fxtune new support --data chats.jsonl --gpu H100       # for another card
    fxtune new support --data rows/ --model org/model      # your model
    fxtune new support --data odd.csv --columns Frage=instruction,Antwort=output    # columns with other names
    fxtune new support --data odd.csv data.on_bad_row=quarantine 'data.sources.0.unused=[note]'   # any key of a recipe

The command reads the rows and says what they are: chats, texts, pairs of answers, judged answers, rows with images.
The lengths of the rows and the card's memory decide sequence length, batch and techniques. The command asks nothing.
Each guess is a line of recipes/NAME.yaml. Keys in the command stand in the recipe, and nothing is guessed for them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Optional

from fxtune.cli.answer import ANSWER
from fxtune.config import discovery
from fxtune.distributed.world import Device, World
from fxtune.drafts import draft
from fxtune.drafts.rows import read_rows
from fxtune.errors import ConfigError
from fxtune.estimate.machines import card_name, machine
from fxtune.system.terminal.console import say
from fxtune.system.terminal.units import counted

HOST_GIB = 128.0


def run(
    *words: str,
    data: Optional[str] = None,
    model: Optional[str] = None,
    gpu: Optional[str] = None,
    columns: Optional[str] = None,
) -> None:
    """Write the recipe. Raises ConfigError, and the errors of reading the rows and the model."""
    overrides, names = [word for word in words if "=" in word], [word for word in words if "=" not in word]
    if len(names) != 1 or data is None:
        raise ConfigError("fxtune new NAME --data FILE [key=value ...]: name the recipe and the rows.")
    (name,) = names
    if not discovery.is_name(name):
        raise ConfigError(f"{name}: a recipe's name has {discovery.NAME_CHARACTERS}.")
    pairs = [pair.partition("=") for pair in (columns or "").split(",") if pair]
    if wrong := [old for old, equals, new in pairs if not (old and equals and new)]:
        raise ConfigError(f"--columns {wrong[0]}: write COLUMN=NAME, as in --columns Frage=instruction,Antwort=output")
    draft.require_new(name)
    source = {"path": data, "columns": {old: new for old, _, new in pairs}}
    found, config = draft.given(source, model, overrides)
    rows = read_rows(config, found.keys.get("objective", ""))
    of = f"rows of {rows.format.name}{', with images' if rows.has_images else ''}"
    say(f"{data}: {counted(rows.count, of)}")
    card = machine(card_name(gpu), HOST_GIB) if gpu else World.create(Device.auto).facts()
    rows, table = draft.draft(found, name, rows, config.model, card)
    if rows.source.columns:
        say(f"The recipe has {found.reasons['data.sources']}.")
    say(*(f"{data}: {note}." for note in found.notes))
    options = {"data": data, "model": model, "gpu": gpu, "columns": columns}
    given = [word for key, value in options.items() if value for word in (f"--{key}", value)]
    draft.write(found, name, rows, table, shlex.join(["fxtune", "new", name, *given, *overrides]))
    written(name, ("preview ", "verify ", ""), {"rows": rows.count, "format": rows.format.name, **vars(found)})


def written(name: str, words: Sequence[str], found: dict[str, Any]) -> None:
    """Print that the recipe is written, and the next commands. `found`: more fields for --json."""
    path, following = f"{discovery.LOCAL / name}.yaml", [f"fxtune {word}+recipe={name}" for word in words]
    ANSWER.put({"path": path, **found, "next": following})
    say("\n  ".join([f"{path} is written. Next:", *following]))
