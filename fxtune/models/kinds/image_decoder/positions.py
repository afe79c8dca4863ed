"""M-RoPE: the positions of a document with images on three axes (arXiv 2409.12191, 2.1)."""

from __future__ import annotations

import torch

from fxtune.models.kinds.image_decoder.families import Tensors


def rope_positions(ids: torch.Tensor, images: Tensors, image_token: int, merged: int) -> torch.Tensor:
    """M-RoPE positions, int64 [3, tokens], of one document: time, row and column.

    Each token of text is one step on all axes. A token of an image has the position where the image begins, plus its
    row and its column. The text after an image begins at that position plus the larger of the image's height and
    width.

    Args:
        ids: int64 [tokens].
        images: has `image_grid_thw`, int64 [images, 3]: frames, rows and columns of each image in patches.
        image_token: the id of the placeholder.
        merged: how many patches on a side become one token.
    """
    if not images:
        return torch.arange(len(ids), device=ids.device).expand(3, -1)
    grid = images["image_grid_thw"].to(ids.device)
    grid = torch.stack([grid[:, 0], grid[:, 1] // merged, grid[:, 2] // merged])  # [3, images], in tokens
    of_image = (ids == image_token).nonzero().flatten()
    counts = grid.prod(0)
    image = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts)
    index = torch.arange(len(of_image), device=ids.device) - (counts.cumsum(0) - counts)[image]
    rows, columns = grid[1, image], grid[2, image]
    step = torch.ones_like(ids)
    step[of_image] = 0
    step[of_image[counts.cumsum(0) - 1]] = grid[1:].amax(0)
    positions = (step.cumsum(0) - step).repeat(3, 1)
    positions[:, of_image] += torch.stack([index // (rows * columns), index // columns % rows, index % columns])
    return positions
