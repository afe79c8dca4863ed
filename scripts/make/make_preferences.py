"""Writes pairs of preferences: orders to a shop, each with the answer that the shop prefers and one that it does not.

    python scripts/make/make_preferences.py           # rewrites fxtune/assets/data/preferences_*.jsonl, byte for byte the same

A clerk's answers come in four forms (REPLIES of shop.py), and the base model writes all four. Its likeliest is "With
pleasure!". The shop prefers another: it greets the customer by name and says that the goods leave today. Most rejected
answers have another form and are as right: they name the same goods, customer and town. The others have the preferred
form and a wrong number. So the best answer to each order is known. No order of the held-out file is in the training
file, and in half of the held-out orders the customer's name and city are in no training order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from make_quickstart import draw_orders, write_files
from shop import REPLIES, Order, draw_quantity, draw_when

PREFERRED = REPLIES[2], " today"
MISCOUNTED = 0.3
"""The share of rejected answers with a wrong number."""
SEED = 8
TRAIN_ROWS, TEST_ROWS = 1000, 120


def pair(rng: Random, order: Order, message: str) -> str:
    """One line of the file."""
    chosen = rejected = order.answer(*PREFERRED)
    miscounts = rng.random() < MISCOUNTED
    while rejected == chosen:
        if miscounts:
            rejected = replace(order, quantity=draw_quantity(rng)).answer(*PREFERRED)
        else:
            rejected = order.answer(rng.choice(REPLIES), draw_when(rng))
    return json.dumps({"prompt": [{"role": "user", "content": message}], "chosen": chosen, "rejected": rejected})


def make(seed: int = SEED) -> tuple[list[str], list[str]]:
    """The lines of the training file and of the held-out file."""
    rng = Random(seed)
    train, test = draw_orders(rng, TRAIN_ROWS, TEST_ROWS)
    return [pair(rng, *drawn) for drawn in train], [pair(rng, *drawn) for drawn in test]


if __name__ == "__main__":
    write_files("preferences", make, SEED, __doc__)
