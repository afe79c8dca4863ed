"""Tensors in parts of several files: any rectangle is read, and parts that do not make a whole are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fxtune.checkpoint.parts import StoredTensors, chunks_of
from fxtune.distributed.chunks import Chunk

MATRIX = torch.arange(24.0).view(6, 4)


def written(folder: Path, *rows: slice) -> dict:
    """A file for each slice of MATRIX, and its chunks as in the manifest."""
    files = {}
    for index, part in enumerate(rows):
        path, tensor = folder / f"weights-{index}.safetensors", MATRIX[part].contiguous()
        save_file({"w": tensor}, path)
        files[path] = chunks_of({"w": Chunk((6, 4), (part.start, 0), tuple(tensor.shape))})
    return files


def test_any_rectangle_is_put_together_from_the_parts(tmp_path):
    with StoredTensors(written(tmp_path, slice(0, 2), slice(2, 6))) as stored:
        assert list(stored) == ["w"]
        assert stored["w"].shape == (6, 4)
        assert torch.equal(stored.read("w"), MATRIX)
        for row, column, height, width in ((1, 1, 3, 2), (2, 0, 4, 4), (5, 3, 1, 1)):
            wanted = Chunk((6, 4), (row, column), (height, width))
            assert torch.equal(stored.read("w", wanted), MATRIX[row : row + height, column : column + width])
        assert stored.read("w", Chunk((6, 4), (0, 0), (0, 4))).shape == (0, 4)


@pytest.mark.parametrize("rows", [(slice(0, 2), slice(3, 6)), (slice(0, 3), slice(2, 6)), (slice(0, 2),)])
def test_gaps_overlaps_and_missing_parts_are_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="the parts of w do not make a whole"):
        StoredTensors(written(tmp_path, *rows))


def test_file_of_other_tensors_or_of_no_tensors_is_refused(tmp_path):
    files = written(tmp_path, slice(0, 6))
    (path,) = files
    with pytest.raises(ValueError, match="does not hold the tensors of the manifest"):
        StoredTensors({path: chunks_of({"v": Chunk.whole((6, 4))})})
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="its tensors cannot be read"):
        StoredTensors(files)
