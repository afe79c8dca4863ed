"""Features of images, computed by a frozen vision encoder once before the first step and kept beside the token table.

The file has the features of each distinct image of the table, in the dtype of the model's weights. Its name is a hash
of the vision encoder's and the projector's weights and of the model's config; the folder's name depends on images and
processor (stored_numbers.py). Each image is computed by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple

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
from fxtune.training.data.stored_numbers import Files, StoredFile, common_checksum, keep

THREADS = 8
"""At most this many threads decode images."""


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


class Missing(NamedTuple):
    """An image without features: number `number` of the distinct images of a table with a new `file`."""

    table: TokenTable
    file: np.ndarray
    number: int

    def tensors(self) -> Tensors:
        images, start = (
            BatchImages([self.table], 1),
            self.table.image_starts[self.table.distinct_images[0][self.number]],
        )
        images.add(self.table, int(start), 1)
        return images.tensors() or {}

    def write(self, features: torch.Tensor) -> None:
        """`features`: [features, levels, width]"""
        begin, end = self.table.distinct_images[2][self.number : self.number + 2]
        assert len(features) == end - begin, "an image has the features that the token table counts"
        (dtype,) = self.file.dtype.names or ()
        bits = getattr(torch, f"int{8 * self.file.dtype[dtype].base.itemsize}")
        self.file[dtype][begin:end] = features.to(getattr(torch, dtype)).flatten(1).view(bits).cpu().numpy()


@torch.no_grad()
def store_features(
    model: Any,
    tables: Sequence[TokenTable],
    options: Mapping[str, Any],
    precision: Precision,
    world: World,
) -> StoredFeatures:
    """Give each of `tables`, which have images, the features of these. The vision encoder then is in host memory.

    `model`: without adapters. `options`: whatever else changes the features. Raises ConfigError if the vision encoder
    or the projector is trained, StorageError if the files do not fit on the disk or cannot be written, DataError if an
    image cannot be read.
    """
    own = nn.ParameterList(model.model.parameters(recurse=False))
    parts = nn.ModuleList([*vision_encoders(model), *projectors(model), own])
    if any(weight.requires_grad for weight in parts.parameters()):
        raise ConfigError(
            "data.image_features: stored, but the vision encoder or its projector is trained. Set it to computed, or "
            "leave these parts out of techniques.lora.target_modules and model.adapter."
        )
    first: Any = tables[0]
    with precision.context(world.device):
        example = first.image_processor.blank_tensors([first.image(0).size])
        source = StoredFeatures(model, image_arguments(model, example, world.device))
        numbers = ImageFeatures(base_dtype(model), len(source.forms) * source.width)

        def compute(files: Files) -> None:
            new = zip({table.folder: table for table in tables}.values(), files, strict=True)
            every = [(*pair, number) for pair in new for number in range(len(pair[0].distinct_images[0]))]
            images = [Missing(*image) for image in every if image[1] is not None][world.rank :: world.size]
            with phase(f"Computing {numbers.title}", len(images), "images") as progress:
                for image, tensors in progress.over(_ahead(images)):
                    image.write(source.features(image_arguments(model, tensors, world.device)))

        described = {**model.config.to_dict(), "text_config": None}
        keep(tables, numbers, [common_checksum(parts, world), described, options], world, compute)
    source.begin()
    return source


def _ahead(images: Sequence[Missing]) -> Iterator[tuple[Missing, Tensors]]:
    """Yield the images with their tensors, which threads read ahead."""
    rest, threads = iter(images), max(1, min(THREADS, cores() - 1))
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque((image, pool.submit(image.tensors)) for image in islice(rest, 2 * threads))
        while waiting:
            image, tensors = waiting.popleft()
            yield image, tensors.result()
            waiting.extend((image, pool.submit(image.tensors)) for image in islice(rest, 1))
