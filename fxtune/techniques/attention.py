"""Which attention kernel runs, and the proof that packed documents do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fxtune.technique import Technique


class Backend(str, Enum):
    auto = "auto"
    sdpa = "sdpa"
    eager = "eager"


@dataclass
class Attention(Technique):
    enabled: bool = True
    backend: Backend = Backend.auto
    """`auto`: the fastest that is correct here; what it chose and why is printed."""
