"""Encodes rows as token ids, with a mask of the tokens that the model learns to write.

Chat rows are rendered by the chat template and tokenized as one text. The supervised spans of characters (turns.py)
are mapped to tokens by the tokenizer's offsets. Special tokens that a message quotes are text (special_tokens.py). A
span begins with the first token that sampling writes after the prompt (border.py). A token of zero width, which some
tokenizers insert, is supervised if it is inside a span.

The template writes the special tokens of chats. Plain text gets the tokenizer's beginning-of-text and end-of-text
tokens, unless the text has them.

The result for a bad row is a string that describes the fault. A fault of all rows (no chat template, a template that
does not compile, a slow tokenizer) raises DataError at once.
"""

from __future__ import annotations

import copy
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from fxtune.data.chat.border import BorderFinder, Span
from fxtune.data.chat.coverage import Coverage, reasoning_and_content
from fxtune.data.chat.pairs import faults, shortened
from fxtune.data.chat.remarks import (
    APART_REMARK,
    CROSSED_REMARK,
    EMPTY_REASONING_REMARK,
    OTHERS_REMARK,
    PROMPT_REMARK,
    REASONING_REMARK,
    REWRITTEN_REMARKS,
    TEXT_REMARK,
)
from fxtune.data.chat.rewriting import Rewriting
from fxtune.data.chat.split import SplitChat, SplitCounts, split_chat, split_questions, truncate_chat
from fxtune.data.chat.template import Messages
from fxtune.data.chat.template_source import ChatTemplates, template_of_pairs, write_pair
from fxtune.data.chat.turns import supervised_spans
from fxtune.data.config import DataConfig, OnRewritten
from fxtune.data.formats.chat_format import SYSTEM_ROLES, VARIABLES
from fxtune.data.formats.registry import FORMATS, row_format, with_format_names
from fxtune.data.formats.row_format import (
    Content,
    Conversation,
    Labelled,
    LearnConfig,
    PlainText,
    Preference,
    Prompt,
    RowFormat,
    RowGroup,
    TextGroup,
    TokenIds,
)
from fxtune.data.formats.shapes import OTHERS
from fxtune.data.formats.values import SURROGATE, RowError, short, type_name
from fxtune.data.images.placed import PlacedImage
from fxtune.data.images.placeholders import Placeholders
from fxtune.data.images.processor import ImageProcessor
from fxtune.errors import DataError
from fxtune.upstream.tokenizers import one_panic


@dataclass
class Document:
    ids: list[int]
    supervised: list[bool]
    """For each id, whether the model learns to write it. Nothing precedes the first token, so it is never a target."""
    escaped: bool = False
    """Whether special tokens in a message were tokenized as text."""
    remarks: tuple[str, ...] = ()
    """Lines of remarks.py that are true of the document."""
    is_rewritten: bool = False
    """Whether the template writes a learned turn differently than in sampling, because another turn follows."""
    images: tuple[PlacedImage, ...] = ()
    """The images, in the order of their tokens. No token of an image is supervised."""
    lost: int = 0
    """Tokens of the text that were cut."""


@dataclass
class EncodedGroup:
    """The documents of a row that stay together."""

    documents: list[Document]
    labels: list[float] | list[str]
    """A label for each document: a number, NaN for a document without a label; or the name of a label."""


_Result = TypeVar("_Result", bound=Document | EncodedGroup)
Steps = Generator[str, tuple[list[int], list[Span]], _Result]
"""A generator that makes a document or a group. It yields texts, is sent the ids and the offsets of their tokens, and
returns the result. It raises RowError for a bad row."""


class Encoder:
    """Encodes rows of one format as documents. Picklable.

    Args:
        tokenizer: a fast tokenizer (PreTrainedTokenizerFast).
        format: the rows' format, already detected (not `auto`).
        chat_template: path of a Jinja file that replaces the tokenizer's chat template.
        learn: which turns of a chat are learned.
        unused: columns and fields that are left out on purpose; None: any part of a row may be lost.
        system: a system message for each chat without one.
        variables: variables of the chat template.
        on_rewritten: what to do with turns that the template writes differently once another turn follows.
        template_time: the date and time that templates write, in ISO 8601; None: the present time, once for all rows.
        images: the processor of a model that reads images; None: rows with images are bad rows.
        instruction: the text before each query, for rows of texts to compare.

    Raises DataError if the tokenizer is slow, if it lacks a chat template that the format needs, or if the template is
    broken or does not read one of `variables`.
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
        instruction: str = "",
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} is not a fast tokenizer, so masks cannot be placed exactly; use a model "
                "that comes with a tokenizer.json, or set model.tokenizer to one that does"
            )
        if format.writes_pairs:  # a template for chats writes no pairs
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = template_of_pairs(tokenizer, chat_template)
        self.format, self.learn, self.unused = format, learn or LearnConfig(), tuple(unused or ())
        self._coverage = {
            name: Coverage(row_format, self.unused, unused is not None, images is not None)
            for name, row_format in (FORMATS if format.is_group else {format.name: format}).items()
        }
        self.system, self.variables, self.on_rewritten = system, dict(variables or {}), on_rewritten
        self.images, self._placeholders = images, Placeholders(images)
        self.instruction = instruction
        self.tools: list[dict[str, Any]] | None = None
        """JSON schemas of the tools of each prompt; None: the schemas that the row has."""
        self.folders: dict[str, Path] = {}
        """{name of a data file: the folder in which the paths of its images begin}."""
        self.longest: int | None = None
        """Chats with more tokens are split, and rows of preferences lose the beginning of their prompt; None: no
        limit."""
        self.packing = True
        """Whether `longest` limits the documents of a row of preferences together. False: it limits each document."""
        self.by_question = False
        """Whether split() makes a document of each question with a rewritten answer."""
        self._frames = _frame(tokenizer), _frame(tokenizer, "a")
        """What the tokenizer puts before, between and after the tokens of a text, and of two texts."""
        self.beginning, _, end = self._frames[0]
        """The ids that the tokenizer puts before each text."""
        eos: int | None = tokenizer.eos_token_id
        self._end = end or ([] if eos is None else [eos])
        """The ids after each plain text: the tokenizer's own closing ids ([SEP] of BERT), else its end of text."""
        self._tokenizer = copy.deepcopy(tokenizer)
        # The ByteLevel post-processor (Llama-3, GPT-2) trims spaces off the offsets. Other post-processors only add
        # special tokens, which are not needed here.
        self._tokenizer.backend_tokenizer.post_processor = None
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        self._borders = BorderFinder(self._tokenizer.backend_tokenizer, tokenizer.added_tokens_decoder)
        self.templates = ChatTemplates(self._tokenizer, chat_template, self.variables, template_time, system)
        self._template_of_pairs = format.writes_pairs and bool(tokenizer.chat_template)
        if format.needs_template:
            self.templates.get(with_tools=False)
            self.templates.require_variables(self.variables)

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Any, format: RowFormat, images: Any, **options: Any) -> Encoder:
        """The encoder with the chat template, its variables and the system prompt of `data`."""
        fixed = dict(variables=data.chat_template_kwargs, template_time=data.template_time, images=images)
        return cls(tokenizer, format, data.chat_template, data.system, **fixed, **options)

    @property
    def template(self) -> Any:
        """The chat template, as transformers keeps it; None if rows are written without one."""
        return self.templates.source or self._tokenizer.chat_template

    @cached_property
    def _vocabulary(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(
        self, rows: Sequence[Mapping[str, Any]], folders: Sequence[Path | None] = ()
    ) -> list[Document | EncodedGroup | str]:
        """The document or the group of each row, or its fault. `folders`: for each row, the folder with the files of
        its images. Rows without a folder have images as bytes."""
        with one_panic():
            return self._finish([self._row(row, folder) for row, folder in zip_longest(rows, folders)])

    def _finish(self, steps: Sequence[Steps[_Result]]) -> list[_Result | str]:
        """The results of `steps`, or the messages of their RowErrors. Texts are tokenized together, to save time."""
        results = list[_Result | str]([""] * len(steps))
        tokens: dict[int, Any] = dict.fromkeys(range(len(steps)))
        while tokens:
            texts = {}
            for index, found in tokens.items():
                try:
                    texts[index] = steps[index].send(found)
                except StopIteration as end:
                    results[index] = end.value
                except RowError as reason:
                    results[index] = str(reason)
            tokens = dict(zip(texts, self._borders.encode(list(texts.values())), strict=True))
        return results

    def _row(self, row: Mapping[str, Any], folder: Path | None) -> Steps[Document | EncodedGroup]:
        if not isinstance(row, Mapping):
            raise RowError(f"the row is {type_name(row)}, not an object")
        content = self.format.read(row, self.learn, self.unused)
        documents = []
        if isinstance(content, Preference):
            for name, own_row, answer in zip(self.format.answers, content.rows, content.answers, strict=True):
                try:
                    documents.append(
                        self._undivided((yield from self._document(own_row, answer, self.format, folder)))
                    )
                except RowError as reason:
                    raise RowError(f"{name}: {reason}") from None
            if wrong := faults(documents, self.format.answers):
                raise RowError(wrong)
            return EncodedGroup(documents, content.labels)
        if isinstance(content, Labelled):
            document = yield from self._document(row, content.content, self.format, folder)
            return EncodedGroup([document], [content.label])
        if isinstance(content, TextGroup):
            return (yield from self._text_group(row, content))
        if isinstance(content, Prompt):
            return EncodedGroup([(yield from self._prompt(content.content, folder))], [0.0])
        if not isinstance(content, RowGroup):
            return (yield from self._document(row, content, self.format, folder))
        self._coverage[self.format.name].check_columns(row, "")
        for index, part in enumerate(content.rows):
            try:
                part = with_format_names(dict(part), self.unused, self.images is not None)
                format = row_format(part)
                if format is None or format.is_group:
                    raise RowError(f"no format that fxtune knows; its columns: {', '.join(map(short, part))}")
                inner = format.read(part, self.learn, self.unused)
                documents.append(self._undivided((yield from self._document(part, inner, format, folder))))
            except RowError as reason:
                raise RowError(f"documents[{index}]: {reason}") from None
        return EncodedGroup(documents, content.labels)

    def _text_group(self, row: Mapping[str, Any], content: TextGroup) -> Steps[EncodedGroup]:
        """The documents of texts that stay together, each as the tokenizer encodes it at use."""
        self._coverage[self.format.name].check_columns(row, "")
        documents = list[Document]()
        for place, text in content.texts.items():
            if self.format.is_compared and not documents:
                text = replace(text, text=self.instruction + text.text)
            try:
                documents.append((yield from self._as_tokenized(text)))
            except RowError as reason:
                raise RowError(f"{place}: {reason}") from None
        return EncodedGroup(documents, content.labels)

    def _prompt(self, content: Conversation | PlainText, folder: Path | None) -> Steps[Document]:
        """The document of a prompt, up to the place where the model begins to write. No token is supervised."""
        if self.tools and (not isinstance(content, Conversation) or content.variables):
            raise RowError(f"the source's environment needs a prompt of messages, without {VARIABLES} of its own")
        if isinstance(content, Conversation):
            content.tools = self.tools or content.tools
            self._placeholders.find_images(content.messages, folder)
            return (yield from self._chat(self._with_system(content)))
        ids, _ = yield content.text
        if not ids:
            raise RowError("the tokenizer makes no token of this text")
        ids = list(ids) if list(ids[: len(self.beginning)]) == self.beginning else [*self.beginning, *ids]
        return Document(ids, [False] * len(ids))

    def _undivided(self, document: Document) -> Document:
        """Return a document of a group. Raises RowError if it must be divided into a document for each question."""
        if document.is_rewritten and self.on_rewritten is OnRewritten.split:
            raise RowError(
                "the chat template writes an answer otherwise once another turn follows, and a document of a group is "
                "not divided. Learn the last answer alone (data.on_rewritten=context)"
            )
        return document

    def _document(
        self, row: Mapping[str, Any], content: Content, format: RowFormat, folder: Path | None
    ) -> Steps[Document]:
        """The document of a row of `format` with the content `content`, which must not be a group."""
        coverage = self._coverage[format.name]
        if isinstance(content, Conversation):
            if not any(turn.get("images") for turn in content.messages):
                turns = [turn.get("content") or "" for turn in content.messages if turn["role"] != "assistant"]
                coverage.check_images(row, turns)
            self._placeholders.find_images(content.messages, folder)
            return (yield from self._chat(self._with_system(content), coverage))
        if isinstance(content, PlainText) and content.as_tokenized:
            coverage.check_columns(row, content.text + (content.second or ""))
            return (yield from self._as_tokenized(content))
        if isinstance(content, PlainText):
            coverage.check_images(row, [content.text[: content.first]])
            coverage.check_columns(row, content.text)
            remarks = (OTHERS_REMARK,) * (OTHERS in row) + (TEXT_REMARK,) * (content.first > 0)
            return (yield from self._plain_text(content, remarks))
        assert isinstance(content, TokenIds)
        for index, token in enumerate(content.ids):
            if not 0 <= token < self._vocabulary:
                raise RowError(
                    f"input_ids[{index}] is {short(token)}, outside the tokenizer's vocabulary of {self._vocabulary}"
                )
        coverage.check_images(row)
        coverage.check_columns(row, "")
        return Document(*self._placeholders.replace(content.ids, content.supervised, (), ())[:2])

    def _as_tokenized(self, content: PlainText) -> Steps[Document]:
        """The document that the tokenizer makes of a text or of two, with at most `longest` tokens: the end of the
        longer text is cut, as with `truncation=True`."""
        if content.second is not None and self._template_of_pairs:
            return (yield from self._as_pair(content.text, content.second))
        frame = self._frames[content.second is not None]
        parts = [list((yield content.text)[0])]
        if content.second is not None:
            parts.append(list((yield content.second)[0]))
        if not any(parts):
            raise RowError("the tokenizer makes no token of this text")
        lost = max(sum(map(len, (*parts, *frame))) - (self.longest or sys.maxsize), 0)
        for _ in range(lost):
            max(parts, key=len).pop()
        ids = [*frame[0], *parts[0], *frame[1] * (len(parts) > 1), *parts[-1] * (len(parts) > 1), *frame[2]]
        return Document(ids, [True] * len(ids), lost=lost)

    def _as_pair(self, query: str, candidate: str) -> Steps[Document]:
        """The document that the chat template makes of a query and a candidate, as sentence-transformers does. The end
        of the candidate is cut at `longest` tokens."""
        text, begin, after = write_pair(self._tokenizer, self.system, query, candidate)
        ids, offsets = yield text
        first, end = (sum(start < at for start, _ in offsets) for at in (begin, after))
        lost = max(len(ids) - (self.longest or sys.maxsize), 0)
        if lost and lost >= end - first:
            raise RowError("the chat template and the query alone have more tokens than data.sequence_length")
        kept = [*ids[: end - lost], *ids[end:]]
        return Document(kept, [True] * len(kept), lost=lost)

    def _plain_text(self, content: PlainText, remarks: tuple[str, ...]) -> Steps[Document]:
        ids, offsets = yield content.text
        document = _document(content.text, ids, offsets, [(content.first, len(content.text))], self._borders)
        ids, supervised = document.ids, document.supervised
        if ids[: len(self.beginning)] != self.beginning:
            # If the text has a prompt, the beginning belongs to the prompt and is not learned.
            ids, supervised = self.beginning + ids, [not content.first] * len(self.beginning) + supervised
        if self._end and ids[-len(self._end) :] != self._end:
            ids, supervised = ids + self._end, supervised + [True] * len(self._end)
        self._placeholders.replace(ids, supervised, (), ())
        return replace(document, ids=ids, supervised=supervised, remarks=remarks + document.remarks)

    def _chat(self, chat: Conversation, coverage: Coverage | None = None) -> Steps[Document]:
        """The document of a chat. `coverage`: checks that the row is in the text; None for a part of a chat."""
        template, escaper, rewriting = self.templates.get(chat.tools is not None, chat.variables)
        messages, supervised = template.adapted(chat.messages), chat.supervised
        if chat.variables and escaper.is_quoted([], [chat.variables]):
            raise RowError(f"{VARIABLES} holds a special token")
        rewritten = self._rewritten_turns(chat)
        if rewritten and self.on_rewritten is OnRewritten.context:
            supervised = [learned and index > rewritten[-1] for index, learned in enumerate(supervised)]
        if chat.asks:
            text, spans = template.render(messages, chat.tools, prompt=True)
        else:
            text, spans = supervised_spans(template, messages, supervised, chat.tools)
        if not text.isascii() and SURROGATE.search(text):
            raise RowError("a lone surrogate in tools or tool_calls: not valid Unicode")
        aliased = text
        written: Callable[[str], str] = str
        if escaped := escaper.is_quoted(messages, chat.tools):
            found = escaper.alias(
                text, lambda mark: template.render(mark(messages), mark(chat.tools), prompt=chat.asks)[0]
            )
            spans = [(found.position(start), found.position(end)) for start, end in spans]
            aliased, written = found.text, escaper.alias_of
        remarks = self._remarks(chat, messages, supervised, bool(rewritten), text, rewriting, coverage)
        images = list(chain.from_iterable(message.get("images", ()) for message in messages))
        text, spans, ids_of = self._placeholders.with_letters(aliased, spans, images, written)
        if escaped:
            finder = escaper.finder(text)
            ((tokens, offsets),) = finder.encode([text])
        else:
            finder = self._borders
            tokens, offsets = yield text
        document = _document(text, tokens, offsets, spans, finder)
        ids, learned, placed = self._placeholders.replace(document.ids, document.supervised, images, ids_of)
        return Document(ids, learned, escaped, remarks + document.remarks, bool(rewritten), placed)

    def _remarks(
        self,
        chat: Conversation,
        messages: Messages,
        supervised: Sequence[bool],
        is_rewritten: bool,
        text: str,
        rewriting: Rewriting,
        coverage: Coverage | None,
    ) -> tuple[str, ...]:
        """Lines about the text of a chat; none without `coverage`. Raises RowError if a part of the row is lost."""
        if coverage is None:
            return ()
        template = rewriting.template
        found = coverage.check_conversation(chat.row, chat, messages, text, template)
        found += [OTHERS_REMARK] * (OTHERS in chat.row)
        if is_rewritten:
            found = [REWRITTEN_REMARKS[self.on_rewritten], *(line for line in found if line != REASONING_REMARK)]
        learned = [index for index, is_learned in enumerate(supervised) if is_learned]
        # Whether an answer without reasoning begins with an empty block of reasoning.
        if any("</think>" in lead for lead in template.frame.leads) and any(
            messages[index]["role"] == "assistant" and not reasoning_and_content(messages[index])[0]
            for index in learned
        ):
            found.append(EMPTY_REASONING_REMARK)
        if learned and rewriting.asks_otherwise(messages, learned[-1], chat.tools):
            found.append(PROMPT_REMARK)
        return tuple(found)

    def _rewritten_turns(self, chat: Conversation) -> list[int]:
        """The learned turns that the template writes differently than in sampling, ascending; none if all are kept."""
        if self.on_rewritten is OnRewritten.keep:
            return []
        template, _, rewriting = self.templates.get(chat.tools is not None, chat.variables)
        return rewriting.turns(template.adapted(chat.messages), chat.supervised, chat.tools)

    def _with_system(self, chat: Conversation) -> Conversation:
        if self.system is not None and all(message["role"] not in SYSTEM_ROLES for message in chat.messages):
            chat.messages.insert(0, {"role": "system", "content": self.system})
            chat.supervised.insert(0, False)
        return chat

    def split(self, row: Mapping[str, Any], whole: Document, folder: Path | None = None) -> SplitChat:
        """The documents of a chat. With `self.by_question` a document ends with each rewritten answer. Documents with
        more than `self.longest` tokens are divided into pieces. `whole`: the document of the whole chat."""
        content = self.format.read(row, self.learn, self.unused)
        if not isinstance(content, Conversation):
            assert self.longest is not None
            return truncate_chat(whole, self.longest)

        def encode(chat: Conversation) -> Document | None:
            (found,) = self._finish([self._chat(chat)])
            return None if isinstance(found, str) else found

        self._placeholders.find_images(content.messages, folder)
        chat = self._with_system(content)
        with one_panic():
            if self.by_question and whole.is_rewritten:
                return split_questions(chat, self._rewritten_turns(chat), encode, self.longest)
            assert self.longest is not None
            return split_chat(chat, whole, encode, self.longest)

    def shorten(self, documents: list[Document]) -> SplitChat:
        """The documents of a row of preferences that has more than `self.longest` tokens, with a shorter prompt. There
        are no documents if the answers alone do not fit."""
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

    def written_times(self) -> list[str]:
        """The times that the chat template writes with strftime_now. Most templates write only the date."""
        return self.templates.written_times() if self.format.is_chat or self.format.is_group else []

    def remarks(self) -> list[str]:
        """Remarks for the user on the chat template or on the tokenizer, before training."""
        if self.templates.are_used or self._template_of_pairs:
            return [
                *(
                    f"the chat template writes the time, as {text}, in each document; data.template_time=TIME sets "
                    "another one"
                    for text in self.written_times()
                ),
                *self.templates.remarks_on_ends(),
            ]
        given = {"system": self.system is not None, VARIABLES: bool(self.variables)}
        unused = [key for key, is_set in given.items() if is_set]
        found = [f"data.{key} is for chats; it changes no {self.format.name} rows" for key in unused]
        if not self._end and self.format.name != "tokens":
            found.append(
                "the tokenizer has no end-of-text token, so the model does not learn where to stop; name a "
                "tokenizer with one in model.tokenizer (`eos_token` in its tokenizer_config.json), or write the end "
                "into the rows"
            )
        return found


def _document(text: str, ids: list[int], offsets: list[Span], spans: Sequence[Span], finder: BorderFinder) -> Document:
    """The document of a text with these tokens. The model learns the characters of `spans`. Raises RowError if there
    is no token."""
    if not ids:
        raise RowError("the tokenizer makes no token of this text")
    borders = finder.find(text, ids, offsets, [start for start, _ in spans])
    supervised = [False] * len(borders.ids)
    for first, (_, end) in zip(borders.firsts, spans, strict=True):
        last = bisect_left(borders.offsets, (end,))
        supervised[first:last] = [True] * (last - first)
    remarks = (APART_REMARK,) * borders.is_apart + (CROSSED_REMARK,) * borders.is_crossed
    return Document(borders.ids, supervised, remarks=remarks)


def _frame(tokenizer: Any, *second: str) -> tuple[list[int], list[int], list[int]]:
    """The special tokens before, between and after the text "a" and perhaps a second text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids, count = tokenizer("a", *second)["input_ids"], len(plain)
    found = [at for at in range(len(ids) - count + 1) if ids[at : at + count] == plain] if count else []
    if not found:
        return [], [], []
    first, last = found[0], found[-1]
    return ids[:first], ids[first + count : last] if second else [], ids[last + count :]
