"""The contract of a technique: one optimisation or method that a recipe can switch on.

A technique is a dataclass that inherits its options (fxtune/facts), so a recipe's YAML sets its fields. It answers
three questions. `check` says whether it can act here, before a weight is loaded. `configure` and `apply` say how it
acts: they change the Hugging Face config and the model. `verify` observes on the built model whether it did act. A
technique that is enabled and does not act is an error. `resolve` decides every `auto` once, so later methods read
concrete values only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fxtune.distributed.world import World
from fxtune.facts.options import Options
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel

NO_IMAGE = "no image was tried: the vision encoder does not run on a small one"
"""The observation on a vision encoder for which no small probe image exists."""


@dataclass(frozen=True)
class Evidence:
    """One observation on the built model."""

    technique: str
    asked: str
    """What the recipe requests."""
    observed: str
    acted: bool
    """Whether the observation shows that the request was met."""
    key: str = ""
    """The technique and its option that was observed, such as `liger.rope`; empty: the technique as a whole."""
    lasting: bool = True
    """Whether later starts may take it from a cache."""


@dataclass
class Technique(Options):
    def check(self, facts: Facts) -> Iterator[str]:
        """Yield each reason why this technique cannot run under `facts`, as "OPTION: WHY. WHAT TO CHANGE."."""
        yield from ()

    def packages(self, facts: Facts) -> Iterator[str]:
        """Yield the optional packages that this technique would use under `facts`. fxtune tries them before it decides
        any `auto`."""
        yield from ()

    def resolve(self, facts: Facts) -> str | None:
        """Replace each `auto` by its value under `facts`, in place. Returns a text with the decisions and their
        reasons, or None if nothing was decided.

        The pipeline calls this on a copy of the recipe's options, after check(). `facts.techniques` is the same copy,
        in which earlier techniques are already resolved. An `auto` without a possible value stays `auto`.
        """
        return None

    def configure(self, hf_config: Any) -> None:
        """Edit the Hugging Face config in place, before the model exists."""

    def apply(self, model: PreparedModel, world: World) -> None:
        """Change or replace the module of the built model, and fill in the model's fields that this technique owns."""

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Yield observations on the built model. `probe`: keyword arguments of its module for one small packed row.

        In a plugin's technique, apply() and verify() get the module in place of `model` (from_plugins.py).
        """
        yield from ()
