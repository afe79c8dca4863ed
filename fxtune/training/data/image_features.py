"""Features of images, computed by a frozen vision encoder once before the first step and kept beside the token table.

The file has the features of each distinct image of the table, in the dtype of the model's weights. Its name is a hash
of the vision encoder's and the projector's weights and of the model's config; the folder's name depends on images and
processor (stored_numbers.py). Each image is computed by itself. The loader's workers decode the images.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from fxtune.data.batches.batch import ON_HOST, Batch, BatchSpec
from fxtune.data.batches.layout import BatchSizes
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.batches.plan import Plan
from fxtune.data.images.processor import OF_TEXT
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.models.kinds.image_decoder.parts import for_images, projectors, vision_encoders
from fxtune.models.kinds.image_decoder.stored_features import StoredFeatures
from fxtune.models.kinds.known import images_of
from fxtune.models.structure import base_dtype, hooked, image_arguments, observing, outputs
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.base import NO_IMAGE, Evidence
from fxtune.techniques.precision import Precision
from fxtune.training.data.stored_numbers import StoredFile, keep, weights_checksum
from fxtune.training.visits import visit


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


class _EachImage:
    """The part of a Plan that Loader reads. A step has a distinct image of `tables` for each rank, without other
    tokens. In the last step ranks may repeat the last image."""

    def __init__(self, tables: Sequence[TokenTable], rank: int, ranks: int) -> None:
        counts = [len(table.distinct_images[0]) for table in tables]
        self.tables, self.sizes = tables, BatchSizes(1, ranks, rank=rank, ranks=ranks)
        self._source = np.repeat(np.arange(len(tables)), counts)
        self._number = np.concatenate([np.arange(count) for count in counts])
        self.steps = -(-len(self._source) // ranks)

    def image(self, step: int) -> tuple[int, int]:
        """(the index of the table, the number of the distinct image) of this rank's image."""
        at = min(step * self.sizes.ranks + self.sizes.rank, len(self._source) - 1)
        return int(self._source[at]), int(self._number[at])

    def micro_batches(self, step: int) -> int:
        return 1

    counted_micro_batches = micro_batches

    def batch_spec(self, step: int, micro: int) -> BatchSpec:
        source, number = self.image(step)
        table: Any = self.tables[source]
        start, tokens = (table.images[name][table.distinct_images[0][[number]]] for name in ("start", "tokens"))
        return BatchSpec(np.array([source]), start, tokens, np.array([0, 1]), int(tokens[0]), True, 0, slots=1)


def use_stored_features(model: LanguageModel, table: TokenTable, precision: Precision, world: World) -> Evidence:
    """Let the model take stored features of images, and observe it with the features of a small image. The vision
    encoder then is in host memory. `table`: has images. Raises ConfigError if a plugin trains the vision encoder."""
    base = model.model.get_base_model() if hasattr(model.model, "get_base_model") else model.model
    frozen = {id(weight) for weight in for_images(base)}
    for name, weight in base.named_parameters():
        if weight.requires_grad and id(weight) in frozen:
            raise ConfigError(f"data.image_features: stored, but a plugin trains {name}. Set it to computed.")
    processor: Any = table.image_processor
    example = processor.blank_tensors([table.image(0).size])
    example = {name: value.to(None if name in ON_HOST else world.device) for name, value in example.items()}
    calls, observed, is_close = list[int](), NO_IMAGE, True
    with observing(base), precision.context(world.device):
        source = model.prepared.stored_features = StoredFeatures(base, image_arguments(base, example))
        if row := images_of(base.config).probe(base):
            computed = outputs(base, **row)
            images = {name: value for name, value in row.items() if name not in OF_TEXT}
            row["pixel_values"] = source.features(images).to(base_dtype(base)).flatten()
        source.begin()
        if row:
            with hooked(part.register_forward_hook(lambda *_: calls.append(0)) for part in source.parts):
                moved = float((outputs(base, **row) - computed).abs().max())
            is_close = moved <= 1e-2 * float(computed.abs().max())
            observed = f"logits within {moved:.2g} of computed features, {len(calls)} calls of the vision encoder"
    devices = {weight.device.type for part in source.parts for weight in part.parameters()}
    observed += f"; the vision encoder is on {' and '.join(sorted(devices))}"
    return Evidence(
        "data", "stored features of images, no vision encoder", observed, is_close and not calls and devices == {"cpu"}
    )


@torch.no_grad()
def store_features(
    model: LanguageModel,
    tables: Sequence[TokenTable],
    options: Any,
    loader: LoaderConfig,
    precision: Precision,
    world: World,
) -> None:
    """Give each of `tables`, which have images, the features of these. Call use_stored_features() before.

    `options`: whatever else changes the features. Raises StorageError if the files do not fit on the disk or cannot be
    written, DataError if an image cannot be read.
    """
    source = model.prepared.stored_features
    assert source is not None
    base = source.model
    numbers = ImageFeatures(base_dtype(base), len(source.forms) * source.width)
    (name,), bits = numbers.record.names or (), getattr(torch, f"int{8 * numbers.dtype.itemsize}")

    def compute(files: list[Any]) -> None:
        missing = [(table, file) for table, file in zip(distinct, files, strict=True) if file is not None]
        plan = _EachImage([table for table, _ in missing], world.rank, world.size)

        def write(batch: Batch, step: int, position: int, is_counted: bool) -> None:
            at, number = plan.image(step)
            (table, file), images = missing[at], batch.images or {}
            first, end = table.distinct_images[2][number : number + 2]
            made = source.features(image_arguments(base, images)).to(numbers.dtype)
            assert len(made) == end - first, "the processor counts other features"
            file[name][first:end] = made.flatten(1).view(bits).cpu().numpy()

        with closing(Loader(cast(Plan, plan), loader, world.device)) as batches:
            visit(model, batches, precision, world, "Computing features of images", write, shown=True)

    distinct = list({table.folder: table for table in tables}.values())
    described = {**base.config.to_dict(), "text_config": None}
    with source.encoder_on_device():
        own = nn.ParameterList(base.model.parameters(recurse=False))
        weights = weights_checksum(nn.ModuleList([*vision_encoders(base), *projectors(base), own]))
        keep(tables, numbers, [weights, described, options, str(numbers.dtype)], world, compute)
