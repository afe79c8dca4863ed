"""Puts the tokens of images in place of the placeholders that a chat template writes.

The processor writes characters around some images (Gemma 3: two newlines). They are tokenized with the text. After
that, the tokens of each image replace its placeholder. Tokens of images are never supervised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fxtune.data.formats.values import RowError
from fxtune.data.images.placed import PlacedImage
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.images.reference import ImageReference, find_image

Span = tuple[int, int]


class Placeholders:
    """The placeholders of a processor. `processor`: None for a model that reads text alone and has no placeholders."""

    def __init__(self, processor: ImageProcessor | None) -> None:
        self.processor = processor
        self.tokens = {} if processor is None else processor.placeholders

    def find_images(self, messages: Sequence[dict[str, Any]], folder: Path | None) -> None:
        """Replace each (place, name of an image) in messages by an ImageReference. Raises RowError."""
        for message in messages:
            if "images" in message:
                message["images"] = [self._find(place, value, folder) for place, value in message["images"]]

    def _find(self, place: str, value: Any, folder: Path | None) -> ImageReference:
        if self.processor is None:
            raise RowError(
                f"{place} has an image, and only text is read here: the model reads no images, or has no "
                "preprocessor_config.json. Choose a model that reads images, or remove such rows"
            )
        try:
            return find_image(value, folder)
        except RowError as reason:
            raise RowError(f"{place}: {reason}") from None

    def with_letters(
        self, text: str, spans: list[Span], images: Sequence[ImageReference], written: Callable[[str], str] = str
    ) -> tuple[str, list[Span], list[list[int]]]:
        """Add the characters around each image to a rendered text. Returns (the text, the spans at their places in
        this text, the ids of each image). `written`: gives the form of a placeholder in `text`. Raises RowError."""
        if self.processor is None:
            return text, spans, []
        tokens = {written(name): name for name in self.tokens}
        found = list(re.finditer("|".join(map(re.escape, tokens)), text))
        if len(found) != len(images):
            raise RowError(
                f"the chat template writes {len(found)} placeholders ({' or '.join(self.tokens)}) for "
                f"{len(images)} images"
            )
        ids, parts, at, moves = [], [], 0, []
        for match, image in zip(found, images, strict=True):
            try:
                letters = self.processor.text(*image.size, tokens[match.group()])
            except RowError as reason:
                raise RowError(f"{image.name}: {reason}") from None
            ids.append(letters.ids)
            parts += [text[at : match.start()], letters.before, match.group(), letters.after]
            moves.append((match.start(), len(letters.before) + len(letters.after)))
            at = match.end()

        def moved(position: int) -> int:
            return position + sum(length for start, length in moves if start < position)

        return "".join([*parts, text[at:]]), [(moved(start), moved(end)) for start, end in spans], ids

    def replace(
        self, ids: list[int], supervised: list[bool], images: Sequence[ImageReference], ids_of: Sequence[list[int]]
    ) -> tuple[list[int], list[bool], tuple[PlacedImage, ...]]:
        """Put the ids of each image, `ids_of`, in place of its placeholder. Returns (ids, supervised, images with
        their positions). Raises RowError."""
        if not self.tokens:
            return ids, supervised, ()
        numbers = set(self.tokens.values())
        at = [index for index, token in enumerate(ids) if token in numbers]
        if at and not images:
            raise RowError(
                f"the text holds {' or '.join(self.tokens)}, which stands for an image, and the row has no image there"
            )
        if len(at) != len(images):
            raise RowError(f"the tokenizer makes {len(at)} placeholders of the {len(images)} that stand for images")
        begin, placed = at[0] if at else len(ids), list[PlacedImage]()
        found, learned = ids[:begin], supervised[:begin]
        for (index, following), image, own in zip(pairwise([*at, len(ids)]), images, ids_of, strict=True):
            placed.append(PlacedImage(len(found), len(own), image))
            found += own + ids[index + 1 : following]
            learned += [False] * len(own) + supervised[index + 1 : following]
        return found, learned, tuple(placed)
