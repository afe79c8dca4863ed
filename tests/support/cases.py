"""Parametrised cases of which only a few belong to `make test`, or to `make test-vital`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def pairs(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which each value occurs at least once, in place of the product: shorter lists are repeated."""
    return [tuple(given[case % len(given)] for given in values) for case in range(max(map(len, values)))]


def slow_but(cases: Iterable[Any], *fast: Any, mark: pytest.MarkDecorator | None = None) -> list[Any]:
    """The values of pytest.mark.parametrize; all but those in `fast` are marked slow. A tuple is a case of several
    values. `mark`: the mark of the cases in `fast`, such as pytest.mark.vital.
    """
    cases = list(cases)
    assert all(case in cases for case in fast), "a fast case is none of the cases"
    marks = {True: mark or (), False: pytest.mark.slow}
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks[case in fast]) for case in cases]
