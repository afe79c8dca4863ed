"""A row format: the columns that a row needs, and the content that the format reads from them.

A format knows nothing of tokenizers and chat templates. It turns a row into one of eight contents: a chat, a plain
text, token ids, answers to one prompt, a group of other rows, a text with a label, texts that stay together, or a
prompt alone. data/chat/encode.py turns the content into tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from fxtune.data.formats.values import RowError

BEGUN = "begun"
"""This key of a message has the first part of its content. The part belongs to the prompt and is not learned."""
OPEN = "is_open"
"""This key marks a message with `prefix: true` until a turn continues the message. Its end of turn is not learned."""


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
    """Keys that may stand for the section: `data.learn=since_last_question` sets since_last_question to true."""


@dataclass
class Conversation:
    """The messages of a chat, with all that the chat template needs."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    train_flags: list[bool | None] = field(default_factory=list)
    """For each message: True if the row's `train` or `weight` says that it is learned, False if they say that it is
    not learned, None if neither is set. Messages of a prompt have False."""
    places: list[str] = field(default_factory=list)
    """For each message, the place of its text in the row, such as `messages[0].content`. Errors name it."""
    supervised: list[bool] = field(default_factory=list)
    """For each message, whether the model learns to write it."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the model may call, or None."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the row sets."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row. Its lists of messages are parsed if they were JSON strings."""
    ends_prompt: bool = False
    """Whether the messages so far are the prompt, and the answer follows."""
    asks: bool = False
    """Whether the text ends with the generation prompt of the chat template, because the model writes the answer."""

    def add(self, message: dict[str, Any], place: str, train_flag: bool | None = None) -> None:
        """Add a message. An assistant's message continues the assistant turn before it if that turn ends the prompt or
        has `prefix: true`. Raises RowError if a begun turn cannot be continued."""
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


@dataclass
class PlainText:
    """A text without a chat template."""

    text: str
    first: int = 0
    """The index of the first character that is learned."""
    second: str | None = None
    """A second text, for the tokenizer's `text_pair`."""
    as_tokenized: bool = False
    """Whether the document is what `tokenizer(text)` gives, with the special tokens of the tokenizer alone. The model
    is then asked for a number of the text, and not for its next token."""


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
    """A label for the document of each row; NaN if the document has no label."""


@dataclass
class Preference:
    """A chosen and a rejected answer to one prompt, or one answer with a judgment. Each entry of `answers` begins with
    the prompt, which is not learned. The documents of the answers stay together, in this order."""

    answers: Sequence[Conversation | PlainText]
    rows: Sequence[Mapping[str, Any]]
    """For each answer, the row without the columns of the other answer."""
    labels: list[float]
    """A label for each answer; NaN if the answer has no label."""


@dataclass
class Labelled:
    """A text or a chat with the name of its label."""

    content: Conversation | PlainText
    label: str


@dataclass
class TextGroup:
    """Texts whose documents stay together, in this order: a query with its candidates."""

    texts: Mapping[str, PlainText]
    """{place in the row: text}."""
    labels: list[float]
    """For each text, its relevance; NaN for a query."""


@dataclass
class Prompt:
    """A text or a chat that the model answers."""

    content: Conversation | PlainText


Content = Conversation | PlainText | TokenIds | Preference | RowGroup | Labelled | TextGroup | Prompt


class RowFormat(ABC):
    """All that the rest of the code knows about a built-in row format."""

    name: ClassVar[str]
    """The value of the source's `format`."""
    columns: ClassVar[tuple[str, ...]]
    """The columns that a row needs."""
    known_columns: ClassVar[frozenset[str]]
    """Columns that the format reads, and columns that often repeat their content: the rendered text, the first
    question. The content of any other column must be in the text of the document (data/chat/coverage.py)."""
    is_chat: ClassVar[bool] = False
    """Whether rows are chats. Only their answers are learned, and long chats are split between turns."""
    is_group: ClassVar[bool] = False
    """Whether a row becomes a group: documents that stay together and are never split into pieces."""
    is_compared: ClassVar[bool] = False
    """Whether vectors of the row's texts are compared. The query is then a document, and may have an instruction."""
    answers: ClassVar[tuple[str, ...]] = ()
    """The names of the answers in a row of preferences, for messages; empty if rows are not preferences. The documents
    of a row of preferences begin with the same prompt and end with an answer."""
    needs_template: ClassVar[bool] = False
    """Whether each row needs a chat template."""
    as_tokenized: ClassVar[bool] = False
    """Whether texts become what the tokenizer makes of them at use, and are cut to the length of a row."""
    writes_pairs: ClassVar[bool] = False
    """Whether a chat template counts only if it has the roles `query` and `document`. An export then has no other
    template, because sentence-transformers would write texts as chats with it."""
    row_limit: ClassVar[str] = "data.sequence_length"
    """The keys that limit the tokens of a row, for messages."""
    keeps_names: ClassVar[bool] = False
    """Whether columns keep their names, also in rows of common shapes (shapes.py)."""
    is_question: ClassVar[bool] = True
    """Whether a row has a question for the model and a reference answer (data.questions)."""
    nothing_learned: ClassVar[str] = "each turn is switched off by its `train` or `weight`, or by data.learn"
    """The likely cause if a source has no supervised token. The error message names it."""

    @property
    def noun(self) -> str:
        """The plural noun that messages use for what rows become."""
        if self.answers:
            return "pairs" if len(self.answers) == 2 else "answers"
        return "groups" if self.is_group else "documents"

    @abstractmethod
    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has the columns of this format, with values of the right types. read() may still refuse it."""

    @abstractmethod
    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        """Read the content of a row whose columns are renamed already. `unused`: columns to leave out.

        Raises RowError, which names the column or turn, if a part is missing, unknown or of a wrong type.
        """
