"""Writes questions to a shop, each with help articles and their relevances.

    python scripts/make/make_support.py            # rewrites fxtune/assets/data/support_*.jsonl, byte for byte the same

An article that answers the question has the relevance 2, an article on the same subject 1, other articles 0. Questions
and articles name goods, people and towns at random, so no such word tells an answer. The words of a question's intent
and of its answers differ, so a model must learn which belong together. Each held-out question has a wording that no
training question has.
"""

from __future__ import annotations

import json
from random import Random

from make_quickstart import write_files
from shop import CITIES, COLORS, GREETINGS, NAMES, PLURALS

SEED = 13
TRAIN_ROWS, TEST_ROWS = 800, 200
CANDIDATES = 5
QUESTIONS = {
    ("parcel", "late"): (
        "where are my {goods}? I live in {where}",
        "my {goods} did not come to {where}",
        "{who} is waiting for {goods}",
        "when will {goods} be in {where}?",
        "still no {goods} in {where}",
    ),
    ("parcel", "move"): (
        "I am not in {where} any more, send {goods} on",
        "{who} will live in {where} soon, where do {goods} go?",
        "please send {goods} to {where}, not to {who}",
        "I wrote the wrong town, {goods} must go to {where}",
        "{goods} go to my old home in {where}",
    ),
    ("money", "bill"): (
        "how do I pay for {goods}?",
        "can {who} pay for my {goods} later?",
        "do you take cards for {goods} in {where}?",
        "I want to pay for {goods} now",
        "what is the price of {goods} in {where}?",
    ),
    ("money", "return"): (
        "I do not like the {goods}, I want my money",
        "{who} in {where} does not want {goods}",
        "can I send {goods} back?",
        "please take the {goods} back, {who} has some",
        "I do not need {goods}, and I paid",
    ),
    ("goods", "broken"): (
        "the {goods} came broken to {where}",
        "my {goods} fell apart",
        "{who} got bad {goods}",
        "half of the {goods} are in pieces",
        "the {goods} stopped after a day, says {who}",
    ),
    ("goods", "colour"): (
        "I asked for {color} {goods}",
        "the {goods} for {who} are not {color}",
        "do you have {goods} in {color}?",
        "can I get {color} {goods} in {where}?",
        "{who} wants the {goods} in {color}, not these",
    ),
}
ARTICLES = {
    ("parcel", "late"): (
        "Look up the day on which we bring your order.",
        "A driver needs three days, and to {where} four.",
        "Orders on the road: how to see a driver's place.",
    ),
    ("parcel", "move"): (
        "How to change your street and town.",
        "A new address: tell us before we pack.",
        "Another house in {where}? Write the new address here.",
    ),
    ("money", "bill"): (
        "You can use a bank or cash.",
        "Our bank in {where}, and its number.",
        "Cash at the door, or by bank in thirty days.",
    ),
    ("money", "return"): (
        "Thirty days to change your mind.",
        "Not happy? You get all coins again.",
        "Print this paper, put it on the box, and get all coins again.",
    ),
    ("goods", "broken"): (
        "We repair or replace for two years.",
        "Take a picture of the damage for our workshop in {where}.",
        "The workshop will repair it for nothing.",
    ),
    ("goods", "colour"): (
        "All paints and dyes of this season.",
        "Choose a dye: a table with pictures.",
        "We can dye it for you in {where}.",
    ),
}
UNSEEN = 1
"""Wordings of the questions of each intent that only held-out questions have, the last ones."""


def filled(rng: Random, text: str) -> str:
    words = dict(who=rng.choice(NAMES), where=rng.choice(CITIES), color=rng.choice(COLORS))
    text = text.format(goods=rng.choice(list(PLURALS.values())), **words)
    return text[0].upper() + text[1:]


def row(rng: Random, held_out: bool) -> str:
    intent = rng.choice(list(QUESTIONS))
    asked = QUESTIONS[intent][-UNSEEN:] if held_out else QUESTIONS[intent][:-UNSEEN]
    question = filled(rng, rng.choice(asked))
    query = rng.choice(GREETINGS) + question + ("" if question.endswith("?") else ".")
    related = next(each for each in ARTICLES if each[0] == intent[0] and each != intent)
    others = [each for each in ARTICLES if each[0] != intent[0]]
    chosen = [intent, related, *(rng.choice(others) for _ in range(CANDIDATES - 2))]
    rng.shuffle(chosen)
    labels = [2 if each == intent else int(each == related) for each in chosen]
    return json.dumps(
        {"query": query, "passages": [filled(rng, rng.choice(ARTICLES[each])) for each in chosen], "labels": labels}
    )


def make(seed: int = SEED) -> tuple[list[str], list[str]]:
    """The lines of the training file and of the held-out file."""
    rng = Random(seed)
    train, test = (
        [row(rng, held_out) for _ in range(rows)] for rows, held_out in ((TRAIN_ROWS, False), (TEST_ROWS, True))
    )
    return train, test


if __name__ == "__main__":
    write_files("support", make, SEED, __doc__)
