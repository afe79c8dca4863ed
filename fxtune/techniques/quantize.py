from __future__ import annotations

from dataclasses import dataclass

from fxtune.technique import Technique


@dataclass
class Quantize(Technique):
    pass
