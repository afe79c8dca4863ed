"""Special tokens in what people wrote are text, not structure.

A chat template writes `<|im_start|>assistant` as special tokens, and a tokenizer turns every such string into them, whoever
wrote it. A user's message that quotes one would end its own turn and open an assistant's, in training as in an attack. So in
chat rows only the special tokens that the template writes are special; in a message, a name, a tool or a tool's answer they
are tokenised as the letters that they are, as the reference code of Llama, Mistral and gpt-oss does. What opens an assistant's
turn counts as one, also where a tokenizer does not call it special (DeepSeek's `<｜Assistant｜>`). Rows without them, nearly
all, are tokenised as ever. Rows of format text and prompts and completions given as strings are no messages: who writes these
writes the structure, too.

How the two are told apart: the strings of the row are drawn once more with a private-use character inside each special token;
what is left whole in that drawing the template wrote. Those are replaced by aliases of private-use characters, and the result
goes to a copy of the tokenizer that knows its special tokens by these aliases only, so that all else is tokenised in its place,
neighbours included, by the same merges. A row where that proves nothing (the template looks at the very string) is a bad row.

Cost: one search a row; for a row that has such strings one more drawing, and once a process a second tokenizer.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fxtune.data.chat.normalize import BadRow
from fxtune.data.chat.template import Span, unused_characters

_OPENING, _CLOSING = "\U0010fad0", "\U0010fad1"
"""Private-use characters around the number of a special token: its alias."""
_ALIAS = re.compile(f"{_OPENING}[0-9]+{_CLOSING}")


@dataclass(frozen=True)
class Aliased:
    """A text in which the template's special tokens go by their aliases, and how its places map to those of the text proper."""

    text: str
    ends: list[int]
    """Where the aliases end."""
    added: list[int]
    """By how much the text proper is longer up to the first of `ends`, up to the second, and so on, and up to the text's end."""

    def offset(self, position: int) -> int:
        """The place in the text proper. No token begins or ends inside an alias."""
        return position + self.added[bisect_right(self.ends, position)]


class Literal:
    """The special tokens of one tokenizer, and the copy of it that takes them for text. Picklable without that copy.

    Args:
        tokenizer: a fast tokenizer.
        prompt: the chat template's generation prompt, whose first added token opens a turn; empty where it has none.
    """

    def __init__(self, tokenizer: Any, prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._copy: Any = None
        self._inseparable: set[str] = set()
        added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
        # A special token of one character is that character: an exclamation mark that somebody pads with.
        self._written = _any_of(added)
        opening = self._written.search(prompt)
        self._special = {
            content: number
            for content, (number, special) in added.items()
            if len(content) > 1 and (special or (opening and content == opening.group()))
        }
        self._alias = {content: f"{_OPENING}{index}{_CLOSING}" for index, content in enumerate(sorted(self._special))}
        self._suspects = _any_of(self._special)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_copy": None}

    def within(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        """Whether somebody wrote a special token into a message or a tool.

        Raises BadRow where only two strings together would make one: what a template writes between them is not known.
        """
        strings = []
        for message in messages:
            for key, value in message.items():
                if isinstance(value, str):
                    if key != "role":
                        strings.append(value)
                else:
                    strings += _strings(value)
        if tools:
            strings += _strings(tools)
        if self._suspects.search("".join(strings)) is None:
            return False
        if any(self._suspects.search(string) for string in strings):
            return True
        raise BadRow("two parts of this row make a special token when one stands behind the other")

    def aliased(self, text: str, draw: Callable[[Callable[[Any], Any]], str]) -> Aliased:
        """`text`, a drawing of a row, with the special tokens that the template wrote as their aliases.

        `draw(mark)` draws the row again with `mark` applied to its messages and tools. Raises BadRow: they cannot be told apart.
        """
        mark, _ = unused_characters(text)
        drawn = draw(lambda value: _mapped(value, lambda string: self._broken(string, mark)))
        if drawn.replace(mark, "") != text:
            raise BadRow(
                "a special token in a message changes what the chat template writes around it; remove it there"
            )
        if _ALIAS.search(text):
            raise BadRow(
                "holds private-use characters (U+10FAD0) as this program uses them for special tokens; remove them"
            )
        parts, ends, added = [], [], [0]
        at = length = 0  # of `drawn`, and of what `parts` hold
        for match in re.finditer(f"{mark}|{self._written.pattern}", drawn):
            found = match.group()
            replaced = "" if found == mark else self._alias.get(found, found)
            parts += [drawn[at : match.start()], replaced]
            length += match.start() - at
            length += len(replaced)
            if found in self._alias:
                ends.append(length)
                added.append(len(found) - len(replaced))
            at = match.end()
        return Aliased("".join([*parts, drawn[at:]]), ends, list(accumulate(added)))

    def encode(self, aliased: Aliased) -> tuple[list[int], list[Span]]:
        """Token ids, and their places in the text proper. Raises BadRow: this tokenizer cannot do without a special token."""
        if self._copy is None:
            self._copy = self._second_tokenizer()
            self._inseparable = {content for content in self._special if not self._separable(content)}
        if inseparable := self._inseparable.intersection(self._suspects.findall(aliased.text)):
            raise BadRow(f"{min(inseparable)} in a message: this tokenizer cannot write it but as the special token")
        encoded = self._copy.encode(aliased.text, add_special_tokens=False)
        return encoded.ids, [(aliased.offset(start), aliased.offset(end)) for start, end in encoded.offsets]

    def _separable(self, content: str) -> bool:
        """Whether the copy knows a special token by its alias and makes none of its letters."""
        named, spelled = (
            set(self._copy.encode(text, add_special_tokens=False).ids) for text in (self._alias[content], content)
        )
        unknown = {self._tokenizer.unk_token_id}
        return self._special[content] in named and not (spelled - unknown).intersection(self._special.values())

    def _broken(self, string: str, mark: str) -> str:
        """With `mark` in each special token. Again and again: of two that overlap a first pass breaks one."""
        while self._suspects.search(string):
            string = self._suspects.sub(lambda match: match.group()[0] + mark + match.group()[1:], string)
        return string

    def _second_tokenizer(self) -> Any:
        """The tokenizer with each special token under its alias, also in the vocabulary: a Unigram model would make `</s>` of
        the letters. Ids stay, since they are places in the vocabulary or behind it."""
        from tokenizers import Tokenizer

        described = json.loads(self._tokenizer.backend_tokenizer.to_str())
        described |= {"padding": None, "truncation": None, "post_processor": None}
        for token in described["added_tokens"]:
            token["content"] = self._alias.get(token["content"], token["content"])
        model = described["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._alias.get(key, key): number for key, number in vocabulary.items()}
            if "merges" in model:
                model["merges"] = [pair for pair in model["merges"] if not self._special.keys() & _parts(pair)]
        else:
            model["vocab"] = [[self._alias.get(piece, piece), score] for piece, score in vocabulary]
        if model.get("unk_token") in self._alias and self._alias[model["unk_token"]] in model["vocab"]:
            model["unk_token"] = self._alias[model["unk_token"]]
        return Tokenizer.from_str(json.dumps(described))


def _parts(pair: Any) -> set[str]:
    """The two tokens of a BPE merge and what they become."""
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return {left, right, left + right}


def _any_of(contents: Any) -> re.Pattern[str]:
    """The leftmost, longest of these strings, as `tokenizers` finds added tokens."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or "(?!)")


def _strings(value: Any) -> Iterator[str]:
    """The strings in nested lists and dicts, keys too, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value
