"""How a model reads images: its parts for images, the tensors that it takes, and small images for proofs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.models.kinds.image_decoder.encoder_shape import EncoderShape
from fxtune.models.kinds.image_decoder.families import FAMILIES, Tensors, in_one_row
from fxtune.system.process.oom import out_of_memory_reason

OTHER_TOKENS = ("image_token_id", "video_token_id", "audio_token_id")
"""Options of configs that name tokens whose embeddings are replaced."""


class Images:
    def projectors(self, model: Any) -> list[nn.Module]:
        """The projectors of a model without adapters. They come after its vision encoders, or are inside them."""
        return [model.model.get_submodule(name) for name in FAMILIES[model.config.model_type].projector]

    def vision_encoders(self, model: Any) -> list[nn.Module]:
        """The modules of a model without adapters that make features of images."""
        return [model.model.get_submodule(FAMILIES[model.config.model_type].encoder)]

    def parameters(self, model: Any) -> list[nn.Parameter]:
        """The parameters of a model without adapters that images alone reach: parameters of vision encoders, of
        projectors, and directly of the module that holds both."""
        parts = (*self.vision_encoders(model), *self.projectors(model))
        inside = (weight for part in parts for weight in part.parameters())
        return list(dict.fromkeys([*inside, *model.model.parameters(recurse=False)]))

    def layers(self, model: Any) -> list[nn.Module]:
        """The layers of the vision encoders of a model without adapters, first to last."""
        beside = {part for projector in self.projectors(model) for part in projector.modules()}
        found: list[nn.Module] = []
        for encoder in self.vision_encoders(model):
            lists = [part for part in encoder.modules() if isinstance(part, nn.ModuleList) and part not in beside]
            sizes = [sum(weight.numel() for weight in layers.parameters()) for layers in lists]
            found += lists[sizes.index(max(sizes))]
        return found

    def configs(self, config: Any) -> list[Any]:
        """The configs of vision_encoders() in a model's config."""
        return [config.vision_config]

    def shape(self, config: Any) -> EncoderShape:
        """The sizes that decide how much the vision encoder of a model of this config computes for an image."""
        return FAMILIES[config.model_type].shape(config)

    def positions(self, config: Any, position_ids: torch.Tensor, rope_positions: torch.Tensor | None) -> torch.Tensor:
        """The positions for forward(). `position_ids` [rows, tokens] and `rope_positions` are fields of Batch."""
        if not FAMILIES[config.model_type].m_rope:
            return position_ids
        of_images = position_ids.expand(3, -1, -1) if rope_positions is None else rope_positions
        return torch.cat([position_ids[None], of_images])

    def rope_positions(self, config: Any) -> Callable[[torch.Tensor, Tensors], torch.Tensor] | None:
        """For families with M-RoPE: a function that computes positions, int64 [3, tokens], from a document's ids,
        int64 [tokens], and the tensors of its images. It can be pickled. None for other families."""
        if not FAMILIES[config.model_type].m_rope:
            return None
        return partial(
            _rope_positions, image_token=config.image_token_id, merged=config.vision_config.spatial_merge_size
        )

    def merge(self, config: Any) -> Callable[[Sequence[Tensors]], Tensors]:
        """A function that joins the image tensors of each document to the tensors of a micro-batch. It can be
        pickled."""
        return FAMILIES[config.model_type].merge

    def pixel_dtype(self, config: Any, weights: torch.dtype) -> torch.dtype:
        """The dtype of pixels that gives the same bits as float32 pixels."""
        return weights if FAMILIES[config.model_type].casts_pixels else torch.float32

    def divided(self, model: Any, images: Tensors, documents: Sequence[torch.Tensor]) -> list[Tensors]:
        """Divide `images`, a result of merge(), into the tensors of each document's images: {} for a document without
        images. `documents`: the ids of each document. The model runs its vision encoder to count the features of the
        images."""
        base, family = _base(model), FAMILIES[model.config.model_type]
        with torch.no_grad():
            features = base.model.get_image_features(**images, return_dict=True).pooler_output
        wanted = [int((ids == base.config.image_token_id).sum()) for ids in documents]
        units = images["pixel_values"].shape[1] if family.merge is in_one_row else len(features)
        sizes = [len(part) for part in features] if len(features) == units else [sum(wanted) // units] * units
        bounds = [0, *itertools.accumulate(sizes)]
        ends = [bounds.index(count) for count in itertools.accumulate(wanted)]
        found = family.divide(images, [end - begin for begin, end in itertools.pairwise([0, *ends])])
        return [own if count else {} for own, count in zip(found, wanted, strict=True)]

    def token_types(self, config: Any, ids: torch.Tensor) -> Tensors:
        """The argument that marks the image tokens in `ids` for a plain forward pass, as the processor makes it. Empty
        if this family has no such argument."""
        name = FAMILIES[config.model_type].token_types
        return {name: (ids == config.image_token_id).long()} if name else {}

    def sees_both_ways(self, config: Any) -> bool:
        """Whether the tokens of an image see each other. blocks() then returns a tensor."""
        return FAMILIES[config.model_type].two_way(config)

    def blocks(self, config: Any, ids: torch.Tensor) -> torch.Tensor | None:
        """int64 [rows, tokens]: one number for all tokens of an image, and 0 for text. Tokens of one image see each
        other. None: attention is causal in images, too."""
        if not self.sees_both_ways(config):
            return None
        inside = ids == config.image_token_id
        begins = inside & ~F.pad(inside, (1, -1))
        return torch.where(inside, begins.cumsum(-1), 0)

    def features(self, model: Any, images: int = 1) -> list[torch.Tensor]:
        """The tensors that the decoder gets from vision encoders and projectors for small images, all alike. `model`:
        with or without adapters; it must have weights."""
        base = _base(model)
        given = self.merge(base.config)([_example(base)] * images)
        found = base.model.get_image_features(**given, return_dict=True)
        return [*_tensors([found.pooler_output, getattr(found, "deepstack_features", None) or ()])]

    def row(self, model: Any) -> tuple[torch.Tensor, Tensors]:
        """A small row with one image on the model's device: ids [1, tokens], and the tensors of the image. The vision
        encoder must have weights."""
        base = _base(model)
        images, text = _example(base), base.config.get_text_config()
        with torch.no_grad():
            found = base.model.get_image_features(**images, return_dict=True).pooler_output
        numbers = sum(features.numel() for features in _tensors([found]))
        replaced = {getattr(base.config, name, None) for name in OTHER_TOKENS}
        words = [token for token in range(text.vocab_size) if token not in replaced][2:10]
        ids = [*words[:3], *[base.config.image_token_id] * (numbers // text.hidden_size), *words[3:]]
        return torch.tensor([ids], device=base.device), images

    def probe(self, model: Any) -> Tensors:
        """The arguments of a plain forward pass over row(). Empty if the vision encoder takes no small image, or if
        its weights have no memory yet."""
        if any(weight.is_meta for weight in model.parameters()):
            return {}
        try:
            ids, images = self.row(model)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if out_of_memory_reason(error):
                raise
            return {}
        return {"input_ids": ids, **images, **self.token_types(model.config, ids)}


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _tensors(found: Iterable[Any]) -> Iterator[torch.Tensor]:
    for part in found:
        if isinstance(part, torch.Tensor):
            yield part
        else:
            yield from _tensors(part)


def _example(base: Any) -> Tensors:
    """The tensors of a small image on the vision encoder's device."""
    given = FAMILIES[base.config.model_type].example(base.config)
    dtypes = {name: base.dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in given.items()}
    encoder = base.model.get_submodule(FAMILIES[base.config.model_type].encoder)
    device = next(encoder.parameters()).device
    return {name: tensor.to(device, dtypes[name]) for name, tensor in given.items()}


def _rope_positions(ids: torch.Tensor, images: Tensors, image_token: int, merged: int) -> torch.Tensor:
    """M-RoPE positions (arXiv 2409.12191, 2.1), int64 [3, tokens], of one document: time, row and column.

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
