"""Pairs of preferences: a prompt with a chosen and a rejected answer.

The formats of pairs differ only in columns. Each format builds two whole chats or texts from a row, and this module
separates the prompt from the answers. The messages with which both chats begin are the prompt. (Characters are not
compared, because two answers may begin with the same word, such as `<think>`.) The rest is an answer, and only answers
are learned. So the first turn that differs must be an assistant turn in both chats.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from fxtune.data.formats import chat_format
from fxtune.data.formats.image_parts import COLUMNS, for_chats
from fxtune.data.formats.row_format import Content, Conversation, LearnConfig, PlainText, Preference, RowFormat
from fxtune.data.formats.values import RowError, parse_json, require_text, short, type_name

CHOSEN, REJECTED = "chosen", "rejected"
SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))
KNOWN_COLUMNS = (chat_format.CHAT_COLUMNS - {"prompt", *chat_format.LIST_KEYS}).union(
    (CHOSEN, REJECTED, "margin"), *SCORES
)
"""Columns that every format of pairs reads, and columns that often repeat other columns."""
FOR_CHATS = ("tools", "functions", chat_format.VARIABLES, *COLUMNS)
"""Columns that a row of plain texts cannot have, because they need a chat template."""
LEAST_REPEATED = 16
"""If both texts begin with a prompt of at least this many characters, they repeat it. A shorter prompt proves nothing:
two answers to "Hi" may begin with "Hi"."""
IDENTICAL = "chosen and rejected are identical, so there is nothing to prefer"


class PairFormat(RowFormat):
    """A format whose rows hold a chosen and a rejected answer to one prompt."""

    is_group = True
    needs_template = True
    answers = (CHOSEN, REJECTED)
    nothing_learned = "each answer is switched off by its `train` or `weight`, or by data.learn"
    answer_columns: ClassVar[tuple[frozenset[str], frozenset[str]]] = (frozenset((CHOSEN,)), frozenset((REJECTED,)))
    """(columns that have only the chosen answer, columns that have only the rejected answer)."""

    @abstractmethod
    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation] | tuple[PlainText, PlainText]:
        """Returns (prompt and chosen answer, prompt and rejected answer), as two chats or texts. Raises RowError."""

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        row = chat_format.with_parsed_lists(with_parsed_answers(row))
        used = {key: value for key, value in row.items() if key not in unused and value is not None}
        chosen, rejected = self.sides(used)
        # coverage.py searches a document for all columns of its row, so this row has no column of the other answer.
        rows = [
            {key: value for key, value in row.items() if key not in columns}
            for columns in reversed(self.answer_columns)
        ]
        if isinstance(chosen, Conversation) and isinstance(rejected, Conversation):
            _separate(chosen, rejected)
            for name, chat, own_row in zip(self.answers, (chosen, rejected), rows, strict=True):
                chat.row = own_row
                complete_answer(name, chat, used, learn)
        elif chosen == rejected:
            raise RowError(IDENTICAL)
        return Preference([chosen, rejected], rows, _labels(used))


def complete_answer(name: str, chat: Conversation, row: Mapping[str, Any], learn: LearnConfig) -> None:
    """Call chat_format.complete(), and raise RowError if no turn of the answer is learned."""
    chat_format.complete(chat, row, learn)
    if not any(chat.supervised):
        raise RowError(f"no turn of {name} is learned: its `train` or `weight`, or data.learn, switches all of it off")


def _separate(chosen: Conversation, rejected: Conversation) -> None:
    """Switch off the messages with which both chats begin. Raises RowError unless an answer follows in each chat."""
    pairs = zip(chosen.messages, rejected.messages, strict=False)
    common = next((index for index, (turn, other) in enumerate(pairs) if turn != other), None)
    if common is None:
        common = min(len(chosen.messages), len(rejected.messages))
        if len(chosen.messages) == len(rejected.messages):
            raise RowError(IDENTICAL)
        short_side = CHOSEN if len(chosen.messages) == common else REJECTED
        raise RowError(f"no answer is left of {short_side}: all of its turns are the beginning of the other chat")
    chats = chosen, rejected
    roles = [chat.messages[common]["role"] for chat in chats]
    if roles != ["assistant", "assistant"]:
        advice = "Two answers need the same turns before them"
        if roles[0] != roles[1]:
            advice += f", and here the roles are {roles[0]} and {roles[1]}"
        if len(chosen.messages) != len(rejected.messages) and (alone := {*roles} & {*chat_format.SYSTEM_ROLES}):
            advice += f": write the {alone.pop()} turn in both, or in neither"
        raise RowError(f"the prompts differ: {chosen.places[common]} is not {rejected.places[common]}. {advice}")
    if not common:
        raise RowError("there is no prompt before chosen and rejected")
    for chat in chats:
        chat.train_flags[:common] = [False] * common


def texts(prompt: str, row: Mapping[str, Any]) -> tuple[PlainText, PlainText]:
    """The prompt with each answer, as plain texts. An answer in the row may repeat the prompt. Raises RowError."""
    if wrong := next((name for name in FOR_CHATS if row.get(name)), None):
        raise RowError(for_chats(wrong, "`instruction`, `chosen` and `rejected`"))
    if not require_text(prompt, "prompt"):
        raise RowError("prompt is empty")
    answers = [require_text(row.get(name), name) for name in (CHOSEN, REJECTED)]
    if len(prompt) >= LEAST_REPEATED and all(answer.startswith(prompt) for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
    for name, answer in zip((CHOSEN, REJECTED), answers, strict=True):
        chat_format.require_answer(answer, name)
    chosen, rejected = (PlainText(prompt + answer, len(prompt)) for answer in answers)
    return chosen, rejected


def is_answer(value: Any) -> bool:
    """Whether `value` may be an answer: a text, a turn or a list of turns."""
    return isinstance(value, (str, Mapping)) or chat_format.is_chat(value)


def is_whole_chat(value: Any) -> bool:
    """Whether `value` is a chat that begins with a prompt, and not with an answer."""
    if isinstance(value, str):
        value = json.loads(value) if _has_roles(value) else None
    if not chat_format.is_chat(value):
        return False
    role = value[0].get("role", value[0].get("from"))
    return isinstance(role, str) and chat_format.SHAREGPT_ROLES.get(role, role) != "assistant"


def with_parsed_answers(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse the prompt and the answers in `row` that are JSON strings of chats, as in CSV files. Returns a row."""
    texts = {key: row.get(key) for key in ("prompt", CHOSEN, REJECTED, "rejected_messages")}
    chats = {key: text for key, text in texts.items() if isinstance(text, str) and _has_roles(text)}
    return {**row, **{key: parse_json(text, key) for key, text in chats.items()}}


def _has_roles(text: str) -> bool:
    return chat_format.is_chat(text, "role") or chat_format.is_chat(text, "from", "value")


def _labels(row: Mapping[str, Any]) -> list[float]:
    """[margin, 0], the scores of the two answers, or [NaN, NaN]. Raises RowError."""
    if "margin" in row:
        return [_number(row["margin"], "margin"), 0.0]
    for names in SCORES:
        if all(name in row for name in names):
            return [_number(row[name], name) for name in names]
    return [math.nan, math.nan]


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RowError(f"{where} is {short(value) if isinstance(value, float) else type_name(value)}, not a number")
    return float(value)
