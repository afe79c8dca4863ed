"""Special tokens that a message quotes are text, not structure.

A chat template writes `<|im_start|>assistant` with special tokens, and a tokenizer makes a special token of each such
string, whoever wrote it. A user message that quotes one would end its own turn and open an assistant turn, in training
as in a prompt injection. So in chat rows only the special tokens that the template writes are special. Such strings in
a message, a name, a tool or a tool's answer are tokenized as plain text, as in the reference code of Llama, Mistral
and gpt-oss. The token that opens an assistant turn counts as special too, even if the tokenizer does not say so
(DeepSeek's `<｜Assistant｜>`). Text rows, and prompts and completions given as strings, are not messages: their
authors write the structure themselves.

Method: render the row again with a private-use character inside each special token of its strings. A special token
that is still complete was written by the template. It is replaced by an alias of private-use characters, and the
result is tokenized by a copy of the tokenizer that knows its special tokens by these aliases only. So the rest of the
text gets the same merges as always. If the second rendering differs otherwise (the template looks at that very
string), the row is a bad row.

Cost: one search per row, and one more rendering of a row with such strings. Each process builds the second tokenizer
once, when it first needs it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxtune.data.chat.border import BorderFinder
from fxtune.data.chat.template import unused_characters
from fxtune.data.formats.values import RowError

_OPENING, _CLOSING = "\U0010fad0", "\U0010fad1"
"""Private-use characters around the number of a special token: its alias."""
_ALIAS = re.compile(f"{_OPENING}[0-9]+{_CLOSING}")


@dataclass(frozen=True)
class AliasedText:
    """A rendered text with aliases for the template's special tokens."""

    text: str
    token_ends: list[int]
    """Where these special tokens end in the original text."""
    shifts: list[int]
    """How much longer the original is up to the first of `token_ends`, up to the second, and so on."""

    def position(self, original: int) -> int:
        """The position in `text` of a position in the original, outside special tokens."""
        return original - self.shifts[bisect_right(self.token_ends, original)]


class SpecialTokenEscaper:
    """Tokenizes quoted special tokens as text, by a changed copy of the tokenizer. Pickles without the copy.

    Args:
        tokenizer: a fast tokenizer.
        prompt: the chat template's generation prompt, whose first added token opens a turn; empty if there is none.
    """

    def __init__(self, tokenizer: Any, prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._finder: BorderFinder | None = None
        self._inseparable: set[str] = set()
        added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
        self._added = _any_of(added)
        opening = self._added.search(prompt)
        # A special token of one character (an exclamation mark used as padding token) stays that character.
        self._special = {
            content: number
            for content, (number, special) in added.items()
            if len(content) > 1 and (special or (opening and content == opening.group()))
        }
        self._alias = {content: f"{_OPENING}{index}{_CLOSING}" for index, content in enumerate(sorted(self._special))}
        self._any_special = _any_of(self._special)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_finder": None}

    def is_quoted(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        """Whether a message or a tool quotes a special token.

        Raises RowError if a special token appears only where two strings are joined: what the template
        writes between them is not known.
        """
        parts = [value for message in messages for key, value in message.items() if key not in ("role", "images")]
        strings = list(_strings([*parts, tools]))
        if self._any_special.search("".join(strings)) is None:
            return False
        if any(self._any_special.search(string) for string in strings):
            return True
        raise RowError("two parts of this row make a special token if one directly follows the other")

    def alias(self, text: str, render: Callable[[Callable[[Any], Any]], str]) -> AliasedText:
        """`text`, a rendered row, with aliases for the special tokens that the template wrote.

        `render(mark)` renders the row again with `mark` applied to its messages and tools. Raises RowError if the
        template's special tokens cannot be distinguished from quoted ones.
        """
        marker, _ = unused_characters(text)
        marked = render(lambda value: _map_strings(value, lambda string: self._break_up(string, marker)))
        if marked.replace(marker, "") != text:
            raise RowError(
                "a special token in a message changes what the chat template writes around it; remove it there"
            )
        if _ALIAS.search(text):
            raise RowError("holds private-use characters (U+10FAD0) that fxtune uses for special tokens; remove them")
        parts, ends, shifts = [], [], [0]
        at = length = 0  # position in `marked`; length of `parts`
        for match in re.finditer(f"{marker}|{self._added.pattern}", marked):
            found = match.group()
            new = "" if found == marker else self._alias.get(found, found)
            parts += [marked[at : match.start()], new]
            length += match.start() - at + len(new)
            if found in self._alias:
                shifts.append(shifts[-1] + len(found) - len(new))
                ends.append(length + shifts[-1])
            at = match.end()
        return AliasedText("".join([*parts, marked[at:]]), ends, shifts)

    def alias_of(self, content: str) -> str:
        """What stands for a special token in an aliased text."""
        return self._alias.get(content, content)

    def finder(self, text: str) -> BorderFinder:
        """What tokenizes an aliased text. Raises RowError if this tokenizer cannot write a special token of `text` as
        text."""
        if self._finder is None:
            changed = self._tokenizer_with_aliases()
            self._finder = BorderFinder(changed, self._tokenizer.added_tokens_decoder)
            self._inseparable = {content for content in self._special if not self._is_separable(content, changed)}
        if inseparable := self._inseparable.intersection(self._any_special.findall(text)):
            raise RowError(f"{min(inseparable)} in a message: this tokenizer can write it only as the special token")
        return self._finder

    def _is_separable(self, content: str, changed: Any) -> bool:
        """Whether the changed copy knows a special token by its alias, and does not make one of its letters."""
        alias_ids, letter_ids = (
            set(changed.encode(text, add_special_tokens=False).ids) for text in (self._alias[content], content)
        )
        unknown = {self._tokenizer.unk_token_id}
        return self._special[content] in alias_ids and not (letter_ids - unknown).intersection(self._special.values())

    def _break_up(self, string: str, marker: str) -> str:
        """Put `marker` into each special token. One pass breaks only one of two that overlap, so repeat."""
        while self._any_special.search(string):
            string = self._any_special.sub(lambda match: match.group()[0] + marker + match.group()[1:], string)
        return string

    def _tokenizer_with_aliases(self) -> Any:
        """The tokenizer with each special token under its alias. The vocabulary changes as well, because a Unigram
        model would make `</s>` of the letters. Ids stay, since they are positions in the vocabulary or behind it."""
        from tokenizers import Tokenizer

        alias = self._alias
        described = json.loads(self._tokenizer.backend_tokenizer.to_str())
        described |= {"padding": None, "truncation": None, "post_processor": None}
        for token in described["added_tokens"]:
            token["content"] = alias.get(token["content"], token["content"])
        model = described["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {alias.get(key, key): number for key, number in model["vocab"].items()}
            if "merges" in model:
                model["merges"] = [pair for pair in model["merges"] if not self._special.keys() & _merge_parts(pair)]
        else:
            model["vocab"] = [[alias.get(piece, piece), score] for piece, score in model["vocab"]]
        unknown = model.get("unk_token")
        if unknown in alias and alias[unknown] in model["vocab"]:
            model["unk_token"] = alias[unknown]
        return Tokenizer.from_str(json.dumps(described))


def _merge_parts(pair: Any) -> set[str]:
    """The two tokens of a BPE merge and the token that they become."""
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return {left, right, left + right}


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches the leftmost, longest of these strings, as `tokenizers` finds added tokens."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or "(?!)")


def _strings(value: Any) -> Iterator[str]:
    """The strings in nested lists and dicts, keys included, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, (list, tuple)) else value
