"""Writes the vision quickstart's chat data: pictures of a coloured shape, answered with JSON.

    python scripts/make/make_vision.py            # rewrites fxtune/assets/data/vision_*.jsonl byte by byte

Rows contain the pictures as data: URIs. No picture occurs twice. In half of the held-out pictures the shape has a
color that this shape has in no training picture, so a right answer must be read from the pixels.
"""

from __future__ import annotations

import json
from random import Random

from make_quickstart import write_files
from scenes import COLORS, SHAPES, Scene, data_uri, draw_scene, picture

SYSTEM = "Answer with JSON."
QUESTIONS = ("What is in the picture?", "Which shape is it, and where?", "What do you see?")
SEED = 9
TRAIN_ROWS, TEST_ROWS = 1000, 120
UNSEEN_KINDS = 8


def answer(scene: Scene) -> str:
    """The JSON object that the model should write, with keys always in this order."""
    (thing,) = scene.things
    return json.dumps({"shape": f"a {thing.words}", "place": f"in {thing.place}"})


def row(rng: Random, scene: Scene, png: bytes) -> str:
    """One line of the file."""
    question = [{"type": "image", "image": data_uri(png)}, {"type": "text", "text": rng.choice(QUESTIONS)}]
    turns = (("system", SYSTEM), ("user", question), ("assistant", answer(scene)))
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def make(seed: int = SEED) -> tuple[list[str], list[str]]:
    """The lines of the training file and of the held-out file."""
    rng = Random(seed)
    kinds = [(shape, color) for shape in SHAPES for color in COLORS]
    rng.shuffle(kinds)
    unseen, known = kinds[:UNSEEN_KINDS], kinds[UNSEEN_KINDS:]
    drawn: set[bytes] = set()

    def fresh(new: bool) -> str:
        while True:
            scene = draw_scene(rng, unseen if new else known, 1)
            png = picture(rng, scene)
            if png not in drawn:
                drawn.add(png)
                return row(rng, scene, png)

    return [fresh(False) for _ in range(TRAIN_ROWS)], [fresh(index % 2 == 1) for index in range(TEST_ROWS)]


if __name__ == "__main__":
    write_files("vision", make, SEED, __doc__)
