"""A plugin with a reward for models with random weights: the share of an answer's tokens that have an even id."""

from __future__ import annotations

from typing import Any

import fxtune


@fxtune.reward("even")
def even(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
