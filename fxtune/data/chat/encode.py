"""From rows to token ids and the mask that says which of them the model learns to write.

Chat rows are rendered by the chat template, tokenised as one text, and the supervised character spans (`template.py`)
are carried over to tokens by the tokenizer's offsets. Special tokens that somebody wrote into a message are text
(`literal.py`). A token is supervised when it overlaps a supervised span: one that
straddles the start, such as a leading space that belongs to the token of the first word, is supervised, since without it
the first word could never be learned. A token of no width that a tokenizer inserts counts where a span holds its place.

Rendered text is tokenised without added special tokens: the template wrote them already. Plain text gets the tokenizer's
beginning-of-text tokens and the end-of-text token, unless the text brings them along.

A row that cannot be used becomes the reason why, in its place in the result. What makes every row unusable (no chat
template, a template that does not compile, a slow tokenizer) is a DataError at once.
"""

from __future__ import annotations

import copy
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fxtune.data.chat.normalize import SURROGATE, BadRow, Conversation, conversation, kind, require_text, short
from fxtune.data.chat.special_tokens import Literal
from fxtune.data.chat.template import ChatTemplate, Span
from fxtune.data.read.files import require_file
from fxtune.data.read.formats import RowFormat
from fxtune.errors import DataError
from fxtune.system.resource_limits import LimitExceeded, limit_resources

IGNORE_INDEX = -100
"""The label that pre-tokenised data gives to tokens which are not targets, as everywhere in PyTorch."""
MOST = 1 << 20
"""Bytes of a chat template. Long ones have 30,000; a longer one would only be slow."""


@dataclass
class Document:
    ids: list[int]
    supervised: list[bool]
    """As long as ids: whether the model is trained to write this token. The first token of a document has nothing before
    it, so nobody can be trained to write it whatever stands here."""
    literal: bool = False
    """Whether special tokens in a message were tokenised as text."""


@dataclass
class _Draft:
    """A text on its way to the tokenizer. `whole`: plain text, which still needs its first and last special tokens."""

    text: str
    spans: list[Span]
    whole: bool


class Encoder:
    """Rows of one format to documents. Picklable; one instance serves a process.

    Args:
        tokenizer: a fast tokenizer (PreTrainedTokenizerFast).
        format: the rows' format, already detected (not `auto`).
        chat_template: path of a Jinja file that replaces the tokenizer's chat template.

    Raises:
        DataError: the tokenizer is slow, has no chat template although the format needs one, or the template is broken.
    """

    def __init__(self, tokenizer: Any, format: RowFormat, chat_template: str | None = None) -> None:
        assert format is not RowFormat.auto, "the format is detected before rows are encoded"
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so masks cannot be placed exactly; use a model that "
                "comes with a tokenizer.json, or set model.tokenizer to one that does"
            )
        self.format = format
        self._source = read_template(chat_template) if chat_template else None
        self._bos = _added_in_front(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id
        self._tokenizer = _with_exact_offsets(tokenizer)
        self._vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1 if format is RowFormat.tokens else 0
        self._templates: dict[bool, tuple[ChatTemplate, Literal]] = {}
        if format in (RowFormat.messages, RowFormat.sharegpt, RowFormat.alpaca):
            self._template(with_tools=False)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | str]:
        """One result a row, in order: its document, or the reason why the row cannot be used."""
        readers: dict[RowFormat, Callable[[Mapping[str, Any]], _Draft | Document]] = {
            RowFormat.text: _plain,
            RowFormat.tokens: partial(_tokens, vocabulary=self._vocabulary),
            RowFormat.prompt_completion: self._prompt_completion,
        }
        read = readers.get(self.format, self._chat)
        results: list[_Draft | Document | str] = []
        try:
            with (
                limit_resources()
            ):  # around all of them, it costs nothing; draw() has one of its own for who calls it alone
                for row in rows:
                    try:
                        if not isinstance(row, Mapping):
                            raise BadRow(f"the row is {kind(row)}, not an object")
                        results.append(read(row))
                    except BadRow as reason:
                        results.append(str(reason))
        except LimitExceeded as limit:
            raise DataError(
                f"the chat template asks for {limit}, which no conversation needs, and is stopped. Mend it, or name "
                "another in data.chat_template"
            ) from None
        drafts = [result for result in results if isinstance(result, _Draft)]
        documents = iter(self._tokenize(drafts) if drafts else [])
        return [next(documents) if isinstance(result, _Draft) else result for result in results]

    def remarks(self) -> list[str]:
        """What a user should know about the chat template before training with it."""
        if False not in self._templates:
            return []
        found = []
        if not self._template(with_tools=False)[0].frame.endings:
            found.append(
                "the chat template writes no end-of-turn token behind the assistant's answer, so the model is not taught "
                "where to stop; add one in a template of your own (data.chat_template=FILE)"
            )
        return found

    def _template(self, with_tools: bool) -> tuple[ChatTemplate, Literal]:
        if with_tools not in self._templates:
            template = _chat_template(self._tokenizer, self._source, with_tools)
            self._templates[with_tools] = template, Literal(self._tokenizer, template.frame.prompt)
        return self._templates[with_tools]

    def _chat(self, row: Mapping[str, Any]) -> _Draft | Document:
        chat = conversation(row, self.format)
        template, literal = self._template(chat.tools is not None)
        text, spans = template.spans(chat.messages, chat.learn, chat.tools)
        if not text.isascii() and SURROGATE.search(text):
            raise BadRow("a lone surrogate in tools or tool_calls: not valid Unicode")
        if not literal.within(chat.messages, chat.tools):
            return _Draft(text, spans, whole=False)
        aliased = literal.aliased(text, lambda mark: template.draw(mark(chat.messages), mark(chat.tools))[0])
        ids, offsets = literal.encode(aliased)
        return Document(ids, _overlaps(offsets, spans), literal=True)

    def _prompt_completion(self, row: Mapping[str, Any]) -> _Draft | Document:
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, (list, tuple)) or isinstance(completion, (list, tuple)):
            return self._chat(row)
        text = require_text(prompt, "prompt") + require_text(completion, "completion")
        if not completion:
            raise BadRow("completion is empty")
        return _Draft(text, [(len(text) - len(completion), len(text))], whole=True)

    def _tokenize(self, drafts: list[_Draft]) -> list[Document | str]:
        encoded = self._tokenizer(
            [draft.text for draft in drafts],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about the model's length: rows are split later
        )
        documents: list[Document | str] = []
        for draft, ids, offsets in zip(drafts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if not ids:
                documents.append("the tokenizer makes no token of this text")
                continue
            document = Document(ids, _overlaps(offsets, draft.spans))
            documents.append(
                self._completed(document, draft.spans[0] == (0, len(draft.text))) if draft.whole else document
            )
        return documents

    def _completed(self, document: Document, everything: bool) -> Document:
        """A plain text between its special tokens; the end is always learned, the beginning if `everything` is."""
        ids, supervised = document.ids, document.supervised
        if ids[: len(self._bos)] != self._bos:
            ids, supervised = self._bos + ids, [everything] * len(self._bos) + supervised
        if self._eos is not None and ids[-1] != self._eos:
            ids, supervised = [*ids, self._eos], [*supervised, True]
        return Document(ids, supervised)


def render(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> tuple[str, list[Span]]:
    """The text of a conversation and its supervised character spans. For a look at one conversation: it measures the
    template anew at each call, an `Encoder` does so once.

    Raises:
        DataError: the tokenizer has no chat template, or the template cannot be used with these messages.
    """
    chat: Conversation = conversation({"messages": messages, "tools": tools}, RowFormat.messages)
    return _chat_template(tokenizer, None, chat.tools is not None).spans(chat.messages, chat.learn, chat.tools)


def read_template(path: str) -> str:
    """The Jinja text of `data.chat_template`. Raises DataError where there is none."""
    try:
        file = Path(os.path.expanduser(path))
        require_file(file)
        if (size := file.stat().st_size) > MOST:
            raise DataError(f"data.chat_template={path}: {size:,} bytes are no chat template (the limit is {MOST:,})")
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
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template and the rows are chats; "
                "set data.chat_template=FILE to a Jinja template"
            )
        try:
            # Some models carry several templates by name; tools choose "tool_use", as in apply_chat_template.
            source = tokenizer.get_chat_template(None, [{}] if with_tools else None)
        except ValueError as error:
            raise DataError(
                f"the tokenizer's chat templates cannot be used: {error}; set data.chat_template=FILE"
            ) from None
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return ChatTemplate(source, dict(tokenizer.special_tokens_map), sorted(special | {tokenizer.eos_token or ""}))


def _plain(row: Mapping[str, Any]) -> _Draft:
    text = require_text(row.get("text"), "text")
    if not text.strip():
        raise BadRow("text is empty")
    return _Draft(text, [(0, len(text))], whole=True)


def _tokens(row: Mapping[str, Any], vocabulary: int) -> Document:
    ids = _integers(row.get("input_ids"), "input_ids")
    if not ids:
        raise BadRow("input_ids is empty")
    for index, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            raise BadRow(f"input_ids[{index}] is {short(token)}, outside the tokenizer's vocabulary of {vocabulary}")
    supervised = [True] * len(ids)
    if row.get("labels") is not None:
        labels = _integers(row["labels"], "labels", len(ids))
        for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (IGNORE_INDEX, token):
                raise BadRow(
                    f"labels[{index}] is {short(label)}; it must be {IGNORE_INDEX} or input_ids[{index}], which is {token}"
                )
        supervised = [label != IGNORE_INDEX for label in labels]
    elif row.get("assistant_masks") is not None:
        masks = _integers(row["assistant_masks"], "assistant_masks", len(ids))
        if (odd := next((index for index, mask in enumerate(masks) if mask not in (0, 1)), None)) is not None:
            raise BadRow(f"assistant_masks[{odd}] is {short(masks[odd])}; use 0 or 1")
        supervised = [mask == 1 for mask in masks]
    return Document(ids, supervised)


def _integers(values: Any, where: str, length: int | None = None) -> list[int]:
    if not isinstance(values, (list, tuple)):
        raise BadRow(f"{where} is {kind(values)}" + ("" if values is None else ", not a list of integers"))
    if length is not None and len(values) != length:
        raise BadRow(f"{where} has {len(values)} entries and input_ids has {length}")
    for index, value in enumerate(values):
        if not isinstance(value, int):
            raise BadRow(f"{where}[{index}] is {kind(value)}, not an integer")
    return [int(value) for value in values]


def _overlaps(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Which tokens overlap one of the spans. `offsets`: (start, end) a token, ascending starts."""
    supervised = [False] * len(offsets)
    for start, end in spans:
        first = bisect_left(offsets, (start,))
        # Tokens that begin earlier but reach into the span; several can be bytes of one character.
        while first > 0 and offsets[first - 1][1] > start:
            first -= 1
        last = bisect_left(offsets, (end,))
        supervised[first:last] = [True] * (last - first)
    return supervised


def _added_in_front(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text by itself, such as `<s>`."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start]
    return []


def _with_exact_offsets(tokenizer: Any) -> Any:
    """A copy whose offsets are those of the tokens. A ByteLevel post-processor (Llama-3, GPT-2) trims the spaces off them,
    which leaves tokens of spaces with no width at the wrong place. Post-processing otherwise only adds special tokens,
    and those we never ask for."""
    exact = copy.deepcopy(tokenizer)
    exact.backend_tokenizer.post_processor = None
    return exact
