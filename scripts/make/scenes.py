# ruff: noqa: SIM905  # word lists are read, and edited, as words
"""Pictures of coloured shapes, for make_vision.py and make_vision_base.py.

A picture has two or three rows and two to four columns of places, each 28 pixels wide and high: the area of one token of
Qwen2.5-VL. Some places have a shape, a little off the middle and a little rotated. A large shape reaches into the next place. Everything is drawn from a `random.Random`, so a seed fixes every pixel.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from io import BytesIO
from random import Random

import numpy as np
from PIL import Image

SIDE = 28
"""Pixels of a place."""
SHAPES = "circle square triangle cross star".split()
COLORS = {
    "red": (214, 40, 40),
    "orange": (247, 148, 29),
    "yellow": (250, 222, 40),
    "green": (44, 150, 62),
    "blue": (36, 84, 210),
    "purple": (132, 50, 170),
    "brown": (122, 74, 34),
    "black": (24, 24, 28),
}
SIZES = {"small": (8.0, 9.5), "large": (12.0, 13.5)}
"""Smallest and largest radius, in pixels."""
BACKGROUNDS = ((255, 255, 255), (240, 240, 240), (232, 240, 252), (252, 240, 232), (236, 250, 236))
NUMBERS = "no one two three".split()


@dataclass(frozen=True)
class Thing:
    """A shape in a picture. `row` and `column` begin at 1."""

    shape: str
    color: str
    size: str
    row: int
    column: int

    @property
    def words(self) -> str:
        return f"{self.size} {self.color} {self.shape}"

    @property
    def place(self) -> str:
        return f"row {self.row}, column {self.column}"


@dataclass(frozen=True)
class Scene:
    """The content of a picture. `things` are in reading order."""

    rows: int
    columns: int
    things: tuple[Thing, ...]


def draw_scene(rng: Random, kinds: list[tuple[str, str]], most: int) -> Scene:
    """A scene of one to `most` things. `kinds`: their shapes and colors."""
    rows, columns = rng.randint(2, 3), rng.randint(2, 4)
    places = sorted(rng.sample(range(rows * columns), rng.randint(1, most)))
    things = [
        Thing(*rng.choice(kinds), rng.choice(list(SIZES)), place // columns + 1, place % columns + 1)
        for place in places
    ]
    return Scene(rows, columns, tuple(things))


def _inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which points (x to the right, y down) belong to the shape of radius 1."""
    match shape:
        case "circle":
            return x**2 + y**2 <= 0.9
        case "square":
            return (abs(x) <= 0.82) & (abs(y) <= 0.82)
        case "triangle":
            return (y <= 0.75) & (y >= 1.8 * abs(x) - 1)
        case "cross":
            return (np.minimum(abs(x), abs(y)) <= 0.3) & (np.maximum(abs(x), abs(y)) <= 1)
        case "star":
            # Between a tip and the next notch the edge is straight.
            angle = (np.arctan2(x, -y) % (math.tau / 5) + math.tau / 5) % (math.tau / 5)
            angle = np.minimum(angle, math.tau / 5 - angle)
            notch = np.array([0.42 * math.sin(math.pi / 5), 0.42 * math.cos(math.pi / 5)])
            along, beside = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
            return (1.1 - along) * notch[0] >= beside * (1.1 - notch[1])
    raise ValueError(shape)


def picture(rng: Random, scene: Scene, sizes: dict[str, tuple[float, float]] = SIZES) -> bytes:
    """A PNG file of the scene."""
    height, width = scene.rows * SIDE, scene.columns * SIDE
    indices = np.zeros((height, width), np.uint8)
    palette = [rng.choice(BACKGROUNDS)]
    y, x = np.mgrid[:height, :width] + 0.5
    for number, thing in enumerate(scene.things, 1):
        radius, turn = rng.uniform(*sizes[thing.size]), rng.uniform(-0.15, 0.15)
        across, down = ((place - 0.5) * SIDE + rng.uniform(-4, 4) for place in (thing.column, thing.row))
        right, below = (x - across) / radius, (y - down) / radius
        turned = right * math.cos(turn) + below * math.sin(turn), below * math.cos(turn) - right * math.sin(turn)
        indices[_inside(thing.shape, *turned)] = number
        palette.append(tuple(min(255, max(0, value + rng.randint(-14, 14))) for value in COLORS[thing.color]))
    image = Image.fromarray(indices)
    image.putpalette([value for color in palette for value in color])
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
