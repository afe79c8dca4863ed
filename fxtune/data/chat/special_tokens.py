"""Special tokens that a message quotes are text, not structure.

A chat template writes `<|im_start|>assistant` with special tokens. A tokenizer turns each such string into a special
token, even if a user wrote it. A message that quotes `<|im_end|>` would then end its turn and could open an assistant
turn, like a prompt injection. So in chat rows only the special tokens that the template writes are special. Such
strings in a message, a name, a tool or a tool's answer are tokenized as plain text, as in the reference code of Llama,
Mistral and gpt-oss. The token that opens an assistant turn counts as special too, even if the tokenizer does not say
so (DeepSeek's `<｜Assistant｜>`). Text rows, and prompts and completions given as strings, are not messages. Special
tokens in them stay special, because their authors write the structure.

Method: render the row again with a private-use character inside each special token of its strings. The template wrote
the special tokens that are still complete. They are replaced by aliases of private-use characters. A copy of the
tokenizer that knows special tokens only by these aliases tokenizes the result, with the usual merges for all other
text. If the second rendering differs in anything else (the template tests for the quoted string), the row is bad.

Cost: one search per row, and one more rendering of a row with such strings. Each process builds the second tokenizer
once, for the first row that needs it.
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
    """Positions in the original text at which these special tokens end."""
    shifts: list[int]
    """shifts[i]: by how many characters the first i special tokens are longer than their aliases."""

    def position(self, original: int) -> int:
        """The place in `text` of a position in the original text. The position must not be inside a special token."""
        return original - self.shifts[bisect_right(self.token_ends, original)]


class SpecialTokenEscaper:
    """Tokenizes quoted special tokens as text, by a changed copy of the tokenizer. Pickles without the copy.

    Args:
        tokenizer: a fast tokenizer.
        prompt: the chat template's generation prompt, or "". The first added token in it opens an assistant turn.
    """

    def __init__(self, tokenizer: Any, prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._finder: BorderFinder | None = None
        self._inseparable: set[str] = set()
        added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
        self._added = _any_of(added)
        opening = self._added.search(prompt)
        # No mark can break up a special token of one character (an exclamation mark as pad token): it has no alias.
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

        Raises RowError if only two strings together make a special token: it is not known whether the template writes
        anything between them.
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
        at = length = 0  # the position in `marked`, and the number of characters in `parts`
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
        """The alias of a special token; another string stays as it is."""
        return self._alias.get(content, content)

    def finder(self, text: str) -> BorderFinder:
        """The BorderFinder that tokenizes `text`, an aliased text. Raises RowError if this tokenizer cannot write a
        quoted special token as text."""
        if self._finder is None:
            changed = self._tokenizer_with_aliases()
            self._finder = BorderFinder(changed, self._tokenizer.added_tokens_decoder)
            self._inseparable = {content for content in self._special if not self._is_separable(content, changed)}
        if inseparable := self._inseparable.intersection(self._any_special.findall(text)):
            raise RowError(f"{min(inseparable)} in a message: this tokenizer can write it only as the special token")
        return self._finder

    def _is_separable(self, content: str, changed: Any) -> bool:
        """Whether the copy `changed` makes the special token of its alias, and no special token of its letters."""
        alias_ids, letter_ids = (
            set(changed.encode(text, add_special_tokens=False).ids) for text in (self._alias[content], content)
        )
        unknown = {self._tokenizer.unk_token_id}
        return self._special[content] in alias_ids and not (letter_ids - unknown).intersection(self._special.values())

    def _break_up(self, string: str, marker: str) -> str:
        """Put `marker` into each special token. A pass breaks up only one of two tokens that overlap, so repeat it."""
        while self._any_special.search(string):
            string = self._any_special.sub(lambda match: match.group()[0] + marker + match.group()[1:], string)
        return string

    def _tokenizer_with_aliases(self) -> Any:
        """A copy of the tokenizer that has aliases for special tokens. The vocabulary also gets the aliases, because a
        Unigram model would turn the letters of `</s>` into the token. All tokens keep their places and so their
        ids."""
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
    """A pattern for any of these strings: the leftmost, and there the longest, as `tokenizers` finds added tokens."""
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
