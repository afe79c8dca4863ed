"""Parametrised cases of which only a few belong to `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The values of pytest.mark.parametrize; all but those in `fast` are marked slow. A tuple is a case of several
    values.
    """
    cases = list(cases)
    assert all(case in cases for case in fast), "a fast case is none of the cases"
    return [
        case if case in fast else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
