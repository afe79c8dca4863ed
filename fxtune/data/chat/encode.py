"""Encodes rows as token ids and the mask of the tokens that the model learns to write.

Chat rows are rendered by the chat template and tokenized as one text, and the supervised character spans
(template.py) are mapped to tokens by the tokenizer's offsets. Special tokens that a message quotes are text
(special_tokens.py). A span begins with the first token that sampling writes behind the tokens of the prompt
(border.py). A token of zero width, which some tokenizers insert, is supervised if it is inside a span.

No special tokens are added to rendered text, because the template has written them. Plain text gets the
tokenizer's beginning-of-text and end-of-text tokens, unless the text has them.

For a row that cannot be used, the result is the reason, a string. A fault that makes every row unusable (no chat
template, one that does not compile, a slow tokenizer) raises DataError at once.
"""

from __future__ import annotations

import copy
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fxtune.data.chat.border import BorderFinder
from fxtune.data.chat.coverage import Coverage
from fxtune.data.chat.normalize import (
    SURROGATE,
    Conversation,
    RowError,
    read_conversation,
    require_answer,
    require_text,
    short,
)
from fxtune.data.chat.special_tokens import SpecialTokenEscaper
from fxtune.data.chat.split import SplitChat, split_chat, truncate_chat
from fxtune.data.chat.template import ChatTemplate, Span, unused_characters
from fxtune.data.config import LearnConfig
from fxtune.data.read.files import require_file
from fxtune.data.read.formats import RowFormat
from fxtune.data.read.row import type_name
from fxtune.errors import DataError
from fxtune.system.resource_limits import LimitExceeded, limit_resources

IGNORE_INDEX = -100
"""The label of tokens that are not targets in pre-tokenized data, as in PyTorch."""
MAX_TEMPLATE_BYTES = 1 << 20
"""Size limit of a chat template file. Long published templates have 30,000 bytes."""
NO_TOKEN = "the tokenizer makes no token of this text"
APART_REMARK = (
    "in one text, a token would lie across the border of a prompt and its answer, so the two are tokenized apart, as "
    "in sampling"
)
CROSSED_REMARK = (
    "an answer begins inside a token of its prompt, which sampling never writes; `fxtune preview` shows where, and "
    "another character at the end of the prompt or at the beginning of the answer avoids it"
)


@dataclass
class Document:
    ids: list[int]
    supervised: list[bool]
    """For each id, whether the model learns to write it. Nothing precedes the first token, so it is never a target."""
    escaped: bool = False
    """Whether special tokens in a message were tokenized as text."""
    remarks: tuple[str, ...] = ()
    """What the chat template leaves out by design."""
    is_newly_read: bool = False
    """As Conversation.is_newly_read."""


@dataclass
class _Text:
    """A text for the tokenizer. `is_plain`: its beginning-of-text and end-of-text tokens are still missing."""

    text: str
    spans: list[Span]
    is_plain: bool
    remarks: tuple[str, ...] = ()
    is_newly_read: bool = False


class Encoder:
    """Rows of one format to documents. Picklable.

    Args:
        tokenizer: a fast tokenizer (PreTrainedTokenizerFast).
        format: the rows' format, already detected (not `auto`).
        chat_template: path of a Jinja file that replaces the tokenizer's chat template.
        learn: which turns of a chat are learned.
        unused: columns and fields that are not used on purpose; None: no part of a row need be in the text.
        system: a system message for each chat that has none.

    Raises:
        DataError: the tokenizer is slow, has no chat template although the format needs
            one, or the template is broken.
    """

    def __init__(
        self,
        tokenizer: Any,
        format: RowFormat,
        chat_template: str | None = None,
        system: str | None = None,
        learn: LearnConfig | None = None,
        unused: Collection[str] | None = (),
    ) -> None:
        assert format is not RowFormat.auto, "the format is detected before rows are encoded"
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so masks cannot be placed exactly; use a model "
                "that comes with a tokenizer.json, or set model.tokenizer to one that does"
            )
        self.format = format
        self.learn = learn or LearnConfig()
        self.unused = tuple(unused or ())
        self._coverage = Coverage(format, self.unused, enabled=unused is not None)
        self.system = system
        self.longest: int | None = None
        """Chats with more tokens are split into pieces; None: not here."""
        self.template_source = read_template(chat_template) if chat_template else None
        self._bos = _leading_special_ids(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id
        self._tokenizer = _with_exact_offsets(tokenizer)
        self._vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1 if format is RowFormat.tokens else 0
        self._templates: dict[bool, tuple[ChatTemplate, SpecialTokenEscaper]] = {}
        encode, decode = partial(_encode, self._tokenizer), partial(_decode, self._tokenizer)
        self._borders = BorderFinder(encode, decode, tokenizer.added_tokens_decoder)
        if format in (RowFormat.messages, RowFormat.sharegpt, RowFormat.alpaca):
            self._template(with_tools=False)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | str]:
        """Return for each row, in order, its document or the reason why it cannot be used."""
        read: Callable[[Mapping[str, Any]], _Text | Document] = {
            RowFormat.text: self._text,
            RowFormat.tokens: self._tokens,
            RowFormat.prompt_completion: self._prompt_completion,
        }.get(self.format, self._chat)
        results: list[_Text | Document | str] = []
        try:
            with limit_resources():  # one limit for all rows; render() sets its own for other callers
                for row in rows:
                    try:
                        if not isinstance(row, Mapping):
                            raise RowError(f"the row is {type_name(row)}, not an object")
                        results.append(read(row))
                    except RowError as reason:
                        results.append(str(reason))
        except LimitExceeded as limit:
            raise DataError(
                f"the chat template was stopped: it needs {limit}, which no conversation should need. Correct it, or "
                "name another in data.chat_template"
            ) from None
        texts = [result for result in results if isinstance(result, _Text)]
        documents = iter(self._tokenize(texts) if texts else [])
        return [next(documents) if isinstance(result, _Text) else result for result in results]

    def split(self, row: Mapping[str, Any], whole: Document) -> SplitChat:
        """The pieces, of at most `self.longest` tokens, of a chat that is longer. `whole`: the tokens of the chat."""
        assert self.longest is not None
        if self.format is RowFormat.prompt_completion and isinstance(row.get("prompt"), str):
            return truncate_chat(whole, self.longest)

        def encode(chat: Conversation) -> Document | None:
            try:
                rendered = self._rendered(chat)
            except RowError:
                return None
            document = self._tokenize([rendered])[0] if isinstance(rendered, _Text) else rendered
            return document if isinstance(document, Document) else None

        return split_chat(self._conversation(row), whole, encode, self.longest)

    def remarks(self) -> list[str]:
        """What a user should know about the chat template before training with it."""
        if False not in self._templates:
            return (
                [f"data.system is for chats; nothing is added to {self.format.value} rows"]
                if self.system is not None
                else []
            )
        if self._template(with_tools=False)[0].frame.endings:
            return []
        return [
            "the chat template writes no end-of-turn token after the assistant's answer, so the model does not learn "
            "where to stop; add one in a template of your own (data.chat_template=FILE)"
        ]

    def _template(self, with_tools: bool) -> tuple[ChatTemplate, SpecialTokenEscaper]:
        if with_tools not in self._templates:
            template = _chat_template(self._tokenizer, self.template_source, with_tools)
            if self.system is not None:
                _require_system(template)
            self._templates[with_tools] = template, SpecialTokenEscaper(self._tokenizer, template.frame.prompt)
        return self._templates[with_tools]

    def _chat(self, row: Mapping[str, Any]) -> _Text | Document:
        return self._rendered(self._conversation(row), row)

    def _conversation(self, row: Mapping[str, Any]) -> Conversation:
        chat = read_conversation(row, self.format, self.learn, self.unused)
        if self.system is not None and all(message["role"] != "system" for message in chat.messages):
            chat.messages.insert(0, {"role": "system", "content": self.system})
            chat.supervised.insert(0, False)
        return chat

    def _rendered(self, chat: Conversation, row: Mapping[str, Any] | None = None) -> _Text | Document:
        """`row`: the row of the chat, to be found in the text; None for a part of a chat."""
        template, escaper = self._template(chat.tools is not None)
        messages = template.adapted(chat.messages)
        text, spans = template.supervised_spans(messages, chat.supervised, chat.tools)
        if not text.isascii() and SURROGATE.search(text):
            raise RowError("a lone surrogate in tools or tool_calls: not valid Unicode")
        aliased = None
        if escaper.is_quoted(messages, chat.tools):
            aliased = escaper.alias(text, lambda mark: template.render(mark(messages), mark(chat.tools))[0])
        remarks: tuple[str, ...] = ()
        if row is not None:
            remarks = tuple(self._coverage.check_conversation(row, chat, messages, text, template))
        if aliased is None:
            return _Text(text, spans, False, remarks, chat.is_newly_read)
        ids, offsets = escaper.encode(aliased)
        if not ids:
            raise RowError(NO_TOKEN)
        finder = BorderFinder(escaper.encode_part, escaper.decode, self._tokenizer.added_tokens_decoder)
        spans = [(aliased.position(start), aliased.position(end)) for start, end in spans]
        document = _document(_Text(aliased.text, spans, False, remarks, chat.is_newly_read), ids, offsets, finder)
        return replace(document, escaped=True)

    def _prompt_completion(self, row: Mapping[str, Any]) -> _Text | Document:
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, (list, tuple)) or isinstance(completion, (list, tuple)):
            return self._chat(row)
        prompt, completion = require_text(prompt, "prompt"), require_text(completion, "completion")
        text = prompt + completion
        require_answer(completion, "completion")
        self._coverage.check_columns(row, text)
        return _Text(text, [(len(text) - len(completion), len(text))], is_plain=True)

    def _text(self, row: Mapping[str, Any]) -> _Text:
        text = require_text(row.get("text"), "text")
        if not text.strip():
            raise RowError("text is empty")
        self._coverage.check_columns(row, text)
        return _Text(text, [(0, len(text))], is_plain=True)

    def _tokens(self, row: Mapping[str, Any]) -> Document:
        ids = _integers(row.get("input_ids"), "input_ids")
        if not ids:
            raise RowError("input_ids is empty")
        for index, token in enumerate(ids):
            if not 0 <= token < self._vocabulary:
                raise RowError(
                    f"input_ids[{index}] is {short(token)}, outside the tokenizer's vocabulary of {self._vocabulary}"
                )
        self._coverage.check_columns({key: row[key] for key in row if key != "attention_mask"}, "")
        if 0 in (row.get("attention_mask") or ()):
            raise RowError("attention_mask has zeros: remove the padding from input_ids, fxtune pads rows itself")
        if row.get("labels") is not None:
            labels = _integers(row["labels"], "labels", len(ids))
            for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
                if label not in (IGNORE_INDEX, token):
                    raise RowError(
                        f"labels[{index}] is {short(label)}; it must be {IGNORE_INDEX} or input_ids[{index}], which "
                        f"is {token}"
                    )
            return Document(ids, [label != IGNORE_INDEX for label in labels])
        if row.get("assistant_masks") is not None:
            masks = _integers(row["assistant_masks"], "assistant_masks", len(ids))
            for index, mask in enumerate(masks):
                if mask not in (0, 1):
                    raise RowError(f"assistant_masks[{index}] is {short(mask)}; use 0 or 1")
            return Document(ids, [mask == 1 for mask in masks])
        return Document(ids, [True] * len(ids))

    def _tokenize(self, texts: list[_Text]) -> list[Document | str]:
        encoded = self._tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about the model's maximal length: documents are split later
        )
        documents: list[Document | str] = []
        for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if not ids:
                documents.append(NO_TOKEN)
                continue
            document = _document(text, ids, offsets, self._borders)
            if text.is_plain:
                ids, supervised = document.ids, document.supervised
                if ids[: len(self._bos)] != self._bos:
                    all_supervised = text.spans[0] == (0, len(text.text))  # after a prompt, it is not
                    ids, supervised = self._bos + ids, [all_supervised] * len(self._bos) + supervised
                if self._eos is not None and ids[-1] != self._eos:
                    ids, supervised = [*ids, self._eos], [*supervised, True]
                document = replace(document, ids=ids, supervised=supervised)
            documents.append(document)
        return documents


def read_template(path: str) -> str:
    """The Jinja text of `data.chat_template`. Raises DataError if it cannot be read."""
    try:
        file = Path(os.path.expanduser(path))
        require_file(file)
        if (size := file.stat().st_size) > MAX_TEMPLATE_BYTES:
            raise DataError(
                f"data.chat_template={path}: {size:,} bytes are too long for a chat template (limit "
                f"{MAX_TEMPLATE_BYTES:,})"
            )
        source = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"data.chat_template={path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template={path} cannot be read as a text file: {error}") from None
    if not source.strip():
        raise DataError(f"data.chat_template={path}: the file is empty")
    return source


def _chat_template(tokenizer: Any, source: str | None, with_tools: bool) -> ChatTemplate:
    if source is None:
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template and the rows are "
                "chats; set data.chat_template=FILE to a Jinja template"
            )
        try:
            # Some models have several named templates; tools select "tool_use", as in apply_chat_template.
            source = tokenizer.get_chat_template(None, [{}] if with_tools else None)
        except ValueError as error:
            raise DataError(
                f"the tokenizer's chat templates cannot be used: {error}; set data.chat_template=FILE"
            ) from None
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return ChatTemplate(source, dict(tokenizer.special_tokens_map), sorted(special | {tokenizer.eos_token or ""}))


def _require_system(template: ChatTemplate) -> None:
    """Raise DataError if the chat template does not write the system message of data.system."""
    mark = "".join(unused_characters(template.source))
    roles = {"system": mark, "user": "question", "assistant": "answer"}
    try:
        text, _ = template.render([{"role": role, "content": content} for role, content in roles.items()])
        reason = "the chat template does not write system messages"
    except RowError as refusal:
        text, reason = "", str(refusal)
    if mark not in text:
        raise DataError(
            f"data.system: {reason}. Leave data.system out, or set data.chat_template to a template that writes it."
        )


def _integers(values: Any, where: str, length: int | None = None) -> list[int]:
    if not isinstance(values, (list, tuple)):
        raise RowError(f"{where} is {type_name(values)}" + ("" if values is None else ", not a list of integers"))
    if length is not None and len(values) != length:
        raise RowError(f"{where} has {len(values)} entries and input_ids has {length}")
    for index, value in enumerate(values):
        if not isinstance(value, int):
            raise RowError(f"{where}[{index}] is {type_name(value)}, not an integer")
    return [int(value) for value in values]


def _document(text: _Text, ids: list[int], offsets: Sequence[Span], finder: BorderFinder) -> Document:
    """`ids`, `offsets`: the tokens of the text, with ascending starts."""
    borders = finder.find(text.text, ids, offsets, [start for start, _ in text.spans])
    supervised = [False] * len(borders.ids)
    for first, (_, end) in zip(borders.firsts, text.spans, strict=True):
        last = bisect_left(borders.offsets, (end,))
        supervised[first:last] = [True] * (last - first)
    remarks = (*text.remarks, *[APART_REMARK] * borders.is_apart, *[CROSSED_REMARK] * borders.is_crossed)
    return Document(borders.ids, supervised, False, remarks, text.is_newly_read or borders.is_apart)


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[Span]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _leading_special_ids(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text, such as `<s>`."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start]
    return []


def _with_exact_offsets(tokenizer: Any) -> Any:
    """A copy without a post-processor. A ByteLevel post-processor (Llama-3, GPT-2) trims spaces off the offsets, so
    tokens of spaces get the wrong position. All others only add special tokens, which are not needed here."""
    exact = copy.deepcopy(tokenizer)
    exact.backend_tokenizer.post_processor = None
    return exact
