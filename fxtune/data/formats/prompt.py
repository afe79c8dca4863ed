"""A prompt that the model answers itself (objective=policy).

    {"prompt": "What is 2 + 3?", "answer": "5"}                                a text, without a chat template
    {"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"} a chat
    {"messages": [...]}                                                        a chat that ends before an answer

All other columns belong to the rewards, which get them by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats import chat_format
from fxtune.data.formats.messages import MessagesFormat
from fxtune.data.formats.row_format import Content, Conversation, LearnConfig, PlainText, Prompt, RowFormat
from fxtune.data.formats.values import RowError, parse_json, require_words


class PromptFormat(RowFormat):
    name = "prompt"
    columns = ("prompt",)
    known_columns = chat_format.CHAT_COLUMNS
    is_group = True
    is_question = False
    keeps_names = True
    noun = "prompts"
    row_limit = "data.sequence_length - sampler.max_tokens"

    def fits(self, row: Mapping[str, Any]) -> bool:
        """False: rows of prompts are not detected. A row with a prompt often has its answer in another column."""
        return False

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        used = {key: value for key, value in chat_format.with_parsed_lists(row).items() if key not in unused}
        prompt = used.get("prompt")
        if chat_format.is_chat(prompt) and isinstance(prompt, str):
            prompt = parse_json(prompt, "prompt")
        if isinstance(prompt, str):
            return Prompt(PlainText(require_words(prompt, "prompt")))
        chat = Conversation()
        if prompt is not None:
            chat_format.add_prompt(chat, prompt)
        elif any(used.get(key) is not None for key in chat_format.LIST_KEYS):
            chat = MessagesFormat().turns(used)
        else:
            raise RowError(
                "there is no prompt: expected the key 'prompt' or 'messages'. The source's `columns` renames"
            )
        if chat.messages[-1]["role"] not in ("user", "tool"):
            raise RowError(f"{chat.places[-1]}: a prompt ends with a turn of the user or of a tool")
        chat.row = row
        chat_format.complete_prompt(chat, used)
        chat.asks = True
        return Prompt(chat)
