"""Switches off options that nobody demanded and that turn out not to act on the built model.

An option is a wish if the recipe leaves it to fxtune: it is `auto`, or its technique has `enabled=auto` and no other
option set. The bundle `fast` consists of wishes. Any other option is a demand: if it does not act, the run is refused.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from fxtune.facts.options import AutoOptions, Options
from fxtune.techniques.base import Evidence
from fxtune.techniques.pipeline import Pipeline


def wish(asked: Pipeline, key: str) -> str | None:
    """The part of `key` that nobody demanded, as a key that can be switched off; None if all of `key` is demanded.

    `asked`: the recipe's techniques before any `auto` is decided. `key`: a technique, or a technique and its option,
    such as `compile` or `liger.rope`.
    """
    name, _, option = key.partition(".")
    technique: Any = getattr(asked, name, None)
    if option and isinstance(technique, Options) and technique.is_auto(option):
        return key
    return name if isinstance(technique, AutoOptions) and technique.may_stay_off else None


@dataclass(frozen=True)
class Withdrawal:
    key: str
    """A technique, or a technique and its option."""
    why: str

    @classmethod
    def of_idle(cls, asked: Pipeline, seen: list[Evidence]) -> Withdrawal | None:
        """The withdrawal of the first wish of `asked` that did not act; None if all wishes acted."""
        for evidence in seen:
            key = None if evidence.acted else wish(asked, evidence.key or evidence.technique)
            if key is not None:
                return cls(key, f"asked for {evidence.asked}; seen: {evidence.observed}")
        return None

    def applied_to(self, chosen: Pipeline) -> Pipeline:
        """A copy of `chosen` in which `key` is off. In `chosen` every `auto` is decided."""
        name, _, option = self.key.partition(".")
        technique = copy.copy(getattr(chosen, name))
        if option:
            technique.switch_off(option)
        else:
            technique.enabled = False
        return replace(chosen, **{name: technique})

    def line(self) -> str:
        name, _, option = self.key.partition(".")
        return f"{name}: {option} off, because {self.why}" if option else f"{name}: off, because {self.why}"

    def evidence(self) -> Evidence:
        name = self.key.partition(".")[0]
        return Evidence(name, f"{self.key} where it can act", f"off, because {self.why}", True, self.key)
