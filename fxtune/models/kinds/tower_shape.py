"""What a tower computes for an image, from the number of the image's features, which a token table knows.

A tower attends inside a sequence of positions: the patches of a whole image, or of a tile of one size. Some towers add
a class token to a sequence. A projector joins patches, so that the decoder gets fewer features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class TowerWork(NamedTuple):
    """What some images are to a tower and its projector, in all."""

    images: float
    positions: float
    """Positions of all sequences: patches and class tokens."""
    patches: float
    features: float
    """What the projector makes. Some families drop features later, or add ends of lines."""
    pairs: float
    """Pairs of a query and a key that all layers compute. The windows at the edges of an image count as whole ones."""

    def scaled(self, factor: float) -> TowerWork:
        """The work of `factor` times as many images."""
        return TowerWork(*(count * factor for count in self))


@dataclass(frozen=True)
class TowerShape:
    layers: int
    width: int
    """Of the hidden states."""
    heads_width: int
    """Of all heads of a layer."""
    inner: int
    """Of the MLP."""
    merged: float = 1.0
    """Patches for each feature."""
    tile: int = 0
    """Features of a tile; 0: the tower takes whole images, of sizes of their own."""
    extra: int = 0
    """Positions of a sequence beside its patches: a class token."""
    window: int = 0
    """Patches of a window in which the layers attend that are not among `full_layers`; 0: no layer has windows."""
    full_layers: int = 0
    levels: int = 1
    """How many features of each square of patches the decoder gets: one for its input, and others for its layers."""
    tiles: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    """From heights and widths of images in pixels to tiles, where the number of features does not tell them."""

    def work(self, features: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> TowerWork:
        """Of images: int64 arrays with an entry for each. `features`: tokens that stand for a feature; `heights`,
        `widths`: in pixels."""
        count, length, made = np.ones_like(features), np.rint(features * self.merged).astype(np.int64), features
        if self.tile:
            count = features // self.tile if self.tiles is None else self.tiles(heights, widths)
            length = np.full_like(features, round(self.tile * self.merged) + self.extra)
            made = count * self.tile
        positions, near = count * length, self.layers - self.full_layers if self.window else 0
        pairs = (self.layers - near) * (positions * length).sum() + near * (positions * self._near(length)).sum()
        patches = positions.sum() - count.sum() * self.extra
        return TowerWork(len(features), int(positions.sum()), int(patches), int(made.sum()), float(pairs))

    def _near(self, length: np.ndarray) -> np.ndarray:
        return np.minimum(length, self.window)

    def positions(self, features: float) -> float:
        """Positions of the tower for so many features."""
        return features * (self.merged + (self.extra / self.tile if self.tile else 0))
