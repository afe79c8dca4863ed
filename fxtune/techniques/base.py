"""The contract of a technique: one optimisation or method that a recipe can ask for.

A technique is one file and one dataclass. Its fields are its options, so the recipe's YAML is its constructor. It answers
three questions: can this act here (`check`, before a weight is loaded), how is it done (`configure` on the Hugging Face
config, `apply` on the model), and did it act (`verify`, by observation of the built model). Asked for and not done is an
error, never a print. An option's `auto` is decided once, by `resolve`, so that the other four read concrete values only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fxtune.distributed.world import World
    from fxtune.system.facts import Facts


@dataclass(frozen=True)
class Evidence:
    """One observation: what was asked for, what was seen on the built model, and whether the two agree."""

    technique: str
    asked: str
    observed: str
    acted: bool


@dataclass
class Technique:
    enabled: bool = False
    """Whether this technique is asked for. Everything else here is read only when it is."""

    def check(self, facts: Facts) -> Iterator[str]:
        """Yield each reason why this cannot run under `facts`: the option's name, a colon, and what to change.

        Nothing yielded: it can.
        """
        yield from ()

    def resolve(self, facts: Facts) -> str | None:
        """Replace each `auto` by what it means under `facts`, in place. Returns what was chosen and why; None: nothing was.

        Called on a copy of what the recipe asks for, after check() and before configure(). Where nothing can be chosen, an
        `auto` stays, and check() says why.
        """
        return None

    def configure(self, hf_config: Any) -> None:
        """Edit the Hugging Face config in place, before the model exists."""

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        """Change the built model and return it."""
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Yield what can be observed on the built model. `probe`: keyword arguments of `model` for one small packed row."""
        yield from ()
