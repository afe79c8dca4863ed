"""How the tensors of several documents' images become those of a micro-batch."""

from __future__ import annotations

import torch

from fxtune.models.kinds.image_decoder.families import in_one_row, padded_to_largest


def test_images_of_several_sizes_are_padded_at_their_ends():
    small, large = torch.ones(2, 3, 4, 6), torch.ones(1, 3, 8, 2)
    merged = padded_to_largest([{"pixel_values": small}, {"pixel_values": large}])["pixel_values"]
    assert merged.shape == (3, 3, 8, 6)
    assert torch.equal(merged[:2, :, :4], small)
    assert torch.equal(merged[2:, :, :, :2], large)
    assert merged.sum() == small.sum() + large.sum()


def test_documents_of_idefics_become_one():
    documents = [{"pixel_values": torch.full((1, images, 3, 4, 4), float(images))} for images in (1, 2)]
    merged = in_one_row(documents)["pixel_values"]
    assert merged[0, :, 0, 0, 0].tolist() == [1, 2, 2]
