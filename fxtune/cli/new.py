"""`fxtune new`: a recipe for your rows, with a reason on each line.

    fxtune new support --data chats.jsonl                  # for this machine
    fxtune new support --data chats.jsonl --gpu H100       # for another card
    fxtune new support --data rows/ --model org/model      # your model

It reads the rows and says what they are: chats, texts, pairs of answers, judged answers, rows with images. The row
length, the batch and the techniques follow from their lengths and from the card's memory. Nothing is asked; each guess
is a line of recipes/NAME.yaml.
"""

from __future__ import annotations

from typing import Optional

from fxtune.config import discovery
from fxtune.distributed.world import Device, World
from fxtune.drafts import draft
from fxtune.drafts.rows import read_rows
from fxtune.errors import ConfigError
from fxtune.system.console import say
from fxtune.techniques.estimate.machines import card_name, machine

HOST_GIB = 128.0


def run(*words: str, data: Optional[str] = None, model: Optional[str] = None, gpu: Optional[str] = None) -> None:
    """Write the recipe. Raises ConfigError, and the errors of reading the rows and the model."""
    if len(words) != 1 or data is None:
        raise ConfigError("fxtune new NAME --data FILE: name the recipe and the rows.")
    (name,) = words
    if not discovery.is_name(name):
        raise ConfigError(f"{name}: a recipe's name has {discovery.NAME_CHARACTERS}.")
    rows = read_rows(data)
    say(f"{data}: {rows.count:,} rows of {rows.format.name}{', with images' if rows.has_images else ''}")
    card = machine(card_name(gpu), HOST_GIB) if gpu else World.create(Device.auto).facts()
    found = draft.draft(name, rows, model, card)
    given = "".join(f" --{key} {value}" for key, value in (("data", data), ("model", model), ("gpu", gpu)) if value)
    draft.write(found, name, rows, f"fxtune new {name}{given}")
    say(f"{discovery.LOCAL / name}.yaml is written. Next:")
    for word in ("preview ", "verify ", ""):
        say(f"  fxtune {word}+recipe={name}")
