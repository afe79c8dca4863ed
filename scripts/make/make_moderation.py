"""Writes short messages to a shop, each with its class: fine, spam or insult.

    python scripts/make/make_moderation.py            # rewrites fxtune/assets/data/moderation_*.jsonl, byte for byte the same

All classes name the same goods, people and towns, so no such word tells a class: an angry customer who insults nobody
writes a fine message, and spam may be polite. Each held-out sentence has a beginning, or an end, that no training
sentence of its class has.
"""

from __future__ import annotations

import json
from random import Random

from make_quickstart import write_files
from shop import CITIES, COLORS, COUNTS, GREETINGS, NAMES, PLURALS

SEED = 11
TRAIN_ROWS, TEST_ROWS = 900, 240
BEGINNINGS = {
    "fine": (
        "{who} from {where} ordered {goods}",
        "my {goods} came to {where} broken",
        "where are my {goods}? I live in {where}",
        "please send {goods} to {who} in {where}",
        "the {goods} are not {color}, and I am angry",
        "{who} in {where} is waiting for {goods}",
        "I need {goods} in {where} on Monday",
        "can I get {goods} for {who}?",
    ),
    "spam": (
        "win {goods} for nothing in {where}",
        "dear {who}, you have won {goods}",
        "cheap {goods} for {who}, only today",
        "{who} in {where} got rich with {goods}",
        "buy ten {goods} and pay for one",
        "free {goods} for all in {where}",
        "we pay you for {goods}, {who}",
        "your {goods} are waiting, {who}, only now",
    ),
    "insult": (
        "you idiots sent {goods} to {where}",
        "{who}, you are too stupid to send {goods}",
        "only a fool in {where} sells {goods} like you",
        "your {goods} are as ugly as you, {who}",
        "liars in {where}, where are my {goods}",
        "{who} is a thief with my {goods}",
        "you fools, the {goods} are not {color}",
        "I hate you and your {goods}",
    ),
}
ENDS = {
    "fine": (
        ".",
        ". Please help me.",
        ". Thank you.",
        ". My name is {who}.",
        ". What can I do?",
        ". Send others to {where}.",
    ),
    "spam": (
        "!",
        ". Send me your name now!",
        ". Write to {who} today!",
        "! Only {count} left!",
        ". Pay later!",
        "! Tell all in {where}!",
    ),
    "insult": ("!", ". Go to hell.", ", you pig.", ". Shame on you, {who}.", ". What an idiot.", ". You are nothing."),
}
UNSEEN = 2
"""Beginnings and ends of each class that only held-out sentences have, the last ones."""


def message(rng: Random, kind: str, held_out: bool) -> str:
    goods = rng.choice(list(PLURALS.values()))
    words = dict(
        who=rng.choice(NAMES),
        where=rng.choice(CITIES),
        goods=goods,
        color=rng.choice(COLORS),
        count=rng.choice(COUNTS),
    )
    parts = [BEGINNINGS[kind], ENDS[kind]]
    unseen = rng.randrange(2) if held_out else None
    chosen = [rng.choice(each[-UNSEEN:] if index == unseen else each[:-UNSEEN]) for index, each in enumerate(parts)]
    text = "".join(chosen).format(**words).replace("?.", "?")
    return rng.choice(GREETINGS) + text[0].upper() + text[1:]


def make(seed: int = SEED) -> tuple[list[str], list[str]]:
    """The lines of the training file and of the held-out file."""
    rng, sides = Random(seed), list[list[str]]()
    for rows, held_out in ((TRAIN_ROWS, False), (TEST_ROWS, True)):
        kinds = [rng.choices(list(ENDS), (2, 1, 1))[0] for _ in range(rows)]
        sides.append([json.dumps({"text": message(rng, kind, held_out), "label": kind}) for kind in kinds])
    return sides[0], sides[1]


if __name__ == "__main__":
    write_files("moderation", make, SEED, __doc__)
