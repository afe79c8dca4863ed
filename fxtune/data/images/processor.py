"""Token ids and tensors of images, made by the model family's own processor (transformers).

A chat template writes a placeholder for an image. The processor replaces it by the image's tokens: one for each
feature of the vision encoder, and in some families marks around tiles or lines. The number of tokens depends only on
the image's size, so tokenization calls the processor once for each size, with a blank image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fxtune.data.formats.values import RowError
from fxtune.data.images.decode import decode
from fxtune.data.images.reference import ImageReference
from fxtune.errors import ConfigError, first_line

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Tensors = dict[str, "torch.Tensor"]
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
"""Outputs of a processor that belong to the text. The other outputs belong to the images."""
KNOWN_SIZES = 10_000
"""The results for this many sizes of images are kept."""


@dataclass(frozen=True)
class ImageText:
    """What a processor writes in place of a placeholder."""

    before: str
    """Characters before the image's first token (Gemma 3: two newlines). They count as text, because the tokenizer may
    merge them with the text around the image."""
    ids: list[int]
    after: str


class ImageProcessor:
    """The processor of a model family. Picklable.

    Args:
        processor: transformers' processor of the model, with the tokenizer of the run.
        merge: joins the image tensors of documents to the tensors of a micro-batch.
        rope_positions: a function of families with M-RoPE: (ids of a document, int64 [tokens]; tensors of its images)
            -> positions, int64 [3, tokens].
        pixels: the dtype of the pixels; None: float32, as the processor makes them.
    """

    def __init__(
        self,
        processor: Any,
        merge: Callable[[Sequence[Tensors]], Tensors],
        rope_positions: Callable[[torch.Tensor, Tensors], torch.Tensor] | None = None,
        pixels: torch.dtype | None = None,
    ) -> None:
        self.processor, self.merge, self.rope_positions, self.pixels = processor, merge, rope_positions, pixels
        tokenizer = processor.tokenizer
        self._added = tokenizer.added_tokens_decoder
        names = [str(getattr(processor, name, "")) for name in ("image_token", "boi_token")]
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.placeholders = {name: vocabulary[name] for name in dict.fromkeys(names) if name in vocabulary}
        """The tokens that chat templates write for an image, and their ids."""

    def bound(self, least: int | None, most: int | None) -> None:
        """Make the processor resize images to at least `least` and at most `most` tokens. Raises ConfigError if the
        processor of this family has no such bounds."""
        if least is None and most is None:
            return
        image_processor = self.processor.image_processor
        size = dict(getattr(image_processor, "size", None) or {})
        side = getattr(image_processor, "merge_size", 0) * getattr(image_processor, "patch_size", 0)
        if not side or size.keys() != {"shortest_edge", "longest_edge"}:
            raise ConfigError(
                f"data.image_tokens: {type(self.processor).__name__} has no bounds for the tokens of an image (the "
                "processors of Qwen's models have them). Leave the key out."
            )
        bounds = {"shortest_edge": least, "longest_edge": most}
        size |= {name: tokens * side**2 for name, tokens in bounds.items() if tokens is not None}
        if size["shortest_edge"] > size["longest_edge"]:
            raise ConfigError(
                f"data.image_tokens: at least {size['shortest_edge'] // side**2:,} tokens and at most "
                f"{size['longest_edge'] // side**2:,}. Set both bounds, the smaller one as min."
            )
        image_processor.size = size
        type(self).text.cache_clear()
        type(self).without_pixels.cache_clear()

    @property
    def feature_token(self) -> int:
        """The id of the token that a feature of the vision encoder replaces."""
        named = getattr(self.processor.tokenizer, "image_token_id", None)  # Gemma 3's placeholder is another token
        return next(iter(self.placeholders.values())) if named is None else int(named)

    @property
    def modules(self) -> list[str]:
        """Names of the modules that a process imports to unpickle this object."""
        parts = self.processor, self.processor.image_processor, self.processor.tokenizer
        return sorted({kind.__module__ for part in parts for kind in type(part).__mro__})

    @property
    def identity(self) -> list[Any]:
        """All settings that determine the tokens of an image, for the key of the token cache."""
        own = {name: value for name, value in vars(self.processor).items() if isinstance(value, (str, int, float))}
        image_processor = self.processor.image_processor
        described = json.loads(json.dumps(image_processor.to_dict(), default=str))
        return [type(self.processor).__name__, own, type(image_processor).__name__, described]

    @lru_cache(KNOWN_SIZES)  # noqa: B019  a process has one processor, until it ends
    def text(self, height: int, width: int, placeholder: str) -> ImageText:
        """What the processor writes in place of `placeholder` for an image of this size. Raises RowError if the
        processor refuses the size."""
        ids = list(self._call([placeholder], [[self._blank(height, width)]])["input_ids"][0])
        added = [index for index, token in enumerate(ids) if token in self._added]
        if not added:
            raise RowError(f"the model's processor makes no token of an image of {width} x {height} pixels")
        first, end = added[0], added[-1] + 1
        before, after = (
            self.processor.tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for part in (ids[:first], ids[end:])
        )
        return ImageText(before, ids[first:end], after)

    def tensors(self, images: Sequence[Image]) -> Tensors:
        """Arguments of the model's forward for the images of one document. Raises RowError."""
        found = self._call([next(iter(self.placeholders)) * len(images)], [list(images)], return_tensors="pt")
        tensors: Tensors = {name: value for name, value in found.items() if name not in OF_TEXT}
        return {name: value.to(self.pixels) if value.is_floating_point() else value for name, value in tensors.items()}

    def blank_tensors(self, sizes: Sequence[tuple[int, int]]) -> Tensors:
        """tensors() of black images of these (height, width), made much faster. Raises RowError."""
        return self.tensors([self._blank(height, width) for height, width in sizes])

    @lru_cache(KNOWN_SIZES)  # noqa: B019  as above
    def without_pixels(self, height: int, width: int) -> Tensors:
        """tensors() of an image of this size, except for `pixel_values`."""
        return {name: own for name, own in self.blank_tensors([(height, width)]).items() if name != "pixel_values"}

    def _blank(self, height: int, width: int) -> Any:
        from fxtune.upstream.image_processing import blank

        return blank(self.processor.image_processor, height, width)

    def read(self, references: Sequence[ImageReference]) -> Tensors:
        """tensors() of the images of `references`. Raises RowError with the name of an image that has changed."""
        images = []
        for reference in references:
            try:
                images.append(decode(reference.read()))
            except RowError as reason:
                raise RowError(f"{reference.name}: {reason}") from None
        return self.tensors(images)

    def seen(self, image: Image) -> Image:
        """The resized image that the model sees; the image itself if the model sees tiles of it. Raises RowError."""
        import torch

        tensors, image_processor = self.tensors([image]), self.processor.image_processor
        pixels = tensors["pixel_values"].float()
        if "image_grid_thw" in tensors:
            side, merged = image_processor.patch_size, image_processor.merge_size
            rows, columns = (int(count) // merged for count in tensors["image_grid_thw"][0, 1:])
            patches = pixels.view(rows, columns, merged, merged, 3, -1, side, side)[:, :, :, :, :, 0]  # one frame
            pixels = patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * merged * side, columns * merged * side)
        if pixels.dim() != 4 or len(pixels) > 1:
            return image
        mean, deviation = (
            torch.tensor(values)[:, None, None] for values in (image_processor.image_mean, image_processor.image_std)
        )
        shown = (pixels[0] * deviation + mean).clamp(0, 1).mul(255).round().byte()
        from PIL import Image

        return Image.fromarray(shown.permute(1, 2, 0).numpy())

    def _call(self, text: list[str], images: list[list[Image]], **options: Any) -> Any:
        try:
            return self.processor(text=text, images=images, add_special_tokens=False, **options)
        except Exception as error:  # noqa: BLE001 - the processors of families raise anything
            raise RowError(f"the model's processor takes no such image ({first_line(error)})") from None
