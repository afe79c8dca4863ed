"""Writes queries with a positive and two negatives: orders to a shop, the shop's answer to each, and two wrong answers.

    python scripts/make/make_retrieval.py           # rewrites fxtune/assets/data/retrieval_*.jsonl, byte for byte the same

A query is an order in the customer's words, a document is an answer of the shop (REPLIES of shop.py). One negative
answers the same customer with one wrong number, color or thing. The other negative answers another customer about the
same goods. So words in common do not tell the positive. No order of the held-out file is in the training file, and in
half of the held-out orders the customer's name and city are in no training order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from make_quickstart import draw_orders, write_files
from shop import REPLIES, Order, draw_order, draw_when

SEED = 21
TRAIN_ROWS, TEST_ROWS = 1000, 200


def line(rng: Random, order: Order, message: str, others: list[Order]) -> str:
    """One line of the file. `others`: the orders of other rows."""
    drawn = draw_order(rng, [order.name], [order.city])
    fields = [name for name in ("quantity", "color", "item") if getattr(drawn, name) != getattr(order, name)]
    changed = rng.choice(fields or ["quantity"])
    wrong = replace(order, **{changed: getattr(drawn, changed) if fields else order.quantity + 1})
    other = rng.choice([each for each in others if each.name != order.name])
    somebody = replace(order, name=other.name, city=other.city)
    positive, *negatives = (each.answer(rng.choice(REPLIES), draw_when(rng)) for each in (order, wrong, somebody))
    return json.dumps({"query": message, "positive": positive, "negative": negatives})


def make(seed: int = SEED) -> tuple[list[str], list[str]]:
    """The lines of the training file and of the held-out file."""
    rng = Random(seed)
    files = []
    for drawn in draw_orders(rng, TRAIN_ROWS, TEST_ROWS):
        orders = [order for order, _ in drawn]
        files.append([line(rng, *each, orders) for each in drawn])
    return files[0], files[1]


if __name__ == "__main__":
    write_files("retrieval", make, SEED, __doc__)
