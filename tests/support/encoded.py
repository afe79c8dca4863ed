"""What an encoder makes of one row, and the tokens of a document that are learned."""

from __future__ import annotations

import itertools
from typing import Any

from fxtune.data.chat.encode import Document, Encoder


def encoded(encoder: Encoder, row: Any) -> Document:
    (document,) = encoder.encode([row])
    assert isinstance(document, Document), document
    assert len(document.ids) == len(document.supervised)
    return document


def reason(encoder: Encoder, row: Any) -> str:
    (found,) = encoder.encode([row])
    assert isinstance(found, str), found
    return found


def learned(document: Document, tokenizer: Any) -> str:
    return tokenizer.decode([token for run in runs(document) for token in run])


def runs(document: Document) -> list[tuple[int, ...]]:
    """The tokens of each learned stretch."""
    pairs = itertools.groupby(zip(document.ids, document.supervised, strict=True), lambda pair: pair[1])
    return [tuple(token for token, _ in run) for is_learned, run in pairs if is_learned]
