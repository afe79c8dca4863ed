"""The tokens at which generation stops: those in a model's generation config and those that training adds.

A whole model's generation_config.json has all end tokens. PEFT's layout has no place for a generation config. So if
training has added an end token, generation_config.json is written beside the adapter. Merging and the model card's
code read that file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxtune.errors import readable
from fxtune.models.prepared import PreparedModel
from fxtune.system.files.atomic_files import read_json

GENERATION_CONFIG = "generation_config.json"


def end_tokens(generation: Any) -> list[int]:
    """The token ids at which a generation config stops."""
    ends = generation.eos_token_id
    return list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [int(ends)]


def add_end_tokens(model: PreparedModel, ends: Iterable[int]) -> list[int]:
    """Make generation by `model` also stop at `ends`. Returns the new ids, and appends them to `model.added_ends`."""
    generation = getattr(model.module, "generation_config", None)
    if generation is None:
        return []
    present = end_tokens(generation)
    new = [end for end in dict.fromkeys(ends) if end not in present]
    if new:
        generation.eos_token_id = [*present, *new]
        model.added_ends += new
    return new


def read_end_tokens(folder: Path) -> list[int]:
    """The end tokens of the generation config beside an adapter; empty without such a file. Raises StorageError if the
    file cannot be read."""
    file = folder / GENERATION_CONFIG
    if not file.exists():
        return []
    remedy = "This file names the tokens that end an answer: use a complete copy of the adapter."
    with readable(f"{file} cannot be used", remedy):
        value = read_json(file).get("eos_token_id")
        ends = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise ValueError(f"eos_token_id is {str(value)[:80]}")
    return ends
