"""The formats of pairs. They differ in the columns of a prompt and of two answers to it; pair_format.py reads on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fxtune.data.formats import pair_format
from fxtune.data.formats.alpaca import AlpacaFormat
from fxtune.data.formats.chat_format import LIST_KEYS, add_answer, add_prompt, add_turns, is_chat
from fxtune.data.formats.messages import MessagesFormat
from fxtune.data.formats.pair_format import CHOSEN, KNOWN_COLUMNS, REJECTED, PairFormat, is_whole_chat
from fxtune.data.formats.row_format import OPEN, Conversation, PlainText
from fxtune.data.formats.values import RowError, require_text

TURN = re.compile(r"\n\n(Human|Assistant):")
TURN_ROLES = {"Human": "user", "Assistant": "assistant"}
RESPONSE, MESSAGES = "rejected_response", "rejected_messages"
QUESTIONS = ("instruction", "question", "input", "prompt")


class PreferenceChatsFormat(PairFormat):
    """Two whole chats with the same beginning, in `chosen` and `rejected`: lists of messages, or texts as in HH-RLHF.
    Rows of UltraFeedback also have `prompt` and `messages`, which repeat a part of the chats."""

    name = "preference_chats"
    columns = (CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {*LIST_KEYS, "prompt"}

    def fits(self, row: Mapping[str, Any]) -> bool:
        answers = [row.get(column) for column in self.columns]
        if all(map(is_whole_chat, answers)):
            return True
        return all(isinstance(answer, str) and TURN.match(_prompt_text(row) + answer) for answer in answers)

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        chosen, rejected = (_chat(row, column) for column in self.columns)
        for column in ("prompt", *LIST_KEYS):
            is_read = column == "prompt" and isinstance(row.get(CHOSEN), str) and _prompt_text(row)
            if row.get(column) and not is_read and not _repeats(row[column], column, chosen):
                raise RowError(
                    f"{column} is outside the complete chat `chosen`, so its content is not read. If it is not "
                    f"needed, set the source's `unused: [{column}]`"
                )
        return chosen, rejected


class PreferenceTurnsFormat(PairFormat):
    """A chat in `conversations` or `messages`, and two answers to it in `chosen` and `rejected`, as in ShareGPT."""

    name = "preference_turns"
    columns = ("conversations", CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {*LIST_KEYS, "prompt"}

    def fits(self, row: Mapping[str, Any]) -> bool:
        chat = next((row[key] for key in LIST_KEYS if row.get(key)), None)
        is_prompt = is_chat(chat, "role") or is_chat(chat, "from", "value")
        return is_prompt and _has_answers(row)

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        chats = MessagesFormat().turns(row), MessagesFormat().turns(row)
        for chat, column in zip(chats, self.answers, strict=True):
            if chat.messages[-1]["role"] == "assistant" and OPEN not in chat.messages[-1]:
                raise RowError(
                    f"{chat.places[-1]} is an answer, and chosen and rejected are other answers: end the chat with "
                    "its question; or, if both go on with it, set its `prefix: true`"
                )
            add_answer(chat, row.get(column), column)
        return chats


class PreferenceMessagesFormat(PairFormat):
    """A chat in `messages`, and a second answer in `rejected_response` or `rejected_messages`, as in ms-swift's
    format. `messages` ends with the chosen answer. The rejected answer replaces all turns after the last question,
    unless `rejected_messages` is a whole chat."""

    name = "preference_messages"
    columns = ("messages", RESPONSE)
    known_columns = KNOWN_COLUMNS | {*LIST_KEYS, RESPONSE, MESSAGES, "prompt"}
    answer_columns = (frozenset(LIST_KEYS), frozenset((RESPONSE, MESSAGES)))

    def fits(self, row: Mapping[str, Any]) -> bool:
        is_rejected = isinstance(row.get(RESPONSE), str) or is_chat(row.get(MESSAGES))
        return is_chat(row.get("messages"), "role") and is_rejected

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        chosen, rejected = MessagesFormat().turns(row), MessagesFormat().turns(row)
        if RESPONSE in row and MESSAGES in row:
            raise RowError(f"{RESPONSE} and {MESSAGES} are two rejected answers; keep one column")
        if is_whole_chat(row.get(MESSAGES)):
            rejected = MessagesFormat().turns({**row, "messages": row[MESSAGES]})
            rejected.places = [place.replace("messages", MESSAGES, 1) for place in rejected.places]
            return chosen, rejected
        start = after_last_question(rejected)
        for turns in (rejected.messages, rejected.places, rejected.train_flags):
            del turns[start:]
        if RESPONSE in row:
            add_answer(rejected, require_text(row[RESPONSE], RESPONSE), RESPONSE)
        else:
            add_turns(rejected, row.get(MESSAGES), MESSAGES)
        return chosen, rejected


class PreferenceInstructionFormat(PairFormat):
    """An instruction with two answers: `instruction`, `question` or `input`, with `chosen` and `rejected`. Rows of
    Orca and Argilla have `system`, and `input` or `question`. Rows of LLaMA-Factory have `instruction`, `input` and
    `history`. Each row becomes a chat."""

    name = "preference_instruction"
    columns = ("instruction", CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {*QUESTIONS, "system", "history"}

    def fits(self, row: Mapping[str, Any]) -> bool:
        """`prompt` is an instruction only beside `system`. Without `system`, PreferenceFormat reads it as text."""
        is_chat = row.get("prompt") is None or isinstance(row.get("system"), str)
        return is_chat and _question(row) is not None and _has_answers(row)

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        question = _question(row) or "instruction"
        prompt = {"system": row.get("system"), "history": row.get("history"), "instruction": row.get(question)}
        if question != "input":
            prompt["input"] = row.get("input")
        chats = Conversation(), Conversation()
        for chat, column in zip(chats, self.answers, strict=True):
            AlpacaFormat().add_question(chat, prompt)
            chat.places[-1] = question
            add_answer(chat, row.get(column), column)
        return chats


class PreferenceFormat(PairFormat):
    """A prompt with two answers: `prompt`, `chosen`, `rejected`, as texts or as messages. A row with a list is a chat.
    Three texts are plain text without a chat template, as in prompt_completion.py."""

    name = "preference"
    columns = ("prompt", CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {"prompt"}
    needs_template = False

    def fits(self, row: Mapping[str, Any]) -> bool:
        prompt = row.get("prompt")
        is_prompt = isinstance(prompt, str) or is_chat(prompt, "role") or is_chat(prompt, "from")
        return is_prompt and _has_answers(row)

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation] | tuple[PlainText, PlainText]:
        if missing := [column for column in self.columns if row.get(column) is None]:
            raise RowError(f"there is no {missing[0]}: a pair has a prompt, a chosen and a rejected answer")
        if all(isinstance(row.get(column), str) for column in self.columns):
            return pair_format.texts(row["prompt"], row)
        chats = Conversation(), Conversation()
        for chat, column in zip(chats, self.answers, strict=True):
            add_prompt(chat, row.get("prompt"))
            add_answer(chat, row.get(column), column)
        return chats


def _has_answers(row: Mapping[str, Any]) -> bool:
    return pair_format.is_answer(row.get(CHOSEN)) and pair_format.is_answer(row.get(REJECTED))


def _repeats(value: Any, column: str, chat: Conversation) -> bool:
    """Whether `value`, from a column, repeats a part of the chat: its first turns, or the text of a turn."""
    if isinstance(value, str):
        return any(value.strip() in message.get("content", "") for message in chat.messages)
    repeated = Conversation()
    add_turns(repeated, value, column)
    return chat.messages[: len(repeated.messages)] == repeated.messages


def _prompt_text(row: Mapping[str, Any]) -> str:
    """The column `prompt` if it is a text that begins with a turn, as in HH-RLHF; otherwise empty."""
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str) and TURN.match(prompt) else ""


def _chat(row: Mapping[str, Any], column: str) -> Conversation:
    chat, answer = Conversation(), row.get(column)
    if not isinstance(answer, str):
        add_turns(chat, answer, column)
        return chat
    text = _prompt_text(row) + require_text(answer, column)
    before, *parts = TURN.split(text)
    if before or not parts:
        raise RowError(
            f"{column} is a text without turns: expected a list of messages, or a text that begins with a "
            "blank line and `Human:`"
        )
    for index in range(0, len(parts), 2):
        place = f"{column}, turn {index // 2 + 1}"
        chat.add({"role": TURN_ROLES[parts[index]], "content": parts[index + 1].strip()}, place)
    return chat


def after_last_question(chat: Conversation) -> int:
    """The number of messages from the first message to the last question; 0 if the chat has no question."""
    roles = [message["role"] for message in chat.messages]
    return len(roles) - roles[::-1].index("user") if "user" in roles else 0


def _question(row: Mapping[str, Any]) -> str | None:
    """The column with the question; None if all columns of QUESTIONS are empty."""
    return next((name for name in QUESTIONS if isinstance(row.get(name), str) and row[name].strip()), None)
