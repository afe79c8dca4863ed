"""Features of images, computed by a frozen vision encoder once before the first step and kept beside the token table.

The file has the features of each distinct image of the table, in the dtype of the model's weights. Its name is a hash
of the vision encoder's and the projector's weights and of the model's config; the folder's name depends on images and
processor (stored_numbers.py). Each image is computed by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from fxtune.data.batches.batch_images import BatchImages
from fxtune.data.images.processor import Tensors
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.models.kinds.image_decoder.parts import projectors, vision_encoders
from fxtune.models.kinds.image_decoder.stored_features import StoredFeatures
from fxtune.models.structure import base_dtype, image_arguments
from fxtune.system.machine.host import cores
from fxtune.system.terminal.progress import phase
from fxtune.techniques.precision import Precision
from fxtune.training.data.stored_numbers import StoredFile, keep, weights_checksum


@dataclass(frozen=True)
class ImageFeatures(StoredFile):
    kind: ClassVar[str] = "image_features"
    title: ClassVar[str] = "features of images"
    key: ClassVar[str] = "data.image_features"
    dtype: torch.dtype
    numbers: int
    """Numbers of a feature: levels times width."""

    @property
    def record(self) -> np.dtype:
        """The one field has the name of the dtype in torch and the bits of the numbers."""
        return np.dtype([(str(self.dtype).removeprefix("torch."), f"<i{self.dtype.itemsize}", (self.numbers,))])

    def entries_in(self, table: TokenTable) -> tuple[int, int]:
        features = int(table.distinct_images[2][-1])
        return features, features

    def read(self, table: TokenTable, name: str) -> None:
        table.read_features(name)


@torch.no_grad()
def store_features(
    model: Any,
    tables: Sequence[TokenTable],
    options: Any,
    precision: Precision,
    world: World,
) -> StoredFeatures:
    """Give each of `tables`, which have images, the features of these. The vision encoder then is in host memory.

    `model`: without adapters. `options`: whatever else changes the features. Raises ConfigError if a plugin trains the
    vision encoder, StorageError if the files do not fit on the disk or cannot be written, DataError if an image cannot
    be read.
    """
    own = nn.ParameterList(model.model.parameters(recurse=False))
    parts = nn.ModuleList([*vision_encoders(model), *projectors(model), own])
    if any(weight.requires_grad for weight in parts.parameters()):
        raise ConfigError("data.image_features: stored, but a plugin trains the vision encoder. Set it to computed.")
    first: Any = tables[0]
    with precision.context(world.device):
        example = first.image_processor.blank_tensors([first.image(0).size])
        source = StoredFeatures(model, image_arguments(model, example, world.device))
        numbers = ImageFeatures(base_dtype(model), len(source.forms) * source.width)
        (name,), bits = numbers.record.names or (), getattr(torch, f"int{8 * numbers.dtype.itemsize}")

        def compute(files: list[Any]) -> None:
            for table, file in zip({table.folder: table for table in tables}.values(), files, strict=True):
                if file is None:
                    continue
                first, _, starts = table.distinct_images
                own = range(world.rank, len(first), world.size)
                with phase(f"Computing features of {len(own):,} images", len(own), "images") as progress:
                    read = _read_ahead(table, first[own])
                    for number, tensors in zip(own, progress.over(read), strict=True):
                        made = source.features(image_arguments(model, tensors, world.device)).to(numbers.dtype)
                        assert len(made) == starts[number + 1] - starts[number], "the processor counts other features"
                        file[name][starts[number] : starts[number + 1]] = made.flatten(1).view(bits).cpu().numpy()

        described = {**model.config.to_dict(), "text_config": None}
        keep(tables, numbers, [weights_checksum(parts), described, options, str(numbers.dtype)], world, compute)
    source.begin()
    return source


def _read_ahead(table: TokenTable, indices: np.ndarray) -> Iterator[Tensors]:
    """Yield the tensors of single images, which up to 8 threads read ahead."""

    def read(index: int) -> Tensors:
        image = BatchImages([table], 1)
        image.add(table, int(table.image_starts[index]), 1)
        return image.tensors() or {}

    rest, threads = iter(indices), max(1, min(8, cores() - 1))
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque(pool.submit(read, index) for index in islice(rest, 2 * threads))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(read, index) for index in islice(rest, 1))
