"""Functions that make parsers of option values, for argparse's `type`."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


def whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text}: give a whole number, {least} or more")
        return int(text)

    return parse


def positive_number(what: str) -> Callable[[str], float]:
    """A parser of numbers above 0. `what`: the meaning of the number, for the error message."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ArgumentTypeError(f"{text}: give {what}, a number above 0")
        return value

    return parse
