"""Writes the quickstart's chat data: orders in plain English, answered with JSON.

    python scripts/make/make_quickstart.py            # rewrites fxtune/assets/data, byte for byte the same

The held-out questions share no sentence with the training rows, and in half of them the customer's name and city are
in no training row, so a right answer must be read from the sentence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

from shop import CITIES, NAMES, Order, draw_order

DATA = Path(__file__).resolve().parents[2] / "fxtune" / "assets" / "data"
SYSTEM = "Answer with the order as JSON."
SEED = 7
TRAIN_ROWS, TEST_ROWS = 2000, 120
UNSEEN_NAMES, UNSEEN_CITIES = 40, 30


def answer(order: Order) -> str:
    """The JSON object that the model should write, with keys always in this order."""
    return json.dumps(
        {"name": order.name, "city": order.city, "item": order.item, "color": order.color, "quantity": order.quantity}
    )


def row(order: Order, message: str) -> str:
    """One line of the file."""
    turns = (("system", SYSTEM), ("user", message), ("assistant", answer(order)))
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def draw_orders(rng: Random, train: int, test: int) -> tuple[list[tuple[Order, str]], list[tuple[Order, str]]]:
    """Orders with the customers' words, for training and held out. No words are drawn twice, and in half of the held-out
    orders the customer's name and city are in no training order."""
    names, cities = list(NAMES), list(CITIES)
    rng.shuffle(names)
    rng.shuffle(cities)
    known = names[UNSEEN_NAMES:], cities[UNSEEN_CITIES:]
    unseen = names[:UNSEEN_NAMES], cities[:UNSEEN_CITIES]
    seen: set[str] = set()

    def fresh(people: tuple[list[str], list[str]]) -> tuple[Order, str]:
        while True:
            order = draw_order(rng, *people)
            message = order.message(rng)
            if message not in seen:
                seen.add(message)
                return order, message

    return [fresh(known) for _ in range(train)], [fresh(unseen if i % 2 else known) for i in range(test)]


def make(seed: int = SEED) -> tuple[list[str], list[str]]:
    """The lines of the training file and of the held-out file."""
    train, test = draw_orders(Random(seed), TRAIN_ROWS, TEST_ROWS)
    return [row(*drawn) for drawn in train], [row(*drawn) for drawn in test]


def write_files(name: str, make: Callable[[int], tuple[list[str], list[str]]], seed: int, about: str | None) -> None:
    """Write NAME_train.jsonl and NAME_test.jsonl, whose lines `make` draws. The command line may set folder and seed;
    `about`: its help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA, help="folder for the two files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=seed)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for part, lines in zip(("train", "test"), make(args.seed), strict=True):
        file = args.out / f"{name}_{part}.jsonl"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write_files("quickstart", make, SEED, __doc__)
