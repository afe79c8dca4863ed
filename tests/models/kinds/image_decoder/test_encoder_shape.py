import numpy as np
import pytest
from support import image_models
from support.image_models import FAMILIES

from fxtune.models.kinds.known import images_of


def shape_of(family):
    config = image_models.config(family)
    return images_of(config).shape(config)


def test_windows_bound_the_keys_of_qwen2_5():
    """A vision encoder with windows of 4 x 4 patches in one of two layers."""
    sizes = np.array([16, 2])  # 64 patches, and 8: fewer than a window
    work = shape_of("qwen2_5_vl").work(sizes, sizes, sizes)
    assert work == (2, 64 + 8, 64 + 8, 18, 64 * 16 + 64 * 64 + 2 * 8 * 8)
    assert work.scaled(2.5) == (5, 180, 180, 45, 2.5 * work.pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_follow_from_features(family):
    shape = shape_of(family)
    features = np.array([shape.tile * 3 or 12])
    square = np.array([28])
    work = shape.work(features, square, square)
    assert shape.positions(work.features) == pytest.approx(work.positions)


def test_tiles_of_llava_onevision_follow_from_the_size_of_the_image():
    """Images of 28 x 28 are one tile, of 28 x 56 two, each with the whole image as one more."""
    shape = shape_of("llava_onevision")
    work = shape.work(np.array([9, 9]), np.array([28, 28]), np.array([28, 56]))
    assert work.features == (2 + 3) * shape.tile
