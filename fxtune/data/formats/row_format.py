"""What a row format is: the columns that a row needs, and the content that they make.

A format knows nothing of tokenizers and chat templates. It turns a row into one of five contents: a chat, a plain
text, token ids, answers to one prompt, or a group of other rows. The encoder (data/chat/encode.py) makes tokens of
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from fxtune.data.formats.values import RowError

BEGUN = "begun"
"""The key of a message with the beginning of its content with which the prompt ends; it is not learned."""
OPEN = "is_open"
"""The key of a last message that goes on (`prefix: true`): its end of turn is not learned."""


class ChatRole(str, Enum):
    system = "system"
    user = "user"
    assistant = "assistant"
    tool = "tool"


@dataclass
class LearnConfig:
    """Which turns of a chat the model learns to write. A turn's own `train` or `weight` (0 or 1) overrides this."""

    roles: list[ChatRole] = field(default_factory=lambda: [ChatRole.assistant])
    """Whose turns are learned."""
    tool_calls: bool = True
    """Learn assistant turns that call tools. False: they are context only."""
    last_turn_only: bool = False
    """Learn only the last of these turns in each chat."""
    since_last_question: bool = False
    """Learn only the turns after the last answered question: the last answer, and the tool rounds before it."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("last_turn_only", "since_last_question")
    """A word in place of this section, as in `data.learn=since_last_question`, sets this key to true."""


@dataclass
class Conversation:
    """A chat, for the chat template."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    train_flags: list[bool | None] = field(default_factory=list)
    """For each message, whether the row's `train` or `weight` says that it is learned; None: neither is set."""
    places: list[str] = field(default_factory=list)
    """For each message, where the row has its text, for a message to the user."""
    supervised: list[bool] = field(default_factory=list)
    """For each message, whether the model learns to write it."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the model may call, or None."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the row sets."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row, with its lists of messages parsed."""
    ends_prompt: bool = False
    """Whether the prompt ends with the last message."""

    def add(self, message: dict[str, Any], place: str, train_flag: bool | None = None) -> None:
        """Add a message. An assistant's message goes on with the turn before it where that turn is begun: it ends a
        prompt, or has `prefix: true`. Raises RowError if this is not possible."""
        last = self.messages[-1] if self.messages else {}
        is_begun = self.ends_prompt and last.get("role") == "assistant"
        self.ends_prompt = False
        if OPEN in last and message["role"] != "assistant":
            raise RowError(
                f"{self.places[-1]} is begun (prefix: true), and no assistant's turn follows to go on with it"
            )
        if message["role"] == "assistant" and (is_begun or OPEN in last):
            if {"tool_calls", "reasoning_content"} & last.keys() or "reasoning_content" in message:
                raise RowError(
                    f"{place} goes on with a begun turn, and only a turn of text can go on: without calls or "
                    "reasoning before it"
                )
            self.messages.pop(), self.places.pop()
            if self.train_flags.pop() is False:
                message[BEGUN] = last["content"]
            message["content"] = last["content"] + message.get("content", "")
        self.messages.append(message)
        self.places.append(place)
        self.train_flags.append(train_flag)

    def end_prompt(self) -> None:
        """The messages so far are a prompt: none is learned, and an answer goes on with a begun turn."""
        self.train_flags = [False] * len(self.messages)
        self.ends_prompt = True


@dataclass
class PlainText:
    """A text without a chat template."""

    text: str
    first: int = 0
    """The characters from here on are learned."""


@dataclass
class TokenIds:
    ids: list[int]
    supervised: list[bool]
    """For each id, whether the model learns to write it."""


@dataclass
class RowGroup:
    """Rows in other formats whose documents stay together, in this order."""

    rows: list[Mapping[str, Any]]
    labels: list[float]
    """A label for each row's document; NaN: none."""


@dataclass
class Preference:
    """Answers to one prompt, each with the prompt, which alone is not learned: a chosen and a rejected answer, or one
    answer with a judgment. Their documents stay together, in this order."""

    answers: Sequence[Conversation | PlainText]
    rows: Sequence[Mapping[str, Any]]
    """For each answer, the row without the columns of the other answer."""
    labels: list[float]
    """A label for each answer; NaN: none."""


Content = Conversation | PlainText | TokenIds | Preference | RowGroup


class RowFormat(ABC):
    """A built-in row format, and all that the rest of the code knows about it."""

    name: ClassVar[str]
    """The value of the source's `format`."""
    columns: ClassVar[tuple[str, ...]]
    """The columns that a row needs."""
    known_columns: ClassVar[frozenset[str]]
    """Columns that the format reads, and columns that often repeat other columns: the rendered text, the first
    question. Any other column must be in the text (data/chat/coverage.py)."""
    is_chat: ClassVar[bool] = False
    """Whether rows are chats, in which only answers are learned. Long chats are split between turns."""
    is_group: ClassVar[bool] = False
    """Whether a row holds several documents, which stay together: they are never cut."""
    answers: ClassVar[tuple[str, ...]] = ()
    """Names of the answers of a row of preferences, for messages; empty for other rows. The documents of such a row
    begin with the same prompt and end with an answer."""
    needs_template: ClassVar[bool] = False
    """Whether each row needs a chat template."""
    is_question: ClassVar[bool] = True
    """Whether a row has a question and an answer, so that a model can be asked (data.questions)."""
    nothing_learned: ClassVar[str] = "each turn is switched off by its `train` or `weight`, or by data.learn"
    """Why no token of a whole source may be supervised."""

    @property
    def noun(self) -> str:
        """What a row of a table becomes, for messages."""
        if self.answers:
            return "pairs" if len(self.answers) == 2 else "answers"
        return "groups" if self.is_group else "documents"

    @abstractmethod
    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has the columns of this format, with such values. Later rows may still be wrong."""

    @abstractmethod
    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        """What a row holds; its columns are already renamed. `unused`: columns that are left out on purpose.

        Raises RowError, with the wrong column or turn, if a part is missing, unknown or of a wrong type.
        """
