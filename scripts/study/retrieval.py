"""Retrieval documents, which train and test whether a small model uses distant context.

Such a document has a fact that cannot be guessed ("The pass key is 73914.") inside ordinary text, and a question about
it at the end.
`teaching` writes training documents in several forms, with one or more facts at random depths. `Passkeys` is the test
(Mohtashami and Jaggi 2023, arXiv 2305.16300): one pass key at a given depth of a row of a given length, which the
model must repeat.
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
    """The question with the answer `{value}` at its end."""


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
    """`filler` with facts between its lines and a question about each fact at the end, in random order."""
    if rng.random() < 0.35:
        form, names = PASS_KEY, [""]
    else:
        form, names = rng.choice(NAMED), list({invent(rng) for _ in range(rng.randint(1, 8))})
    values = {name: number(rng) for name in names}
    lines = filler.splitlines()
    for name in names:
        lines.insert(rng.randint(0, len(lines)), form.fact.format(name=name, value=values[name]))
    rng.shuffle(names)
    questions = [form.question.format(name=name, value=values[name]) for name in names]
    return "\n".join(["\n".join(lines), *questions]) + "\n"


class Fillers:
    """Draws parts of the given texts that begin and end at a line break. A part can span several texts."""

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
    """`count` teaching documents of about `low` to `high` tokens, none longer.

    `encode` maps a list of texts to token ids.
    """
    sample = [fillers.draw(rng, 4000) for _ in range(16)]
    chars_per_token = sum(map(len, sample)) / sum(map(len, encode(sample)))
    left = count
    while left:
        sizes = [rng.uniform(low, high) for _ in range(min(left, 256))]
        # 0.85 leaves room for the facts. A document that is still too long is drawn again.
        made = [teaching(rng, fillers.draw(rng, int(0.85 * size * chars_per_token))) for size in sizes]
        fitting = [text for text, ids in zip(made, encode(made), strict=True) if len(ids) < high]
        yield from fitting
        left -= len(fitting)


class Passkeys:
    """Rows of exact lengths with one pass key each, from held-out text."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], ids: Sequence[int], seed: int) -> None:
        self.encode, self.ids, self.rng = encode, ids, random.Random(seed)

    def row(self, length: int, depth: float) -> tuple[list[int], int]:
        """(token ids [length], length of the answer at their end).

        `depth` 0 is the start of the row, 1 the question.
        """
        value = number(self.rng)
        fact, answered, question = self.encode(
            [
                "\n" + PASS_KEY.fact.format(value=value) + "\n",
                "\n" + PASS_KEY.question.format(value=value),
                "\n" + PASS_KEY.question.format(value="").rstrip(),
            ]
        )
        assert answered[: len(question)] == question
        room = length - len(fact) - len(answered)
        assert room >= 0, f"a pass key alone takes {length - room} tokens"
        begin = self.rng.randrange(max(len(self.ids) - room, 1))
        text = list(self.ids[begin : begin + room])
        at = round(depth * len(text))
        return [*text[:at], *fact, *text[at:], *answered], len(answered) - len(question)


def accuracy(argmax: Callable[[list[list[int]]], Any], rows: list[tuple[list[int], int]]) -> float:
    """Share of rows whose complete answer the model predicts. `argmax` maps rows of one length to the most likely next
    tokens.

    The answer is part of the row, and each of its tokens must be the most likely one after the tokens before it.
    Greedy decoding gives the same result, because both fail at the first wrong token.
    """
    best = argmax([ids for ids, _ in rows])
    right = 0
    for (ids, answer), found in zip(rows, best, strict=True):
        right += list(found[len(ids) - answer - 1 : len(ids) - 1]) == ids[-answer:]
    return right / len(rows)
