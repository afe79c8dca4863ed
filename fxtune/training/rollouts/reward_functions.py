"""Rewards of fxtune. Each has TRL's signature, f(prompts, completions, completion_ids, **columns), and options as
keywords. A column of the rows is a list with an entry for each completion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fxtune.errors import did_you_mean
from fxtune.plugins import REWARD_ARGUMENTS

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def text_of(completion: Any) -> str:
    """The text of a completion: a text, or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def column_of(columns: dict[str, Any], name: str) -> Sequence[Any]:
    """The values of a column. Raises ValueError if the rows have no such column."""
    if name not in columns:
        known = [each for each in columns if each not in REWARD_ARGUMENTS]
        raise ValueError(f"the rows have no column `{name}`{did_you_mean(name, known)} Set the option `column`")
    found: Sequence[Any] = columns[name]
    return found


def exact(completions: list[Any], *, column: str = "answer", **columns: Any) -> list[float]:
    """1 if the answer is the text in `column`, else 0. Spaces around both do not count."""
    right = column_of(columns, column)
    return [
        float(text_of(completion).strip() == str(answer).strip())
        for completion, answer in zip(completions, right, strict=True)
    ]


def number(
    completions: list[Any], *, column: str = "answer", tolerance: float = 1e-6, **columns: Any
) -> list[float | None]:
    """1 if the last number of the answer is the last number in `column`, else 0. None if `column` has no number."""

    def last(text: str) -> float | None:
        found = NUMBER.findall(text)
        return float(found[-1].replace(",", "")) if found else None

    scores = list[float | None]()
    for completion, answer in zip(completions, column_of(columns, column), strict=True):
        given, right = last(text_of(completion)), last(str(answer))
        if right is None:
            scores.append(None)
        else:
            near = given is not None and math.isclose(given, right, rel_tol=tolerance, abs_tol=tolerance)
            scores.append(float(near))
    return scores


def regex(completions: list[Any], *, pattern: str, **_: Any) -> list[float]:
    """1 if the pattern is found in the answer, else 0. `.` also matches a newline."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(text_of(completion)) is not None) for completion in completions]


def tags(completions: list[Any], *, names: Sequence[str] = ("think", "answer"), **_: Any) -> list[float]:
    """1 if the answer consists of <think>...</think> and <answer>...</answer>, each once and in the order of `names`,
    with nothing but spaces around them; else 0."""
    scores = []
    for completion in completions:
        text, whole = text_of(completion), r"\s*".join(f"<{name}>.*?</{name}>" for name in map(re.escape, names))
        once = all(text.count(f"<{name}>") == text.count(f"</{name}>") == 1 for name in names)
        scores.append(float(once and re.fullmatch(rf"\s*{whole}\s*", text, re.DOTALL) is not None))
    return scores


def length(completions: list[Any], completion_ids: list[list[int]], *, most: int = 100, **_: Any) -> list[float]:
    """The tokens of the answer, divided by `most`, at most 1. A negative weight makes answers shorter."""
    return [min(len(ids) / most, 1.0) for ids in completion_ids]
