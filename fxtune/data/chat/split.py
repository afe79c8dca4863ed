"""Splits a chat that is longer than a row into pieces. Each piece keeps the system prompt, and answers that fit a row
with their question are not cut.

The chat template renders each piece as a separate conversation: the leading system messages and the tools, then as
many whole exchanges as fit. An exchange is a question and the messages up to the next question. An exchange that does
not fit alone is usually an agent's work. It is split into steps (an assistant turn with the results of its calls), and
each piece repeats the question. A step that does not fit alone is cut at the end of the row. If the template refuses a
conversation that begins in the middle of the chat, the whole chat is cut at the end of a row. Tokens that are cut off
are counted.

Any question may be about any earlier image, so the first question of a piece repeats the images of earlier turns that
are not in the piece.

Some templates rewrite an answer once another turn follows. split_questions() divides such a chat into documents that
end with these answers, and then splits the long documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fxtune.data.formats.chat_format import SYSTEM_ROLES
from fxtune.data.formats.image_parts import IMAGE
from fxtune.data.formats.row_format import Conversation
from fxtune.data.images.placed import cut_before, without

Encode = Callable[[Conversation], Any]
"""A function from a conversation to its tokens (a dataclass with `ids` and `supervised`), or to None if the template
refuses the conversation."""


@dataclass
class SplitCounts:
    """Counts of what became of a source's long chats, or of its long rows of preferences."""

    chats: int = 0
    """Long chats, long rows of preferences, or texts that are cut."""
    pieces: int = 0
    truncated: int = 0
    """Pieces whose last turn is cut off; in preferences, rows that lose the beginning of their prompt."""
    dropped: int = 0
    """Rows of preferences whose answers, with the images, are longer than a row; and cut pieces of chats in which
    nothing is left to learn."""
    lost_tokens: int = 0
    lost_supervised: int = 0
    questions: int = 0
    """Documents from chats that split_questions() divides."""
    refused: int = 0
    """Documents of split_questions() that the template refuses. Their answers are not learned."""
    repeated_images: int = 0
    """Images that later pieces of a chat repeat."""

    def __add__(self, other: SplitCounts) -> SplitCounts:
        return SplitCounts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class SplitChat:
    pieces: list[Any] = field(default_factory=list)
    """Results of `encode`, each with a supervised token."""
    counts: SplitCounts = field(default_factory=lambda: SplitCounts(chats=1))


def split_chat(chat: Conversation, whole: Any, encode: Encode, longest: int) -> SplitChat:
    """The pieces of a chat, of at most `longest` tokens each. `whole`: the tokens of the whole chat."""
    splitter = _Splitter(chat, encode, longest)
    first = next(
        (index for index, message in enumerate(chat.messages) if message["role"] not in SYSTEM_ROLES),
        len(chat.messages),
    )
    try:
        splitter.split(list(range(first)), _units(chat, range(first, len(chat.messages)), "user"))
    except _RefusedError:
        return truncate_chat(whole, longest)
    found = splitter.found
    found.counts.pieces = len(found.pieces)
    shown = [len(piece.images) for piece in found.pieces]  # each piece has all images up to its end
    found.counts.repeated_images = sum(shown) - max(shown, default=0)
    return found


def split_questions(chat: Conversation, rewritten: list[int], encode: Encode, longest: int | None) -> SplitChat:
    """Divide a chat into documents in which the template writes each learned turn as in sampling. A document ends with
    each turn of `rewritten`, and with the chat. It has all messages up to its end, and teaches only turns that no
    earlier document teaches. `longest`: documents with more tokens are split; None: documents are not split."""
    found, start = SplitChat(counts=SplitCounts()), 0
    for end in (*(turn + 1 for turn in rewritten), len(chat.messages)):
        learned = [start <= index and is_learned for index, is_learned in enumerate(chat.supervised[:end])]
        start = end
        if not any(learned):
            continue
        part = replace(chat, messages=chat.messages[:end], supervised=learned)
        document = encode(part)
        if document is None:
            found.counts.refused += 1
        elif longest is not None and len(document.ids) > longest:
            pieces = split_chat(part, document, encode, longest)
            found.pieces += pieces.pieces
            found.counts += pieces.counts
        elif _teaches(document):
            found.pieces.append(document)
    found.counts.questions = len(found.pieces)
    return found


def truncate_chat(whole: Any, longest: int) -> SplitChat:
    """The first `longest` tokens of a chat, or no piece if these tokens hold nothing to learn."""
    found = SplitChat()
    if not _teaches(whole):
        return found
    kept = cut_before(whole.images, longest)
    kept = kept if any(whole.supervised[1:kept]) else 0
    found.counts.truncated, found.counts.dropped = int(kept > 0), int(kept == 0)
    found.counts.lost_tokens = len(whole.ids) - kept
    found.counts.lost_supervised = sum(whole.supervised[kept:])
    if kept:
        images = without(whole.images, kept, len(whole.ids))
        found.pieces.append(replace(whole, ids=whole.ids[:kept], supervised=whole.supervised[:kept], images=images))
    found.counts.pieces = len(found.pieces)
    return found


def _teaches(document: Any) -> bool:
    """Whether the model predicts a supervised token; it never predicts the first token of a document."""
    return any(document.supervised[1:])


class _RefusedError(Exception):
    """The template refuses a part of the conversation."""


class _Splitter:
    def __init__(self, chat: Conversation, encode: Encode, longest: int) -> None:
        self.chat, self.encode, self.longest = chat, encode, longest
        self.found = SplitChat()

    def split(self, head: list[int], units: list[list[int]]) -> None:
        """Add the pieces of `units`, lists of messages that stay together. `head`: messages that begin each piece.

        If some units teach nothing (data.learn.last_turn_only), pieces are filled from the end. So a learned answer
        keeps as much of the context before it as fits. Messages that are context of no learned answer are in no piece.
        """
        taught = [any(self.chat.supervised[message] for message in unit) for unit in units]
        if not all(taught):
            self._split_from_end(head, units, taught)
            return
        start = 0
        while start < len(units):
            count, piece = self._fill_piece(head, units[start:])
            if piece is None:
                count = 1
                self._split_unit(head, units[start])
            elif _teaches(piece):
                self.found.pieces.append(piece)
            start += count

    def _split_from_end(self, head: list[int], units: list[list[int]], taught: list[bool]) -> None:
        earlier, self.found.pieces = self.found.pieces, []
        later: list[Any] = []
        end = len(units)
        while True in taught[:end]:
            end -= taught[:end][::-1].index(True)
            count, piece = self._fill_piece(head, units[:end], from_end=True)
            if piece is None:
                count = 1
                self._split_unit(head, units[end - 1])
            elif _teaches(piece):
                self.found.pieces.append(piece)
            later, self.found.pieces = self.found.pieces + later, []
            end -= count
        self.found.pieces = earlier + later

    def _split_unit(self, head: list[int], unit: list[int]) -> None:
        """Add the pieces of a unit that is too long."""
        question, steps = [], _units(self.chat, unit, "assistant")
        if self.chat.messages[unit[0]]["role"] != "assistant":
            question, *steps = steps
        if len(steps) > 1:
            self.split(head + question, steps)
        else:
            cut = truncate_chat(self._encode(head + unit), self.longest)
            self.found.pieces += cut.pieces
            self.found.counts += replace(cut.counts, chats=0)  # self.found has counted the chat

    def _fill_piece(self, head: list[int], units: list[list[int]], from_end: bool = False) -> tuple[int, Any]:
        """(the number of `units` that fit into a piece after `head`, the piece); (0, None) if no unit fits. Units are
        taken from the first on, or with `from_end` back from the last. Encoding takes time, so this tries 1, 2, 4, ...
        units, and then halves the interval."""
        fitting, piece = 0, None
        too_many, count = len(units) + 1, 1
        while fitting + 1 < too_many:
            chosen = units[-count:] if from_end else units[:count]
            document = self._encode([*head, *(message for unit in chosen for message in unit)])
            if len(document.ids) <= self.longest:
                fitting, piece = count, document
            else:
                too_many = count
            count = min(2 * count, len(units)) if too_many > len(units) else (fitting + too_many) // 2
        return fitting, piece

    def _encode(self, indices: list[int]) -> Any:
        part = replace(
            self.chat, messages=self._messages(indices), supervised=[self.chat.supervised[index] for index in indices]
        )
        document = self.encode(part)
        if document is None:
            raise _RefusedError
        return document

    def _messages(self, indices: list[int]) -> list[dict[str, Any]]:
        """The messages with these indices. The first question among them also gets the images of turns that are left
        out, in the order of the chat. Raises _RefusedError if no question can take these images."""
        every = self.chat.messages
        messages = [every[index] for index in indices]
        earlier = [index for index in range(max(indices)) if every[index].get("images") and index not in indices]
        if not earlier:
            return messages
        at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
        if at is None:
            raise _RefusedError
        question = messages[at]
        before, behind = (
            [image for index in earlier if (index < indices[at]) == is_before for image in every[index]["images"]]
            for is_before in (True, False)
        )
        content = IMAGE * len(before) + question["content"] + IMAGE * len(behind)
        messages[at] = {**question, "content": content, "images": [*before, *question.get("images", ()), *behind]}
        return messages


def _units(chat: Conversation, indices: range | list[int], role: str) -> list[list[int]]:
    """Divide messages into units. A unit begins where a message of `role` follows a message of another role."""
    units: list[list[int]] = []
    previous_role = None
    for index in indices:
        message_role = chat.messages[index]["role"]
        if not units or (message_role == role and previous_role != role):
            units.append([])
        units[-1].append(index)
        previous_role = message_role
    return units
