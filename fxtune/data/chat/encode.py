"""Encodes rows as token ids and the mask of the tokens that the model learns to write.

Chat rows are rendered by the chat template and tokenized as one text, and the supervised character spans
(template.py) are mapped to tokens by the tokenizer's offsets. Special tokens that a message quotes are text
(special_tokens.py). A span begins with the first token that sampling writes behind the tokens of the prompt
(border.py). A token of zero width, which some tokenizers insert, is supervised if it is inside a span.

No special tokens are added to rendered text, because the template has written them. Plain text gets the
tokenizer's beginning-of-text and end-of-text tokens, unless the text has them.

The chat template writes a placeholder for each image of a message, and the tokens of the image take its place. They
are never supervised.

For a row that cannot be used, the result is the reason, a string. A fault that makes every row unusable (no chat
template, one that does not compile, a slow tokenizer) raises DataError at once.
"""

from __future__ import annotations

import copy
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from fxtune.data.chat.border import BorderFinder
from fxtune.data.chat.coverage import REASONING_REMARK, Coverage, reasoning_of
from fxtune.data.chat.pairs import faults, shortened
from fxtune.data.chat.special_tokens import SpecialTokenEscaper
from fxtune.data.chat.split import SplitChat, SplitCounts, split_chat, split_questions, truncate_chat
from fxtune.data.chat.template import ChatTemplate, Span
from fxtune.data.chat.template_source import (
    make_template,
    read_template,
    require_system,
    require_variables,
    written_times,
)
from fxtune.data.config import DataConfig, OnRewritten, template_time_now
from fxtune.data.formats.chat_format import SYSTEM_ROLES, VARIABLES
from fxtune.data.formats.image_parts import images_of
from fxtune.data.formats.registry import FORMATS, row_format, with_format_names
from fxtune.data.formats.row_format import (
    Content,
    Conversation,
    LearnConfig,
    PlainText,
    Preference,
    RowFormat,
    RowGroup,
    TokenIds,
)
from fxtune.data.formats.shapes import OTHERS
from fxtune.data.formats.values import SURROGATE, RowError, short, type_name
from fxtune.data.images.placed import PlacedImage
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.images.reference import ImageReference, find_image
from fxtune.errors import DataError
from fxtune.system.resource_limits import LimitExceeded, limit_resources, unlimited
from fxtune.upstream.tokenizers import one_panic

NO_TOKEN = "the tokenizer makes no token of this text"
MAX_TEMPLATES = 100
"""Different variables of the chat template, set by rows."""
REWRITTEN_REMARKS = {
    OnRewritten.split: "the chat template writes an answer otherwise once another turn follows (it drops reasoning, "
    "or ends the turn with another token), so each such question is a separate document, as in sampling "
    "(data.on_rewritten=context learns only the last question)",
    OnRewritten.context: "the chat template writes an answer otherwise once another turn follows (it drops reasoning, "
    "or ends the turn with another token), so it is context only, by data.on_rewritten=context",
}
EMPTY_REASONING_REMARK = (
    "answers without reasoning are learned with the empty block of reasoning that the chat template writes; to have "
    "the block in the prompt, as in sampling without reasoning, set the template's variable, "
    "data.chat_template_kwargs.enable_thinking=false (docs/data.md, Reasoning)"
)
PROMPT_REMARK = (
    "the chat template begins an answer otherwise in sampling than in a whole chat, so what is learned is not what "
    "will be asked; does a variable of data.chat_template_kwargs fit the reasoning of these rows?"
)
APART_REMARK = (
    "in one text, a token would lie across the border of a prompt and its answer, so the two are tokenized apart, as "
    "in sampling"
)
OTHERS_REMARK = (
    "some answers are not used: the most frequent one is learned, or by their scores the best and the worst"
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
    is_rewritten: bool = False
    """Whether a turn that is learned is not written as in sampling, because another one follows."""
    images: tuple[PlacedImage, ...] = ()
    """In the order of their tokens. No token of an image is supervised."""


@dataclass
class EncodedGroup:
    """The documents of a row that stay together."""

    documents: list[Document]
    labels: list[float]
    """A label for each document; NaN: none."""


@dataclass
class _Text:
    """A text for the tokenizer. `is_plain`: its beginning-of-text and end-of-text tokens are still missing."""

    text: str
    spans: list[Span]
    is_plain: bool
    remarks: tuple[str, ...] = ()
    is_rewritten: bool = False
    images: tuple[tuple[ImageReference, list[int]], ...] = ()
    """Each image with its ids, in the order of the placeholders."""


@dataclass
class _GroupTexts:
    documents: list[_Text | Document]
    names: list[str]
    """Where the row has each document, for messages."""
    labels: list[float]


class Encoder:
    """Rows of one format to documents. Picklable.

    Args:
        tokenizer: a fast tokenizer (PreTrainedTokenizerFast).
        format: the rows' format, already detected (not `auto`).
        chat_template: path of a Jinja file that replaces the tokenizer's chat template.
        learn: which turns of a chat are learned.
        unused: columns and fields that are not used on purpose; None: no part of a row need be in the text.
        system: a system message for each chat that has none.
        variables: variables of the chat template.
        on_rewritten: what to do with turns that the template writes otherwise once another turn follows.
        template_time: the date and time that templates write, in ISO 8601; None: the present, for all rows.
        images: the processor of a model that reads images; None: rows with images are bad rows.

    Raises:
        DataError: the tokenizer is slow, has no chat template although the format needs
            one, or the template is broken or reads none of `variables`.
    """

    def __init__(
        self,
        tokenizer: Any,
        format: RowFormat,
        chat_template: str | None = None,
        system: str | None = None,
        learn: LearnConfig | None = None,
        unused: Collection[str] | None = (),
        variables: Mapping[str, Any] | None = None,
        on_rewritten: OnRewritten = OnRewritten.split,
        template_time: str | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so masks cannot be placed exactly; use a model "
                "that comes with a tokenizer.json, or set model.tokenizer to one that does"
            )
        self.format = format
        self.learn = learn or LearnConfig()
        self.unused = tuple(unused or ())
        self._coverage = {
            name: Coverage(row_format, self.unused, unused is not None, images is not None)
            for name, row_format in (FORMATS if format.is_group else {format.name: format}).items()
        }
        self.system = system
        self.variables = dict(variables or {})
        self.on_rewritten = on_rewritten
        self.images = images
        self.folders: dict[str, Path] = {}
        """The folder of each data file, by its name, where the images of its rows are."""
        self._placeholders = images.placeholders if images is not None else {}
        self._placeholder_ids = frozenset(self._placeholders.values())
        self._time = datetime.fromisoformat(template_time or template_time_now())
        self.longest: int | None = None
        """Chats with more tokens are split into pieces, and longer rows of preferences lose the beginning of their
        prompt; None: not here."""
        self.packing = True
        """Whether all documents of a row of preferences share the `longest` tokens."""
        self.by_question = False
        """Whether split() makes a document of each question, because later turns change how its answer is written."""
        self.template_source = read_template(chat_template) if chat_template else None
        self.beginning = _leading_special_ids(tokenizer)
        """The ids that the tokenizer puts before each text."""
        self._eos: int | None = tokenizer.eos_token_id
        self._tokenizer = _with_exact_offsets(tokenizer)
        self._templates: dict[tuple[bool, str], tuple[ChatTemplate, SpecialTokenEscaper]] = {}
        encode, decode = partial(_encode, self._tokenizer), partial(_decode, self._tokenizer)
        self._borders = BorderFinder(encode, decode, tokenizer.added_tokens_decoder)
        if format.needs_template:
            self._template(with_tools=False)
            require_variables(self.variables, self._tokenizer.chat_template, self.template_source)

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Any, format: RowFormat, images: Any, **options: Any) -> Encoder:
        """The encoder with the chat template, its variables and the system prompt of `data`."""
        fixed = dict(variables=data.chat_template_kwargs, template_time=data.template_time, images=images)
        return cls(tokenizer, format, data.chat_template, data.system, **fixed, **options)

    @cached_property
    def _vocabulary(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(
        self, rows: Sequence[Mapping[str, Any]], folders: Sequence[Path | None] = ()
    ) -> list[Document | EncodedGroup | str]:
        """Return for each row, in order, its document or group of documents, or the reason why it cannot be used.
        `folders`: for each row the folder with the files of its images; none: its images are bytes."""
        results: list[_Text | Document | _GroupTexts | str] = []
        try:
            with limit_resources():  # one limit for all rows; render() sets its own for other callers
                for row, folder in zip_longest(rows, folders):
                    try:
                        if not isinstance(row, Mapping):
                            raise RowError(f"the row is {type_name(row)}, not an object")
                        results.append(self._read(row, folder))
                    except RowError as reason:
                        results.append(str(reason))
        except LimitExceeded as limit:
            raise DataError(
                f"the chat template was stopped: it needs {limit}, which no conversation should need. Correct it, or "
                "name another in data.chat_template"
            ) from None
        parts = [part for row in results for part in (row.documents if isinstance(row, _GroupTexts) else [row])]
        texts = [part for part in parts if isinstance(part, _Text)]
        tokenized = iter(self._tokenize(texts) if texts else [])

        def document(part: _Text | Document) -> Document | str:
            return next(tokenized) if isinstance(part, _Text) else part

        samples: list[Document | EncodedGroup | str] = []
        for result in results:
            if isinstance(result, _GroupTexts):
                documents = [document(part) for part in result.documents]
                reasons = [
                    f"{at}: {found}"
                    for at, found in zip(result.names, documents, strict=True)
                    if isinstance(found, str)
                ]
                whole = [found for found in documents if not isinstance(found, str)]
                if not reasons and self.format.answers:
                    reasons = faults(whole, self.format.answers)
                samples.append(reasons[0] if reasons else EncodedGroup(whole, result.labels))
            else:
                samples.append(result if isinstance(result, str) else document(result))
        return samples

    def _read(self, row: Mapping[str, Any], folder: Path | None) -> _Text | Document | _GroupTexts:
        content = self.format.read(row, self.learn, self.unused)
        documents = []
        if isinstance(content, Preference):
            names = list(self.format.answers)
            for name, own_row, answer in zip(names, content.rows, content.answers, strict=True):
                try:
                    document = self._document(own_row, answer, self.format, folder)
                    documents.append(_undivided(document, self.on_rewritten))
                except RowError as reason:
                    raise RowError(f"{name}: {reason}") from None
            return _GroupTexts(documents, names, content.labels)
        if not isinstance(content, RowGroup):
            return self._document(row, content, self.format, folder)
        self._coverage[self.format.name].check_columns(row, "")
        names = [f"documents[{index}]" for index in range(len(content.rows))]
        for name, part in zip(names, content.rows, strict=True):
            try:
                documents.append(self._group_document(part, folder))
            except RowError as reason:
                raise RowError(f"{name}{reason}") from None
        return _GroupTexts(documents, names, content.labels)

    def _group_document(self, row: Mapping[str, Any], folder: Path | None) -> _Text | Document:
        """One document of a group. Raises RowError, worded to follow the document's place."""
        row = with_format_names(dict(row), self.unused, self.images is not None)
        format = row_format(row)
        if format is None or format.is_group:
            raise RowError(f" has no format that fxtune knows; its columns: {', '.join(map(short, row))}")
        try:
            document = self._document(row, format.read(row, self.learn, self.unused), format, folder)
            return _undivided(document, self.on_rewritten)
        except RowError as reason:
            raise RowError(f": {reason}") from None

    def _document(
        self, row: Mapping[str, Any], content: Content, format: RowFormat, folder: Path | None
    ) -> _Text | Document:
        """The document of a row of `format` with this content, which is no group."""
        coverage = self._coverage[format.name]
        if isinstance(content, Conversation):
            if next(images_of(content), None) is None:
                turns = [turn.get("content") or "" for turn in content.messages if turn["role"] != "assistant"]
                coverage.check_images(row, turns)
            self._find_images(content, folder)
            return self._rendered(self._with_system(content), coverage)
        if isinstance(content, PlainText):
            coverage.check_images(row, [content.text[: content.first]])
            coverage.check_columns(row, content.text)
            return _Text(content.text, [(content.first, len(content.text))], True, (OTHERS_REMARK,) * (OTHERS in row))
        assert isinstance(content, TokenIds)
        for index, token in enumerate(content.ids):
            if not 0 <= token < self._vocabulary:
                raise RowError(
                    f"input_ids[{index}] is {short(token)}, outside the tokenizer's vocabulary of {self._vocabulary}"
                )
        coverage.check_images(row)
        coverage.check_columns(row, "")
        self._require_no_placeholder(content.ids)
        return Document(content.ids, content.supervised)

    def _find_images(self, chat: Conversation, folder: Path | None) -> None:
        """Replace what names the images of a chat by where they are."""
        if self.images is None and (found := next(images_of(chat), None)):
            raise RowError(
                f"{found[0]} has an image, and only text is read here: the model reads no images, or has no "
                "preprocessor_config.json. Choose a model that reads images, or remove such rows"
            )
        for message in chat.messages:
            if "images" in message:
                message["images"] = [self._found(place, value, folder) for place, value in message["images"]]

    @staticmethod
    def _found(place: str, value: Any, folder: Path | None) -> ImageReference:
        try:
            with unlimited():
                return find_image(value, folder)
        except RowError as reason:
            raise RowError(f"{place}: {reason}") from None

    def _require_no_placeholder(self, ids: Sequence[int]) -> None:
        """Raise RowError if a document without images has the token of one."""
        if self._placeholder_ids and not self._placeholder_ids.isdisjoint(ids):
            raise RowError(
                f"the text holds {' or '.join(self._placeholders)}, which stands for an image, and the row has no "
                "image there"
            )

    def split(self, row: Mapping[str, Any], whole: Document, folder: Path | None = None) -> SplitChat:
        """The documents of a chat: one for each question (`self.by_question`), divided into pieces where it has more
        than `self.longest` tokens. `whole`: the tokens of the chat."""
        content = self.format.read(row, self.learn, self.unused)
        if not isinstance(content, Conversation):
            assert self.longest is not None
            return truncate_chat(whole, self.longest)

        def encode(chat: Conversation) -> Document | None:
            try:
                rendered = self._rendered(chat)
            except RowError:
                return None
            document = self._tokenize([rendered])[0] if isinstance(rendered, _Text) else rendered
            return document if isinstance(document, Document) else None

        self._find_images(content, folder)
        chat = self._with_system(content)
        if not (self.by_question and whole.is_rewritten):
            assert self.longest is not None
            return split_chat(chat, whole, encode, self.longest)
        return split_questions(chat, self._rewritten_turns(chat), encode, self.longest)

    def shorten(self, documents: list[Document]) -> SplitChat:
        """The documents of a row of preferences, which have more than `self.longest` tokens, with a shorter prompt;
        none if their answers do not fit."""
        assert self.longest is not None
        found = shortened(documents, self.longest, self.packing, self.beginning)
        if found is None:
            return SplitChat([], SplitCounts(chats=1, dropped=1))
        lost = sum(len(whole.ids) - len(part.ids) for whole, part in zip(documents, found, strict=True))
        return SplitChat(found, SplitCounts(chats=1, pieces=1, truncated=1, lost_tokens=lost))

    def is_long(self, documents: Sequence[Document]) -> bool:
        """Whether a row of preferences has more than `self.longest` tokens."""
        lengths = [len(document.ids) for document in documents]
        return self.longest is not None and (sum if self.packing else max)(lengths) > self.longest

    def remarks(self) -> list[str]:
        """What a user should know about the chat template before training with it."""
        if not self._templates:
            given = {"system": self.system is not None, VARIABLES: bool(self.variables)}
            form = self.format.name
            found = [f"data.{key} is for chats; it changes no {form} rows" for key, is_set in given.items() if is_set]
            if self._eos is None and self.format.name != "tokens":
                found.append(
                    "the tokenizer has no end-of-text token, so the model does not learn where to stop; name a "
                    "tokenizer with one in model.tokenizer (`eos_token` in its tokenizer_config.json), or write the "
                    "end into the rows"
                )
            return found
        times = [
            f"the chat template writes the time, as {text}, in each document; data.template_time=TIME sets another one"
            for text in self.written_times()
        ]
        template, _ = self._template(with_tools=False)
        if template.next_header:
            times.append(
                f"the chat template ends no turn, and models stop at the first token of the next one, so "
                f"{template.next_header} is learned as the end of an answer"
            )
        if template.frame.endings:
            return times
        return [
            *times,
            "the chat template writes no end-of-turn token after the assistant's answer, so the model does not learn "
            "where to stop; add one in a template of your own (data.chat_template=FILE)",
        ]

    def written_times(self) -> list[str]:
        """What the chat template writes with strftime_now: on a day, most templates write the same."""
        if not (self.format.is_chat or self.format.is_group):
            return []
        return written_times(self._tokenizer.chat_template, self.template_source, self._time)

    def _template(
        self, with_tools: bool, variables: Mapping[str, Any] | None = None
    ) -> tuple[ChatTemplate, SpecialTokenEscaper]:
        """`variables`: the template variables that a row sets."""
        used = self.variables | dict(variables or {})
        key = with_tools, json.dumps(used, sort_keys=True, default=str)
        if key not in self._templates:
            if len(self._templates) > MAX_TEMPLATES:
                raise RowError(
                    f"{VARIABLES} has another value in each row. A template is measured once for each, so at most "
                    f"{MAX_TEMPLATES} are used: write what differs from row to row into the messages"
                )
            try:
                require_variables(variables or {}, self._tokenizer.chat_template, self.template_source)
            except DataError as error:
                raise RowError(str(error).removeprefix("data.")) from None
            template = make_template(self._tokenizer, self.template_source, with_tools, used, self._time)
            if self.system is not None:
                require_system(template)
            self._templates[key] = template, SpecialTokenEscaper(self._tokenizer, template.frame.prompt)
        return self._templates[key]

    def _with_system(self, chat: Conversation) -> Conversation:
        if self.system is not None and all(message["role"] not in SYSTEM_ROLES for message in chat.messages):
            chat.messages.insert(0, {"role": "system", "content": self.system})
            chat.supervised.insert(0, False)
        return chat

    def _rendered(self, chat: Conversation, coverage: Coverage | None = None) -> _Text | Document:
        """`coverage`: what looks for the row of the chat in the text; None for a part of a chat."""
        template, escaper = self._template(chat.tools is not None, chat.variables)
        messages, supervised = template.adapted(chat.messages), chat.supervised
        if chat.variables and escaper.is_quoted([], [chat.variables]):
            raise RowError(f"{VARIABLES} holds a special token")
        rewritten = self._rewritten_turns(chat)
        if rewritten and self.on_rewritten is OnRewritten.context:
            supervised = [learned and index > rewritten[-1] for index, learned in enumerate(supervised)]
        text, spans = template.supervised_spans(messages, supervised, chat.tools)
        if not text.isascii() and SURROGATE.search(text):
            raise RowError("a lone surrogate in tools or tool_calls: not valid Unicode")
        aliased = None
        if escaper.is_quoted(messages, chat.tools):
            aliased = escaper.alias(text, lambda mark: template.render(mark(messages), mark(chat.tools))[0])
        images = list(chain.from_iterable(message.get("images", ()) for message in messages))
        remarks: tuple[str, ...] = ()
        if coverage is not None:
            found = coverage.check_conversation(chat.row, chat, messages, text, template)
            found += [OTHERS_REMARK] * (OTHERS in chat.row)
            if rewritten:
                others = [remark for remark in found if remark != REASONING_REMARK]
                found = [REWRITTEN_REMARKS[self.on_rewritten], *others]
            last = max((index for index, learned in enumerate(supervised) if learned), default=None)
            if template.writes_empty_reasoning and any(
                learned and message["role"] == "assistant" and not reasoning_of(message)
                for message, learned in zip(messages, supervised, strict=True)
            ):
                found.append(EMPTY_REASONING_REMARK)
            if last is not None and template.asks_otherwise(messages, last, chat.tools):
                found.append(PROMPT_REMARK)
            remarks = tuple(found)
        if aliased is None:
            text, spans, placed = self._with_letters(text, spans, images, str)
            return _Text(text, spans, False, remarks, bool(rewritten), placed)
        spans = [(aliased.position(start), aliased.position(end)) for start, end in spans]
        text, spans, placed = self._with_letters(aliased.text, spans, images, escaper.alias_of)
        ids, offsets = escaper.encode(text)
        if not ids:
            raise RowError(NO_TOKEN)
        finder = BorderFinder(escaper.encode_part, escaper.decode, self._tokenizer.added_tokens_decoder)
        document = _document(_Text(text, spans, False, remarks, bool(rewritten)), ids, offsets, finder)
        return replace(self._with_images(document, placed), escaped=True)

    def _with_letters(
        self, text: str, spans: list[Span], images: Sequence[ImageReference], written: Callable[[str], str]
    ) -> tuple[str, list[Span], tuple[tuple[ImageReference, list[int]], ...]]:
        """A rendered text and its spans with the letters that the processor writes around each image, and the images
        with their ids. `written`: how the text has a placeholder."""
        if self.images is None:
            return text, spans, ()
        tokens = {written(name): name for name in self._placeholders}
        found = list(re.finditer("|".join(map(re.escape, tokens)), text))
        if len(found) != len(images):
            raise RowError(
                f"the chat template writes {len(found)} placeholders ({' or '.join(self._placeholders)}) for "
                f"{len(images)} images"
            )
        placed, parts, at, moves = [], [], 0, []
        for match, image in zip(found, images, strict=True):
            try:
                with unlimited():
                    letters = self.images.text(*image.size, tokens[match.group()])
            except RowError as reason:
                raise RowError(f"{image.name}: {reason}") from None
            placed.append((image, letters.ids))
            parts += [text[at : match.start()], letters.before, match.group(), letters.after]
            moves.append((match.start(), len(letters.before) + len(letters.after)))
            at = match.end()

        def moved(position: int) -> int:
            return position + sum(length for start, length in moves if start < position)

        text = "".join([*parts, text[at:]])
        return text, [(moved(start), moved(end)) for start, end in spans], tuple(placed)

    def _with_images(self, document: Document, images: Sequence[tuple[ImageReference, list[int]]]) -> Document:
        """A document with the tokens of its images in the place of their placeholders. Raises RowError."""
        if not images:
            self._require_no_placeholder(document.ids)
            return document
        at = [index for index, token in enumerate(document.ids) if token in self._placeholder_ids]
        if len(at) != len(images):
            raise RowError(f"the tokenizer makes {len(at)} placeholders of the {len(images)} that stand for images")
        ids, supervised, placed, end = list[int](), list[bool](), list[PlacedImage](), 0
        for index, (image, own) in zip(at, images, strict=True):
            ids += document.ids[end:index]
            supervised += document.supervised[end:index]
            placed.append(PlacedImage(len(ids), len(own), image))
            ids += own
            supervised += [False] * len(own)
            end = index + 1
        ids, supervised = ids + document.ids[end:], supervised + document.supervised[end:]
        return replace(document, ids=ids, supervised=supervised, images=tuple(placed))

    def _rewritten_turns(self, chat: Conversation) -> list[int]:
        """The turns that are learned and not written as in sampling, in ascending order."""
        if self.on_rewritten is OnRewritten.keep:
            return []
        template, _ = self._template(chat.tools is not None, chat.variables)
        return template.rewritten_turns(template.adapted(chat.messages), chat.supervised, chat.tools)

    def _tokenize(self, texts: list[_Text]) -> list[Document | str]:
        with one_panic():
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
                if ids[: len(self.beginning)] != self.beginning:
                    all_supervised = text.spans[0] == (0, len(text.text))  # after a prompt, it is not
                    ids, supervised = self.beginning + ids, [all_supervised] * len(self.beginning) + supervised
                if self._eos is not None and ids[-1] != self._eos:
                    ids, supervised = [*ids, self._eos], [*supervised, True]
                document = replace(document, ids=ids, supervised=supervised)
            try:
                documents.append(self._with_images(document, text.images))
            except RowError as reason:
                documents.append(str(reason))
        return documents


def _undivided(document: _Text | Document, on_rewritten: OnRewritten) -> _Text | Document:
    """A document of a group. Raises RowError if it must be divided, because each question needs a document."""
    if document.is_rewritten and on_rewritten is OnRewritten.split:
        raise RowError(
            "the chat template writes an answer otherwise once another turn follows, and a document of a group is not "
            "divided. Learn the last answer alone (data.on_rewritten=context)"
        )
    return document


def _document(text: _Text, ids: list[int], offsets: Sequence[Span], finder: BorderFinder) -> Document:
    """`ids`, `offsets`: the tokens of the text, with ascending starts."""
    borders = finder.find(text.text, ids, offsets, [start for start, _ in text.spans])
    supervised = [False] * len(borders.ids)
    for first, (_, end) in zip(borders.firsts, text.spans, strict=True):
        last = bisect_left(borders.offsets, (end,))
        supervised[first:last] = [True] * (last - first)
    remarks = (*text.remarks, *[APART_REMARK] * borders.is_apart, *[CROSSED_REMARK] * borders.is_crossed)
    return Document(borders.ids, supervised, False, remarks, text.is_rewritten)


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
