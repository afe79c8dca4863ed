"""Features of images, computed by a frozen vision encoder once before the first step and kept beside the token table.

The file has the features of each distinct image of the table, in the dtype of the model's weights. Its name is a hash
of the vision encoder's and the projector's weights and of the model's config; the folder's name depends on images and
processor (stored_numbers.py). Each image is computed by itself. The loader's workers decode the images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import nn

from fxtune.data.batches.batch import Batch, BatchSpec
from fxtune.data.batches.layout import BatchSizes
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.batches.plan import Plan
from fxtune.data.images.processor import OF_TEXT, ImageProcessor
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.models.kinds.image_decoder.parts import for_images
from fxtune.models.kinds.image_decoder.stored_features import StoredFeatures
from fxtune.models.kinds.known import images_of
from fxtune.models.structure import base_dtype, hooked, image_arguments, observing, outputs
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.base import NO_IMAGE, Evidence
from fxtune.techniques.pipeline import Pipeline
from fxtune.training.data.stored_numbers import Files, StoredFile, keep, weights_checksum
from fxtune.training.visits import visit


@dataclass(frozen=True)
class ImageFeatures(StoredFile):
    kind: ClassVar[str] = "image_features"
    title: ClassVar[str] = "features of images"
    key: ClassVar[str] = "data.image_features"
    field: ClassVar[str] = "features"
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


class _EachImage:
    """The part of a Plan that Loader reads. A step of a rank has one distinct image: images[step] is (index of the
    table, number of the distinct image). In the last step some ranks repeat the last image."""

    def __init__(self, tables: Sequence[TokenTable], world: World) -> None:
        self.tables, self.sizes = tables, BatchSizes(1, 1, ranks=world.size)
        every = [(at, number) for at, table in enumerate(tables) for number in range(len(table.distinct_images[0]))]
        self.images = [every[min(at + world.rank, len(every) - 1)] for at in range(0, len(every), world.size)]
        self.steps = len(self.images)

    def micro_batches(self, step: int) -> int:
        return 1

    counted_micro_batches = micro_batches

    def batch_spec(self, step: int, micro: int) -> BatchSpec:
        source, number = self.images[step]
        table: Any = self.tables[source]
        start, tokens = (table.images[name][table.distinct_images[0][[number]]] for name in ("start", "tokens"))
        return BatchSpec(np.array([source]), start, tokens, np.array([0, 1]), int(tokens[0]), True, 0, slots=1)


def _write(entries: np.ndarray, features: torch.Tensor, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    entries[:] = features.numpy()


def use_stored_features(model: LanguageModel, table: TokenTable, techniques: Pipeline, world: World) -> Evidence:
    """Let the model take stored features of images, and observe it on a small row. The vision encoder then is in host
    memory. `table`: has images. Raises ConfigError if a plugin trains the vision encoder."""
    base = model.model.get_base_model() if hasattr(model.model, "get_base_model") else model.model
    encoder, processor, calls = {*for_images(base)}, cast(ImageProcessor, table.image_processor), list[int]()
    if trained := [name for name, weight in base.named_parameters() if weight.requires_grad and weight in encoder]:
        raise ConfigError(f"data.image_features: stored, but a plugin trains {trained[0]}. Set it to computed.")
    seen, acted = NO_IMAGE, True
    with observing(base), techniques.precision.context(world.device):
        example = image_arguments(base, processor.blank_tensors([table.image(0).size]), world.device)
        source = model.prepared.stored_features = StoredFeatures(base, example)
        if row := images_of(base.config).probe(base):
            computed = outputs(model.model, **row)
            images = {name: value for name, value in row.items() if name not in OF_TEXT}
            row["pixel_values"] = source.features(images).to(base_dtype(base)).flatten()
        source.begin()
        if row:
            with hooked(part.register_forward_hook(lambda *_: calls.append(0)) for part in source.parts):
                moved = float((outputs(model.model, **row) - computed).abs().max())
            acted = not calls and moved <= 1e-2 * float(computed.abs().max())
            seen = f"{len(calls)} calls of the vision encoder; {moved:.2g} from the logits of computed features"
    in_host = all(weight.device.type == "cpu" for part in source.parts for weight in part.parameters())
    return Evidence("data", "stored image features", f"{seen}; encoder in host memory: {in_host}", acted and in_host)


def store_features(
    model: LanguageModel, tables: Sequence[TokenTable], techniques: Pipeline, loader: LoaderConfig, world: World
) -> None:
    """Give each of `tables`, which have images, the features of these. Call use_stored_features() before.

    Raises StorageError if the files do not fit on the disk or cannot be written, DataError if an image cannot be read.
    """
    source = cast(StoredFeatures, model.prepared.stored_features)
    base, options = source.model, [techniques.options().get(name) for name in ("precision", "plugins")]
    numbers = ImageFeatures(base_dtype(base), len(source.forms) * source.width)
    (name,), bits = numbers.record.names or (), getattr(torch, f"int{8 * numbers.dtype.itemsize}")

    def compute(files: Files) -> None:
        plan = _EachImage([*{table.folder: table for table in tables if table.folder in files}.values()], world)
        write_last: Callable[[], None] | None = None

        def write(batch: Batch, step: int, position: int, is_counted: bool) -> None:
            nonlocal write_last
            at, number = plan.images[step]
            table, made = plan.tables[at], source.features(image_arguments(base, batch.images or {}))
            first, end = table.distinct_images[2][number : number + 2]
            assert len(made) == end - first, "the processor counts other features"
            # The copy lies in pinned memory.
            found = made.to(numbers.dtype).flatten(1).view(bits).to("cpu", non_blocking=True)
            copied = torch.cuda.current_stream().record_event() if world.device.type == "cuda" else None
            if write_last:
                write_last()  # the device computes this image meanwhile
            write_last = partial(_write, files[table.folder][name][first:end], found, copied)

        with source.encoder_on_device(), closing(Loader(cast(Plan, plan), loader, world.device)) as batches:
            # Layers are compiled for training mode. The vision encoder has no dropout.
            title = "Computing features of images"
            visit(model, batches, techniques.precision, world, title, write, shown=True, eval_mode=False)
        if write_last:
            write_last()

    described = {**base.config.to_dict(), "text_config": None}
    own = nn.ParameterList(base.model.parameters(recurse=False))
    weights = sorted(set(world.gather(weights_checksum(nn.ModuleList([*source.parts, own])), "comparing weights")))
    keep(tables, numbers, [weights, described, options, str(numbers.dtype)], world, compute)
