"""Features of images, computed by a frozen vision encoder once before the first step and kept beside the token table.

The file has the features of each distinct image of the table, in the dtype of the model's weights. Its name is a hash
of the vision encoder's and the projector's weights and of the model's config; the folder's name depends on images and
processor (stored_numbers.py). Each image is computed as a document by itself, and some images make one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from fxtune.data.batches.batch_images import read_images
from fxtune.data.images.processor import Tensors
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.models.kinds.image_decoder.parts import for_images, projectors, vision_encoders
from fxtune.models.kinds.image_decoder.stored_features import StoredFeatures
from fxtune.models.structure import base_dtype, image_arguments
from fxtune.system.machine.host import cores
from fxtune.system.terminal.progress import phase
from fxtune.techniques.precision import Precision
from fxtune.training.agreement import together
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

    def length(self, table: TokenTable) -> int:
        return int(table.distinct_images[2][-1])

    def size(self, table: TokenTable) -> int:
        return self.length(table) * self.record.itemsize

    def read(self, table: TokenTable, name: str) -> None:
        table.read_features(name)


class Chunk(NamedTuple):
    """Images `first` to `end` of the distinct images of a table, and the file of their features."""

    table: TokenTable
    file: np.ndarray
    first: int
    end: int

    def tensors(self) -> Tensors:
        processor, images = self.table.image_processor, self.table.distinct_images[0][self.first : self.end]
        assert processor is not None
        return processor.merge([read_images(self.table, [image]) for image in images.tolist()])

    def write(self, features: torch.Tensor) -> None:
        """`features`: [features, levels, width]"""
        begin, end = self.table.distinct_images[2][[self.first, self.end]]
        bits = features.view(getattr(torch, f"int{8 * features.itemsize}")).flatten(1)
        assert len(bits) == end - begin, "an image has the features that the token table counts"
        (dtype,) = self.file.dtype.names or ()
        self.file[dtype][begin:end] = bits.cpu().numpy()


@torch.no_grad()
def store_features(
    model: Any,
    tables: Sequence[TokenTable],
    tokens: int,
    options: Mapping[str, Any],
    precision: Precision,
    world: World,
) -> StoredFeatures:
    """Give each of `tables`, which have images, the features of these. The vision encoder then is in host memory.

    `model`: with or without adapters. `tokens`: at most this many features are computed at once. `options`: whatever
    else changes the features. Raises ConfigError if the vision encoder or the projector is trained, StorageError if
    the files do not fit on the disk or cannot be written, DataError if an image cannot be read.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = nn.ModuleList([*vision_encoders(base), *projectors(base)])
    if any(weight.requires_grad for weight in (*parts.parameters(), *for_images(base))):
        raise ConfigError(
            "data.image_features: stored, but the vision encoder or its projector is trained. Set it to computed, or "
            "leave these parts out of techniques.lora.target_modules and model.adapter."
        )
    parts.append(nn.ParameterList(base.model.parameters(recurse=False)))
    was_training = model.training
    model.eval()
    with precision.context(world.device):
        processor, image = tables[0].image_processor, tables[0].image(0)
        assert processor is not None
        source = StoredFeatures(base, image_arguments(base, processor.blank_tensors([image.size]), world.device))
        numbers = ImageFeatures(base_dtype(base), len(source.forms) * source.width)

        def compute(files: Files) -> None:
            of_files = zip({table.folder: table for table in tables}.values(), files, strict=True)
            chunks = [
                Chunk(table, file, *bounds)
                for table, file in of_files
                if file is not None
                for bounds in _bounds(table.distinct_images[2], tokens)
            ]

            def work() -> None:
                for chunk, tensors in islice(read, 1):
                    made = source.features(image_arguments(base, tensors, world.device))
                    chunk.write(made.to(numbers.dtype))

            rounds = range(-(-len(chunks) // world.size))
            read = _ahead(chunks[world.rank :: world.size])
            with closing(read), phase(f"Computing {numbers.title}", len(rounds), "batches") as progress:
                for _ in progress.over(rounds):
                    together(world, work)

        described = {**base.config.to_dict(), "text_config": None}
        keep(tables, numbers, [common_checksum(parts, world), described, options], world, compute)
    model.train(was_training)
    source.begin()
    return source


def _bounds(starts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Divide images into ranges with at most `most` features together, or of one image. `starts`: where the features
    of each image begin, and their number."""
    first = 0
    while first < len(starts) - 1:
        end = max(int(np.searchsorted(starts, starts[first] + most, "right")) - 1, first + 1)
        yield first, end
        first = end


def _ahead(chunks: Sequence[Chunk]) -> Generator[tuple[Chunk, Tensors]]:
    """Yield the chunks with the tensors of their images, which threads read ahead."""
    threads = max(1, min(THREADS, cores() - 1))
    with ThreadPoolExecutor(threads) as pool:
        rest = iter(chunks)
        waiting = deque((chunk, pool.submit(chunk.tensors)) for chunk in islice(rest, 2 * threads))
        while waiting:
            chunk, tensors = waiting.popleft()
            yield chunk, tensors.result()
            waiting.extend((chunk, pool.submit(chunk.tensors)) for chunk in islice(rest, 1))
