"""Documents of preferences: a prompt that all answers of a row share, and an answer, which alone is learned.

Formats compare prompts by whole messages. A chat template may still write the same messages otherwise before another
answer, and a tokenizer may join the end of a prompt with one answer. So the tokens are compared, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fxtune.data.images.placed import without


def prompt_tokens(document: Any) -> int:
    """How many tokens of a document (`ids` and `supervised`) precede its answer; all if no token is learned."""
    supervised: list[bool] = document.supervised
    return supervised.index(True) if True in supervised else len(supervised)


def faults(documents: Sequence[Any], names: Sequence[str]) -> str:
    """Why a row cannot be learned; empty if it can. `names`: the names of its answers."""
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
    """The documents of a row, each without the same tokens at the beginning of its prompt, so that they fit; None if
    this would cut an answer, or an image that the answers may be about.

    Args:
        longest: tokens of a row; with `packing` it holds all documents, otherwise each has a row.
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
    # A token before an image stays, because some templates write one that opens the image.
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
