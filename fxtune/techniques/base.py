"""The contract of a technique: one optimisation or method that a recipe can switch on.

A technique is one dataclass over its options (fxtune/facts), so the recipe's YAML is its constructor. It answers three
questions: can it act here (`check`, before a weight is loaded), how does it act (`configure` on the Hugging Face
config, `apply` on the model), and did it act (`verify`, by observing the built model). A technique that is enabled and
does not act is an error. `resolve` decides every `auto` once, so the other methods read concrete values only.
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
"""What is observed of a vision encoder that Decoder.image_probe() has no image for."""


@dataclass(frozen=True)
class Evidence:
    """One observation on the built model."""

    technique: str
    asked: str
    """The request of the recipe."""
    observed: str
    acted: bool
    """Whether the observation shows that the request was met."""
    key: str = ""
    """The technique's option that was observed, such as `liger.rope`; empty: the technique as a whole."""


@dataclass
class Technique(Options):
    def check(self, facts: Facts) -> Iterator[str]:
        """Yield each reason why this cannot run under `facts`: the option's name, a colon, and what to change."""
        yield from ()

    def packages(self, facts: Facts) -> Iterator[str]:
        """Yield the optional packages that this would use under `facts`. They are tried before `auto` is decided."""
        yield from ()

    def resolve(self, facts: Facts) -> str | None:
        """Replace each `auto` by its value under `facts`, in place. Returns the decisions and why, None if there were
        none.

        The pipeline calls this on a copy of the recipe's options, after check(). `facts.techniques` is that copy: the
        techniques before this one are already resolved. An `auto` without a possible value stays.
        """
        return None

    def configure(self, hf_config: Any) -> None:
        """Edit the Hugging Face config in place, before the model exists."""

    def apply(self, model: PreparedModel, world: World) -> None:
        """Change or replace the module of the built model, and fill in the model's fields that this technique owns."""

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Yield observations on the built model. `probe`: keyword arguments of its module for one small packed row.

        The technique of a plugin takes the module alone, in apply() and verify() (from_plugins.py).
        """
        yield from ()
