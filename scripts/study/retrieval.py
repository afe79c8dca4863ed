"""Documents with facts that are asked for at their end: what teaches a small model to read far back, and what tests it.

A fact is a line that cannot be guessed ("The pass key is 73914."), put somewhere into ordinary text; the last lines ask for it.
`teaching` writes such documents in several forms, with one fact or many at random depths. `Passkeys` is the test (Mohtashami and
Jaggi 2023, arXiv 2305.16300): one pass key at a chosen depth of a row of a chosen length, and the model must say it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "make"))
from corpus import invent

DIGITS = 5


class Form(NamedTuple):
    fact: str
    question: str
    """What stands before the answer, without the space before that."""


PASS_KEY = Form(
    "The pass key is {value}. Remember it. {value} is the pass key.", "What is the pass key? The pass key is {value}"
)
NAMED = (
    Form("The magic number of {name} is {value}.", "The magic number of {name} is {value}"),
    Form("# {name} = {value}", "# {name} = {value}"),
    Form("{name} was registered under the id {value}.", "Which id has {name}? The id of {name} is {value}"),
    Form("    {name}: int = {value}", "    assert settings.{name} == {value}"),
    Form("Call {name} at {value}.", "To reach {name}, call {value}"),
)


def number(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(DIGITS))


def teaching(rng: random.Random, filler: str) -> str:
    """`filler` with facts between its lines, each asked for at the end, in any order."""
    if rng.random() < 0.35:
        form, names = PASS_KEY, [""]
    else:
        form, names = rng.choice(NAMED), list({invent(rng) for _ in range(rng.randint(1, 8))})
    values = {name: number(rng) for name in names}
    lines = filler.splitlines()
    for name in names:
        lines.insert(rng.randint(0, len(lines)), form.fact.format(name=name, value=values[name]))
    rng.shuffle(names)
    asked = [form.question.format(name=name, value=values[name]) for name in names]
    return "\n".join(["\n".join(lines), *asked]) + "\n"


class Fillers:
    """Stretches of given texts, of any length, that begin and end with a line. A stretch can run over several texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def draw(self, rng: random.Random, chars: int) -> str:
        text = rng.choice(self.texts)
        start = text.find("\n", rng.randrange(len(text))) + 1
        parts, missing = [text[start : start + chars]], chars - len(text[start : start + chars])
        while missing > 0:
            parts.append(rng.choice(self.texts)[:missing])
            missing -= len(parts[-1])
        drawn = "\n".join(parts)
        return drawn[: drawn.rfind("\n")] if "\n" in drawn else drawn


def documents(
    rng: random.Random,
    fillers: Fillers,
    encode: Callable[[list[str]], list[list[int]]],
    count: int,
    low: int,
    high: int,
) -> Iterator[str]:
    """`count` teaching documents of `low` to `high` tokens, about; none is longer. `encode`: texts to ids, many at a time."""
    sample = [fillers.draw(rng, 4000) for _ in range(16)]
    chars_a_token = sum(map(len, sample)) / sum(map(len, encode(sample)))
    left = count
    while left:
        wanted = [rng.uniform(low, high) for _ in range(min(left, 256))]
        # The facts take their part; what is too long all the same (dense text) is drawn again, shorter.
        made = [teaching(rng, fillers.draw(rng, int(0.85 * size * chars_a_token))) for size in wanted]
        fitting = [text for text, ids in zip(made, encode(made), strict=True) if len(ids) < high]
        yield from fitting
        left -= len(fitting)


class Passkeys:
    """Rows of exact lengths with one pass key each, out of held-out text."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], ids: Sequence[int], seed: int) -> None:
        self.encode, self.ids, self.rng = encode, ids, random.Random(seed)

    def row(self, length: int, depth: float) -> tuple[list[int], int]:
        """(token ids [length], how many of the last ones are the answer). `depth`: 0 is the row's beginning, 1 the question."""
        value = number(self.rng)
        fact, whole, question = self.encode(
            [
                "\n" + PASS_KEY.fact.format(value=value) + "\n",
                "\n" + PASS_KEY.question.format(value=value),
                "\n" + PASS_KEY.question.format(value="").rstrip(),
            ]
        )
        assert whole[: len(question)] == question
        room = length - len(fact) - len(whole)
        assert room >= 0, f"a pass key alone takes {length - room} tokens"
        begin = self.rng.randrange(max(len(self.ids) - room, 1))
        around = list(self.ids[begin : begin + room])
        at = round(depth * len(around))
        return [*around[:at], *fact, *around[at:], *whole], len(whole) - len(question)


def accuracy(argmax: Callable[[list[list[int]]], Any], rows: list[tuple[list[int], int]]) -> float:
    """Share of rows whose whole answer the model says. `argmax`: rows of one length to the likeliest next tokens [rows, length].

    The answer is in the row, and each of its tokens must be the most likely one after those before it. Greedy decoding would
    say the same: it goes on with a right token and its answer is wrong with the first that is not.
    """
    best = argmax([ids for ids, _ in rows])
    right = 0
    for (ids, answer), found in zip(rows, best, strict=True):
        right += list(found[len(ids) - answer - 1 : len(ids) - 1]) == ids[-answer:]
    return right / len(rows)
