"""Options that step aside: nobody demanded them, and on the built model they turn out not to act.

An option is a wish if the recipe leaves it to fxtune: it is `auto`, or its whole technique has `enabled=auto` and no
other option set (so the bundle `fast` is made of wishes). Anything else is a demand, and is refused.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from fxtune.facts.options import AutoOptions, Options
from fxtune.techniques.pipeline import Pipeline


def wish(asked: Pipeline, key: str) -> str | None:
    """The part of `key` that can be switched off without a demand of `asked`, a recipe's techniques before any `auto`
    is decided; None: all of it is demanded.

    `key`: a technique, or a technique and its option, such as `compile` or `liger.rope`.
    """
    name, _, option = key.partition(".")
    technique: Any = getattr(asked, name, None)
    if option and isinstance(technique, Options) and technique.is_auto(option):
        return key
    return name if isinstance(technique, AutoOptions) and technique.may_stay_off else None


def without(chosen: Pipeline, key: str) -> Pipeline:
    """A copy of `chosen`, techniques with every `auto` decided, in which `key` is off."""
    name, _, option = key.partition(".")
    technique = copy.copy(getattr(chosen, name))
    if option:
        technique.switch_off(option)
    else:
        technique.enabled = False
    return replace(chosen, **{name: technique})


def line(key: str, why: str) -> str:
    """The line that the user reads."""
    name, _, option = key.partition(".")
    return f"{name}: {option} off, because {why}" if option else f"{name}: off, because {why}"
