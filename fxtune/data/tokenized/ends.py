"""Finds the tokens that end answers in tokenized data, and a short question to try them on.

An end-of-answer token is a special token that ends a run of supervised tokens. It may differ from the tokenizer's
end-of-text token: a chat template may end a turn with `<|im_end|>`, while the tokenizer has `<|endoftext|>`. The
trained model then writes `<|im_end|>` and goes on, unless generation stops at this token, too. The tokens come from
the data, not from the template, so rows of every format count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from fxtune.data.chat.template_source import ChatTemplates
from fxtune.data.config import DataConfig
from fxtune.data.images.reference import ImageReference
from fxtune.data.tokenized.table import TokenTable

BLOCK = 1 << 24
"""Tokens that are in memory at a time."""
TRIED = 256
"""The question is chosen from the first TRIED documents of each source."""
LONGEST = 256
"""The largest number of tokens of an answer."""


@dataclass(frozen=True)
class ShortQuestion:
    prompt: list[int]
    """Token ids before the answer."""
    answer_tokens: int
    """The number of tokens of the answer, with the token that ends it."""
    images: tuple[ImageReference, ...] = ()
    """The images among the tokens of the prompt, in order."""


def learned_ends(tables: Sequence[TokenTable], tokenizer: Any) -> list[int]:
    """The special tokens that end a run of supervised tokens in a document, ascending."""
    special = np.array(
        sorted(number for number, token in tokenizer.added_tokens_decoder.items() if token.special), int
    )
    found: set[int] = set()
    for table in tables:
        last = np.asarray(table.offsets[1:]) - 1
        for begin in range(0, len(table.ids), BLOCK):
            supervised = np.asarray(table.supervised[begin : begin + BLOCK + 1])
            size = min(BLOCK, len(table.ids) - begin)
            ends = np.ones(size, np.bool_)  # the last token of the table ends a document
            ends[: len(supervised) - 1] = ~supervised[1:][:size]
            ends[last[np.searchsorted(last, begin) : np.searchsorted(last, begin + size)] - begin] = True
            ids = np.unique(np.asarray(table.ids[begin : begin + size])[ends & supervised[:size]])
            found |= set(ids[np.isin(ids, special)].tolist())
    return sorted(found)


def template_ends(tokenizer: Any, data: DataConfig) -> list[int]:
    """The special tokens with which the chat template ends an answer, ascending. None without a chat template."""
    if not tokenizer.chat_template and data.chat_template is None:
        return []
    templates = ChatTemplates(tokenizer, data.chat_template, data.chat_template_kwargs, data.template_time, None)
    template = templates.get(with_tools=False)[0]
    texts = [*template.frame.endings, template.next_header]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts if text]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted({each[-1] for each in ids if each and each[-1] in special})


def used_special_tokens(tables: Sequence[TokenTable], tokenizer: Any) -> list[int]:
    """The special tokens among the first 16 million tokens of each table, ascending."""
    found = {token for table in tables for token in np.unique(np.asarray(table.ids[:BLOCK])).tolist()}
    added = tokenizer.added_tokens_decoder
    return sorted(token for token in found if token in added and added[token].special)


def short_question(tables: Sequence[TokenTable], ends: Collection[int]) -> Optional[ShortQuestion]:
    """The shortest question and answer, in tokens. The answer ends with a token of `ends`. None if no answer does."""
    best: Optional[ShortQuestion] = None
    for table in tables:
        for begin, end in zip(table.offsets[:TRIED], table.offsets[1 : TRIED + 1], strict=False):
            ids, supervised = table.ids[begin:end], np.asarray(table.supervised[begin:end])
            start = int(supervised.argmax())
            length = int((~supervised[start:]).argmax()) or len(supervised) - start
            if not supervised.any() or start == 0 or length > LONGEST or int(ids[start + length - 1]) not in ends:
                continue
            if best is None or start + length < len(best.prompt) + best.answer_tokens:
                images = tuple(map(table.image, table.images_in(int(begin), start)))
                best = ShortQuestion(ids[:start].tolist(), length, images)
    return best
