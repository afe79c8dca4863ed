"""The contract of a technique: one optimisation or method that a recipe can switch on.

A technique is one dataclass. Its fields are its options, so the recipe's YAML is its constructor. It answers three
questions: can it act here (`check`, before a weight is loaded), how does it act (`configure` on the Hugging Face
config, `apply` on the model), and did it act (`verify`, by observing the built model). A technique that is enabled and
does not act is an error. `resolve` decides every `auto` once, so the other methods read concrete values only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import BooleanNode
from torch import nn

from fxtune.distributed.world import World

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts


AUTO = "auto"


class Switch(str, Enum):
    auto = "auto"
    on = "on"
    off = "off"


@dataclass(frozen=True)
class Evidence:
    """One observation on the built model."""

    technique: str
    asked: str
    """What the recipe asks for."""
    observed: str
    acted: bool
    """Whether the observation shows what was asked for."""
    key: str = ""
    """The technique's option that was observed, such as `liger.rope`; empty: the technique as a whole."""


@dataclass
class Technique:
    enabled: bool = False
    """Whether to use this technique. Its other options have no effect without it."""

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

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        """Change the built model and return it."""
        return model

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Yield observations on the built model. `probe`: keyword arguments of `model` for one small packed row."""
        yield from ()


@dataclass
class OptionalTechnique(Technique):
    """A technique that a recipe may leave to fxtune: `enabled=auto`."""

    enabled: Any = field(default=False, metadata={"kind": bool, "words": (AUTO,)})
    """Whether to use this technique. `auto`: if it can act here; if not, a line says why. With `true` that is an
    error. Its other options have no effect without it."""

    def __post_init__(self) -> None:
        if self.enabled != AUTO:  # as OmegaConf reads a bool: true, "true", 1, yes, on
            self.enabled = BooleanNode().validate_and_convert(self.enabled)

    @property
    def may_stay_off(self) -> bool:
        """Whether `enabled` is `auto` and no other option is set, so that it is no error if this cannot act."""
        default = type(self)()
        names = [entry.name for entry in fields(self)]
        return self.enabled == AUTO and all(getattr(self, name) in (getattr(default, name), AUTO) for name in names)
