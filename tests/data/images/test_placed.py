"""Cuts of documents between their images."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxtune.data.images.placed import PlacedImage, cut_before, without
from fxtune.data.images.reference import ImageReference

IMAGE = ImageReference("a.png", 1, 1, 0)


@st.composite
def documents(draw) -> tuple[list[int], list[PlacedImage]]:
    """Tokens, 0 for text and the number of its image otherwise, and the images."""
    tokens, images = [], []
    for number in range(1, draw(st.integers(1, 4))):
        tokens += [0] * draw(st.integers(0, 3))
        images.append(PlacedImage(len(tokens), draw(st.integers(1, 4)), IMAGE))
        tokens += [number] * images[-1].tokens
    return tokens + [0] * draw(st.integers(1, 3)), images


@given(documents(), st.data())
def test_cuts_leave_each_image_whole(document, data):
    tokens, images = document
    first = data.draw(st.integers(0, len(tokens)))
    before = cut_before(images, first)
    assert before <= first
    for start, stop in ((0, before), (before, len(tokens))):
        left = tokens[:start] + tokens[stop:]
        kept = without(images, start, stop)
        assert len({*left} - {0}) == len(kept)
        for image in kept:
            assert len(set(left[image.start : image.end])) == 1
            assert len(left[image.start : image.end]) == image.tokens
    assert without(images, 0, 0) == tuple(images)
