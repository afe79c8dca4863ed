"""Decoders that also read images: AutoModelForImageTextToText of transformers.

A vision encoder turns the patches of an image into features, a projector brings the features to the width of the
language model, and there they take the place of the embeddings of placeholder tokens. The language model is a decoder
as any other, and techniques act on it alone. Rows without images pass through the language model and its head only.

What the families differ in, beside the names of the parts:

- Positions. Rotary embeddings of Qwen's models have three axes (M-RoPE): a token of text counts on all axes, a token
  of an image has its time, row and column. transformers computes these positions for one document a row, so
  rope_positions() computes them here, a document at a time. forward() gets four axes: the first has the positions of
  the text, by which transformers tells packed documents apart.
- Attention. In Gemma 3, and in Gemma 4 by its config, all tokens of an image see each other.
- Tensors. Vision encoders with images of one size take a batch of them, Qwen's take the patches of all images in one
  list, and Idefics has a dimension for documents. merge() joins the tensors of several documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.models.kinds.decoder import Decoder
from fxtune.models.kinds.image_families import FAMILIES, Tensors, in_one_row
from fxtune.models.kinds.tower_shape import TowerShape
from fxtune.system.oom import out_of_memory_reason

OTHER_TOKENS = ("image_token_id", "video_token_id", "audio_token_id")
"""Options of configs: tokens whose embeddings are replaced."""


def rope_positions(ids: torch.Tensor, images: Tensors, image_token: int, merged: int) -> torch.Tensor:
    """M-RoPE positions, int64 [3, tokens], of one document: time, row and column.

    Each token of text is one step on all axes. The tokens of an image share the position where it begins, plus their
    row and their column; the text goes on after the larger of its height and width (arXiv 2409.12191, 2.1).

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


class ImageDecoder(Decoder):
    auto_class = "AutoModelForImageTextToText"
    pipeline_tag = "image-text-to-text"
    reads_images = True

    @property
    def families(self) -> Collection[str]:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        return FAMILIES.keys() & MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()

    def takes(self, config: Any, own_code: bool = True) -> bool:
        return config.model_type in self.families and getattr(config, "vision_config", None) is not None

    def model_class(self, config_class: type) -> Any:
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]

    def body(self, model: Any) -> nn.Module:
        body: nn.Module = model.model
        return body

    def projectors(self, model: Any) -> list[nn.Module]:
        return [model.model.get_submodule(name) for name in FAMILIES[model.config.model_type].projector]

    def towers(self, model: Any) -> list[nn.Module]:
        return [model.model.get_submodule(FAMILIES[model.config.model_type].tower)]

    def tower_layers(self, model: Any) -> list[nn.Module]:
        beside = {part for projector in self.projectors(model) for part in projector.modules()}
        found: list[nn.Module] = []
        for tower in self.towers(model):
            lists = [part for part in tower.modules() if isinstance(part, nn.ModuleList) and part not in beside]
            sizes = [sum(weight.numel() for weight in layers.parameters()) for layers in lists]
            found += lists[sizes.index(max(sizes))]
        return found

    def tower_configs(self, config: Any) -> list[Any]:
        return [config.vision_config]

    def tower_shape(self, config: Any) -> TowerShape:
        return FAMILIES[config.model_type].shape(config)

    def positions(self, config: Any, position_ids: torch.Tensor, rope_positions: torch.Tensor | None) -> torch.Tensor:
        if not FAMILIES[config.model_type].m_rope:
            return position_ids
        of_images = position_ids.expand(3, -1, -1) if rope_positions is None else rope_positions
        return torch.cat([position_ids[None], of_images])

    def rope_positions(self, config: Any) -> Callable[[torch.Tensor, Tensors], torch.Tensor] | None:
        if not FAMILIES[config.model_type].m_rope:
            return None
        return partial(
            rope_positions, image_token=config.image_token_id, merged=config.vision_config.spatial_merge_size
        )

    def merge(self, config: Any) -> Callable[[Sequence[Tensors]], Tensors]:
        return FAMILIES[config.model_type].merge

    def pixel_dtype(self, config: Any, weights: torch.dtype) -> torch.dtype:
        return weights if FAMILIES[config.model_type].casts_pixels else torch.float32

    def divided_images(self, model: Any, images: Tensors, documents: Sequence[torch.Tensor]) -> list[Tensors]:
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
        name = FAMILIES[config.model_type].token_types
        return {name: (ids == config.image_token_id).long()} if name else {}

    def sees_both_ways(self, config: Any) -> bool:
        return FAMILIES[config.model_type].two_way(config)

    def image_blocks(self, config: Any, ids: torch.Tensor) -> torch.Tensor | None:
        if not self.sees_both_ways(config):
            return None
        inside = ids == config.image_token_id
        begins = inside & ~F.pad(inside, (1, -1))
        return torch.where(inside, begins.cumsum(-1), 0)

    def image_features(self, model: Any, images: int = 1) -> list[torch.Tensor]:
        base = _base(model)
        given = self.merge(base.config)([_example(base)] * images)
        found = base.model.get_image_features(**given, return_dict=True)
        return [*_tensors([found.pooler_output, getattr(found, "deepstack_features", None) or ()])]

    def image_row(self, model: Any) -> tuple[torch.Tensor, Tensors]:
        base = _base(model)
        images, text = _example(base), base.config.get_text_config()
        with torch.no_grad():
            found = base.model.get_image_features(**images, return_dict=True).pooler_output
        numbers = sum(features.numel() for features in _tensors([found]))
        replaced = {getattr(base.config, name, None) for name in OTHER_TOKENS}
        words = [token for token in range(text.vocab_size) if token not in replaced][2:10]
        ids = [*words[:3], *[base.config.image_token_id] * (numbers // text.hidden_size), *words[3:]]
        return torch.tensor([ids], device=base.device), images

    def image_probe(self, model: Any) -> Tensors:
        if any(weight.is_meta for weight in model.parameters()):
            return {}
        try:
            ids, images = self.image_row(model)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if out_of_memory_reason(error):
                raise
            return {}
        return {"input_ids": ids, **images, **self.token_types(model.config, ids)}

    def untrained_parts(self, config: Any) -> str:
        return "its language model and head are trained; its vision encoder and projector stay (optimizer.lr_vision)"


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _tensors(found: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in nested lists."""
    for part in found:
        if isinstance(part, torch.Tensor):
            yield part
        else:
            yield from _tensors(part)


def _example(base: Any) -> Tensors:
    """The tensors of a small image on the vision encoder's device."""
    given = FAMILIES[base.config.model_type].example(base.config)
    dtypes = {name: base.dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in given.items()}
    tower = base.model.get_submodule(FAMILIES[base.config.model_type].tower)
    device = next(tower.parameters()).device
    return {name: tensor.to(device, dtypes[name]) for name, tensor in given.items()}
