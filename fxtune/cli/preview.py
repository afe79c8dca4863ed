"""`fxtune preview`: the first samples as the model will see them, after template, split and packing.

Nothing here is made for the preview: tokenizer, tables and plan are those of the training run, and what is printed is
read back from the plan's first batches. Most runs that learn nothing, or the wrong thing, can be told from this page:
an answer that is not supervised, a missing end-of-turn token, a template applied twice, rows that are mostly padding.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.data.batches.build import prepare_data
from fxtune.data.batches.plan import DocumentSlice, Plan
from fxtune.models.load import load_tokenizer
from fxtune.system import console as screen

if TYPE_CHECKING:
    from fxtune.config.root import Config

DOCUMENTS = 6
"""How many documents are shown in all."""
DOCUMENTS_A_ROW = 3
HEAD, TAIL = 300, 150
"""Tokens of a long document that are shown, from its beginning and from its end."""
WIDE = 80
"""Columns of a terminal that takes the table of all sources."""
SUPERVISED, SPECIAL, ASIDE = "green", "bold magenta", "dim"
_LONGEST_CHARACTER = 4
"""Bytes, and so at most tokens, of one UTF-8 character."""


class Signs(NamedTuple):
    """What marks things where there is no colour."""

    begin: str
    end: str
    newline: str
    more: str


UNICODE, ASCII = Signs("⟦", "⟧", "↵", "…"), Signs("[[", "]]", "\\n", "...")


def run(config: Config, console: Optional[Console] = None) -> None:
    """Print samples and figures of the run that `config` describes. Errors as the run itself would have them."""
    console = console or screen.console()
    tokenizer = load_tokenizer(config.model)
    data = prepare_data(
        config.data,
        tokenizer,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        max_steps=config.train.max_steps,
        epochs=config.train.epochs,
        seed=config.run.seed,
    )
    signs = UNICODE if console.encoding.lower().startswith("utf") else ASCII
    samples(data.training, TokenTexts(tokenizer, signs), console)
    figures(data.training, console)
    for note in data.training.notes():
        console.print(screen.plain(note), soft_wrap=True)
    if data.evaluation:
        held = data.evaluation.summary()
        console.print(
            f"Held out for evaluation: {held['documents']:,} documents, {held['supervised_tokens']:,} supervised "
            "tokens.",
            soft_wrap=True,
            highlight=False,
        )


def samples(plan: Plan, texts: TokenTexts, console: Console) -> None:
    """The first rows of the first step."""
    signs = texts.signs
    console.print(
        Text.assemble(
            "Legend: ",
            (f"{signs.begin}supervised{signs.end}", SUPERVISED),
            " tokens, which the model learns to produce; ",
            ("special tokens", SPECIAL),
            f"; {signs.newline} a newline; \\x1b a character or byte that has no picture; ",
            (f"{signs.more} what is left out or padding", ASIDE),
            ".",
        )
    )
    left, row_number = DOCUMENTS, 0
    for micro in range(plan.micro_batches(0)):
        batch = plan.batch(0, micro)
        for row, pieces in enumerate(plan.contents(0, micro)):
            if not left:
                return
            width, used = batch.input_ids.shape[1], sum(piece.length for piece in pieces)
            console.print(
                Rule(
                    f"step 0, row {row_number}: {_count(len(pieces), 'document')}, {used:,} tokens of {width:,}",
                    characters="─" if signs is UNICODE else "-",
                    align="left",
                )
            )
            shown = min(len(pieces), DOCUMENTS_A_ROW, left)
            begin = 0
            for piece in pieces[:shown]:
                here = slice(begin, begin + piece.length)
                console.print(_heading(plan, piece, batch.position_ids[row, here].tolist()))
                supervised = [False, *(batch.targets[row, here][:-1] != IGNORE_INDEX).tolist()]
                console.print(texts.document(batch.input_ids[row, here].tolist(), supervised))
                begin += piece.length
            for rest in (
                f"{len(pieces) - shown:,} more of this row's documents" if shown < len(pieces) else "",
                _count(width - used, "pad") if used < width else "",
            ):
                if rest:
                    console.print(Text(f"{signs.more} {rest}", ASIDE))
            left -= shown
            row_number += 1


def figures(plan: Plan, console: Console) -> None:
    """What an epoch is made of, and what became of each source."""
    seen = plan.summary()
    rows: list[list[object]] = [
        ["documents", f"{seen['documents']:,}"],
        ["rows", f"{seen['rows']:,} ({_row_length(plan)})"],
        ["tokens", f"{seen['tokens']:,}"],
        ["supervised", f"{seen['supervised_share']:.1%} of the tokens ({seen['supervised_tokens']:,})"],
        ["padding", f"{seen['padding_share']:.1%} of the rows"],
        [
            "split / truncated / dropped",
            f"{seen['split']:,} / {seen['truncated']:,} / {seen['dropped']:,} documents longer than "
            f"{plan.stream.settings.sequence_length:,} tokens",
        ],
        ["without targets", f"{seen['without_targets']:,} documents or pieces, left out"],
        ["steps", f"{seen['steps']:,} ({seen['epochs']:.4g} epochs of {seen['steps_per_epoch']:,.1f} steps)"],
    ]
    if mixed := seen["mix"]:
        rows.insert(
            3,
            [
                "long documents",
                f"{mixed['share']:.1%} of the tokens, {mixed['lowest']:.0%} to {mixed['highest']:.0%} "
                f"in a step (over {mixed['threshold']:,} tokens each)",
            ],
        )
    console.print()
    console.print(screen.table("The first epoch", ["", ""], rows))
    columns = ["source", "documents", "segments", "supervised tokens", "share", "times seen", "bad rows"]
    cells = [
        [
            source["name"],
            f"{source['documents']:,}",
            f"{source['segments']:,}",
            f"{source['supervised_tokens']:,}",
            f"{source['share']:.1%}",
            f"{source['repeats']:.2f}",
            f"{table.bad_rows:,}",
        ]
        for source, table in zip(seen["sources"], plan.tables, strict=True)
    ]
    if console.width >= WIDE:
        console.print(screen.table("Sources", columns, cells))
        return
    for name, *row in cells:  # seven columns would break every word
        console.print(screen.table(f"Source {name}", ["", ""], list(zip(columns[1:], row, strict=True))))


class TokenTexts:
    """Tokens as people can read them, one by one: no byte is lost, and none reaches the terminal as a command."""

    def __init__(self, tokenizer: Any, signs: Signs = UNICODE) -> None:
        self.tokenizer = tokenizer
        self.signs = signs
        self.special = set(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def document(self, ids: list[int], supervised: list[bool]) -> Text:
        """A document's text; the middle of a long one is left out, with its count."""
        if len(ids) <= HEAD + TAIL:
            return self._tokens(ids, supervised)
        left_out, learned = len(ids) - HEAD - TAIL, sum(supervised[HEAD:-TAIL])
        gap = f"\n{self.signs.more} {left_out:,} tokens left out, {learned:,} of them supervised {self.signs.more}\n"
        return Text.assemble(
            self._tokens(ids[:HEAD], supervised[:HEAD]), (gap, ASIDE), self._tokens(ids[-TAIL:], supervised[-TAIL:])
        )

    def _tokens(self, ids: list[int], supervised: list[bool]) -> Text:
        text = Text()
        learned, at = False, 0
        while at < len(ids):
            if supervised[at] != learned:
                text.append(self.signs.end if learned else self.signs.begin, SUPERVISED)
                learned = not learned
            shown, count = self._next(ids[at : at + _LONGEST_CHARACTER], supervised[at : at + _LONGEST_CHARACTER])
            text.append(shown, SPECIAL if ids[at] in self.special else SUPERVISED if learned else "")
            at += count
        if learned:
            text.append(self.signs.end, SUPERVISED)
        return text

    def _next(self, ids: list[int], supervised: list[bool]) -> tuple[str, int]:
        """Text of the first token and how many tokens it took: a character can be spread over several."""
        if ids[0] in self.special:
            return self._printable(str(self.tokenizer.convert_ids_to_tokens(ids[0]))), 1
        for count in range(1, len(ids) + 1):
            if supervised[count - 1] != supervised[0] or ids[count - 1] in self.special:
                break
            text = self.tokenizer.decode(ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if text and "\ufffd" not in text:
                token = self.tokenizer.convert_ids_to_tokens(ids[0])
                space = (
                    " " if token.startswith("▁") and not text.startswith(" ") else ""
                )  # SentencePiece drops a first space
                return space + self._printable(text), count
        return self._bytes(ids[0]), 1

    def _bytes(self, index: int) -> str:
        """A token that is no whole character."""
        token = self.tokenizer.convert_ids_to_tokens(index)
        if token is None:
            return f"<no token {index}>"
        if re.fullmatch("<0x[0-9A-F]{2}>", token) is None and all(character in _BYTES for character in token):
            return "".join(f"\\x{_BYTES[character]:02x}" for character in token)
        return self._printable(token)

    def _printable(self, text: str) -> str:
        return "".join(
            self.signs.newline + "\n"
            if c == "\n"
            else c
            if c.isprintable() or c == "\t"
            else c.encode("unicode_escape").decode()
            for c in text
        )


def _byte_characters() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes (GPT-2's `bytes_to_unicode`), and their bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{chr(byte): byte for byte in shown}, **{chr(256 + n): byte for n, byte in enumerate(hidden)}}


_BYTES = _byte_characters()


def _heading(plan: Plan, piece: DocumentSlice, positions: list[int]) -> Text:
    table = plan.tables[piece.source]
    whole = int(table.offsets[piece.document + 1] - table.offsets[piece.document])
    part = (
        ""
        if piece.length == whole
        else f", its tokens {piece.first:,}-{piece.first + piece.length - 1:,} of {whole:,}"
    )
    return Text.assemble(
        (f"document {piece.document:,} of ", ASIDE),
        Text(screen.plain(table.name).plain, ASIDE),
        (f"{part}: positions {positions[0]:,}-{positions[-1]:,}", ASIDE),
    )


def _row_length(plan: Plan) -> str:
    lengths = plan.sizes.row_lengths
    return (
        f"of {', '.join(f'{n:,}' for n in lengths)} tokens" if lengths else "as long as the longest of the micro-batch"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
