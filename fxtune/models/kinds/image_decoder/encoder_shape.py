"""The work of a vision encoder for an image, computed from the image's number of features in a table of tokens.

A vision encoder attends within a sequence: the patches of a whole image, or of a tile of fixed size. Some vision
encoders add a class token to each sequence. A projector merges patches, so the decoder gets fewer features than the
image has patches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class ImageWork(NamedTuple):
    """The work of a vision encoder and its projector, summed over images."""

    images: float
    positions: float
    """Positions of all sequences: patches and class tokens."""
    patches: float
    features: float
    """Outputs of the projector. Some families later drop features or add line-end tokens."""
    pairs: float
    """Pairs of a query and a key, summed over layers. Windows at the edges of an image count as whole windows."""

    def scaled(self, factor: float) -> ImageWork:
        """The work of `factor` times as many images."""
        return ImageWork(*(count * factor for count in self))


@dataclass(frozen=True)
class EncoderShape:
    layers: int
    width: int
    """Width of the hidden states."""
    heads_width: int
    """Width of all heads of a layer together."""
    inner: int
    """Width of the MLP."""
    merged: float = 1.0
    """Patches for each feature."""
    tile: int = 0
    """Features of a tile; 0: the vision encoder takes whole images of any size."""
    extra: int = 0
    """Positions of a sequence that are no patches: 1 for a class token."""
    window: int = 0
    """Patches of an attention window; 0: no layer has windows."""
    full_layers: int = 0
    """Number of layers that attend to the whole image, in a vision encoder with windows."""
    levels: int = 1
    """Features that the decoder gets for each group of merged patches: one at the decoder's input, the others in its
    layers."""
    tiles: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    """Computes the number of tiles of images from their heights and widths in pixels; None if the number of features
    decides it."""

    def work(self, features: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> ImageWork:
        """The work for images. The arguments are int64 arrays with one entry an image. `features`: how many tokens the
        vision encoder's features replace; `heights`, `widths`: in pixels."""
        count, length, projected = np.ones_like(features), np.rint(features * self.merged).astype(np.int64), features
        if self.tile:
            count = features // self.tile if self.tiles is None else self.tiles(heights, widths)
            length = np.full_like(features, round(self.tile * self.merged) + self.extra)
            projected = count * self.tile
        positions, in_windows = count * length, self.layers - self.full_layers if self.window else 0
        pairs = (self.layers - in_windows) * (positions * length).sum()
        pairs += in_windows * (positions * np.minimum(length, self.window)).sum()
        patches = positions.sum() - count.sum() * self.extra
        return ImageWork(len(features), int(positions.sum()), int(patches), int(projected.sum()), float(pairs))

    def positions(self, features: float) -> float:
        """The number of positions in the vision encoder for this number of features."""
        return features * (self.merged + (self.extra / self.tile if self.tile else 0))
