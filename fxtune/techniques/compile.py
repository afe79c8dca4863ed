"""torch.compile, decoder layer by decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fxtune.technique import Technique


class CompileMode(str, Enum):
    default = "default"
    max_autotune = "max_autotune"


@dataclass
class Compile(Technique):
    mode: CompileMode = CompileMode.default
    fullgraph: bool = True
    """Fail on a graph break, in place of going on slowly."""
