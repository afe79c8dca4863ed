"""The border between a prompt and its answer, in tokens as sampling makes them.

Sampling tokenizes the prompt alone, and the model writes the next tokens. In one text of both, a token may lie across
the border: two newlines become `\\n\\n`, and `Ans: ` with `yes` becomes ` yes`. Sampling never writes such a token. So
prompt and answer are tokenized apart if the tokens of the whole text do not begin with the tokens of the prompt.

A tokenizer splits a text at its added tokens (`<|im_start|>`) before all else, so only the text between the last added
token and the border is tokenized again: in a chat the word `assistant` and a newline. In a long prompt without added
tokens only the last tokens are compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

Span = tuple[int, int]

WINDOW = 2_000
"""Characters before a border that are tokenized again, if no added token is nearer."""
TAIL = 32
"""The number of tokens before a border that are compared, if the window does not begin with an added token."""
GUARD = "\U0010fad2"
"""A private-use character put before an answer. Some tokenizers begin each text with a space: it is put before this
character."""
CACHED = 256
"""The tokens of texts with at most this many characters are kept, for about this many texts."""


@dataclass
class Borders:
    """The tokens of a text with its borders."""

    ids: list[int]
    offsets: list[Span]
    firsts: list[int] = field(default_factory=list)
    """For each border the index of the first token after the border."""
    is_apart: bool = False
    """Whether a prompt and its answer were tokenized apart."""
    is_crossed: bool = False
    """Whether a token lies across a border, because no tokens of the answer alone spell the same text."""


class BorderFinder:
    """Tokenizes texts with borders. Picklable.

    `tokenizer`: a `tokenizers.Tokenizer` without a post-processor. `added`: the ids of its added tokens.
    """

    def __init__(self, tokenizer: Any, added: Collection[int]) -> None:
        self._tokenizer, self._added = tokenizer, frozenset(added)
        self._known: dict[str, list[int]] = {}

    def encode(self, texts: list[str]) -> list[tuple[list[int], list[Span]]]:
        """The ids and the (start, end) characters of the tokens of each text, without special tokens around it."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False) if texts else ()
        return [(one.ids, one.offsets) for one in encoded]

    def find(self, text: str, ids: list[int], offsets: list[Span], starts: Sequence[int]) -> Borders:
        """The tokens of a text with a border at each of `starts`, the first characters of answers, ascending. `ids`,
        `offsets`: the tokens of the text as one; they are changed in place."""
        found = Borders(ids, offsets)
        for start in starts:
            found.firsts.append(self._first(text, start, found))
        return found

    def _first(self, text: str, start: int, found: Borders) -> int:
        ids, offsets = found.ids, found.offsets
        first = bisect_left(offsets, (start,))
        if not start or not first or (ids[first - 1] in self._added and offsets[first - 1][1] >= start):
            return first
        at = self._last_added(found, first, start - WINDOW)
        is_whole = at == 0 or ids[at] in self._added
        prompt = self._ids(text[offsets[at][0] if at else 0 : start])
        compared = prompt if is_whole else prompt[-TAIL:]
        if len(compared) <= first and ids[first - len(compared) : first] == compared:
            return first
        return self._tokenize_apart(text, start, first, found)

    def _tokenize_apart(self, text: str, start: int, first: int, found: Borders) -> int:
        """Tokenize prompt and answer apart, between the added tokens around the border. Returns the index of the first
        token of the answer."""
        ids, offsets = found.ids, found.offsets
        at = self._last_added(found, first, -1)
        begin = offsets[at][0] if at else 0
        until = next((index for index in range(first, len(ids)) if ids[index] in self._added), len(ids))
        end = offsets[until][0] if until < len(ids) else len(text)
        prompt, prompt_offsets = self.encode([text[begin:start]])[0]
        if ids[at : at + len(prompt)] == prompt:
            return at + len(prompt)
        written = self._tokenizer.decode(ids[at:until], skip_special_tokens=False)
        for guard in ("", GUARD):
            answer, answer_offsets = self.encode([guard + text[start:end]])[0]
            skipped = sum(stop <= len(guard) for _, stop in answer_offsets) if guard else 0
            spelled = prompt + answer[skipped:]
            if self._tokenizer.decode(spelled, skip_special_tokens=False) == written:
                ids[at:until] = spelled
                moved = start - len(guard)
                offsets[at:until] = [(start + begin, stop + begin) for start, stop in prompt_offsets] + [
                    (start + moved, stop + moved) for start, stop in answer_offsets[skipped:]
                ]
                found.is_apart = True
                return at + len(prompt)
        found.is_crossed = True
        while first > 0 and offsets[first - 1][1] > start:
            first -= 1
        return first

    def _last_added(self, found: Borders, before: int, lowest: int) -> int:
        """Go back from token `before` to an added token, to a token that begins at character `lowest` or earlier, or
        to the first token, and return its index."""
        at = before - 1
        while at > 0 and found.ids[at] not in self._added and found.offsets[at][0] > lowest:
            at -= 1
        return at

    def _ids(self, text: str) -> list[int]:
        if len(text) > CACHED:
            return self.encode([text])[0][0]
        if text not in self._known:
            if len(self._known) > CACHED:
                self._known.clear()
            self._known[text] = self.encode([text])[0][0]
        return self._known[text]
