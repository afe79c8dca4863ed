"""Documents of preferences. Each document has the prompt, which all answers of a row share, and one answer. Only the
answer is learned.

Formats compare the messages of prompts. But a chat template may write the same messages differently before another
answer, and a tokenizer may join the end of a prompt with one answer. So the tokens of prompts are compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fxtune.data.images.placed import without


def prompt_tokens(document: Any) -> int:
    """The number of tokens before the answer of a document (`ids`, `supervised`); all if no token is learned."""
    supervised: list[bool] = document.supervised
    return supervised.index(True) if True in supervised else len(supervised)


def faults(documents: Sequence[Any], names: Sequence[str]) -> str:
    """The reason why a row cannot be learned, or "". `names`: the names of its answers."""
    if empty := [name for name, document in zip(names, documents, strict=True) if not any(document.supervised[1:])]:
        return f"{empty[0]}: no token of the answer is learned"
    if len(documents) == 1:
        return ""
    chosen, rejected = documents
    if chosen.ids == rejected.ids:
        return "chosen and rejected have the same tokens, so there is nothing to prefer"
    before, other = prompt_tokens(chosen), prompt_tokens(rejected)
    if chosen.ids[:before] != rejected.ids[:other]:
        return (
            f"the prompt has other tokens before chosen ({before:,}) than before rejected ({other:,}): the chat "
            "template writes it otherwise before one answer, or a token lies across its end"
        )
    pictures = [
        [image.image.digest for image in document.images if image.start < before] for document in (chosen, rejected)
    ]
    if pictures[0] != pictures[1]:
        return "the prompt has other images before chosen than before rejected"
    return ""


def shortened(documents: Sequence[Any], longest: int, packing: bool, beginning: Sequence[int]) -> list[Any] | None:
    """The documents of a row with a shorter prompt, so that they fit: all lose the same tokens at its beginning. None
    if this would cut an answer, or an image that the answers may be about.

    Args:
        longest: tokens of a row of a batch. With `packing` it holds all documents, otherwise each document has a row.
        beginning: the tokens that the tokenizer puts before each text. They stay, because models need them.
    """
    lengths = [len(document.ids) for document in documents]
    over = -(-(sum(lengths) - longest) // len(lengths)) if packing else max(lengths) - longest
    first = documents[0]
    kept = len(beginning) if first.ids[: len(beginning)] == list(beginning) else 0
    # A token of the prompt stays, because a document's first token is never a target.
    if over > prompt_tokens(first) - max(kept, 1):
        return None
    cut = slice(kept, kept + max(over, 0))
    # The token before an image stays, because in some templates it opens the image.
    if over > 0 and any(image.start <= cut.stop for image in first.images):
        return None
    return [
        replace(
            document,
            ids=_without(document.ids, cut),
            supervised=_without(document.supervised, cut),
            images=without(document.images, cut.start, cut.stop),
        )
        for document in documents
    ]


def _without(values: list[Any], cut: slice) -> list[Any]:
    return values[: cut.start] + values[cut.stop :]
