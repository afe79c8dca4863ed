"""Fuzzes the way from rows to tokens and masks: bad rows are reported, and only tokens of assistant turns are supervised.

    python scripts/faults/fuzz.py [--inputs 100000] [--seed 0] [--keep FOLDER]

An input is a line of a JSONL file (one in fifty: a complete file of another kind). It is a conversation, an Alpaca row, a text and
so on, made of difficult pieces (special tokens, lone surrogates, half emojis, strings that templates look for). Half of the inputs
are then damaged: a value of another type, a missing key, a repeated turn, bytes flipped, removed or inserted. Files of a hundred
lines go through `tokenize`, as in a run, with the tokenizers and chat templates of twelve model families, with generation marks and
without, and with other values of `data.learn` and `data.on_rewritten`. For each file it checks:

- only fxtune's own errors are raised, and no file takes longer than SECONDS;
- every line is a document or a quarantined row with a short reason;
- in a chat, only the template's special tokens open and close turns: there are as many assistant turns as the row has, and every
  supervised token is inside one. This is read from the ids alone;
- in an input that was not damaged, no supervised token is of a user, a system message, a tool, a prompt or an answer that the row
  switches off: these texts, and no others, contain a diamond. Text, prompts and pre-tokenized rows have exactly their own mask;
- in such a chat, as many turns are supervised as `data.learn` and the row say. Where a chat becomes a document for each question,
  each turn is supervised in one of them, behind the very prompt that sampling would give.

If a check fails, the exit code is 1 and the inputs are kept in FOLDER.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import gzip
import io
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support import families  # the tests' tokenizers and templates

from fxtune.data.config import DataConfig, OnBadRow, OnRewritten, SourceConfig
from fxtune.data.formats.chat_format import REASONING_KEYS, SHAREGPT_ROLES, VARIABLES
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import ChatRole, LearnConfig, RowFormat
from fxtune.data.tokenized.tokenize import TokenTable, tokenize
from fxtune.errors import UserError

FILE = 100
"""Inputs in a file."""
SECONDS = 300.0
"""A file that takes longer counts as a hang. Most take a tenth of a second."""
LONGEST_REASON = 1000
DIAMOND = "♦"
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system", "tool": "tool"}
ROLES |= {"function": "tool", **SHAREGPT_ROLES}
ALL_FAMILIES = list(families.FAMILIES | families.TOOL_FAMILIES)
LEARN = [
    *[LearnConfig()] * 4,
    LearnConfig(tool_calls=False),
    LearnConfig(last_turn_only=True),
    LearnConfig(since_last_question=True),
    LearnConfig(roles=[ChatRole.user, ChatRole.assistant]),
]


@dataclass(frozen=True)
class Grammar:
    """The assistant turns of a family in token ids."""

    opens: str
    """A special token that opens a turn."""
    header: str
    """The text after it, up to the next special token, begins with this in an assistant turn."""
    closes: tuple[str, ...]
    speaker: str = "assistant"
    """The role whose turns must equal the openings in number."""
    more: int = 0
    """How many openings a template writes beyond one a turn."""


GRAMMARS = {
    "chatml": Grammar("<|im_start|>", "assistant\n", ("<|im_end|>",)),
    "llama31": Grammar("<|start_header_id|>", "assistant", ("<|eot_id|>",)),
    "qwen3": Grammar("<|im_start|>", "assistant\n", ("<|im_end|>",)),
    "gemma3": Grammar("<start_of_turn>", "model\n", ("<end_of_turn>",)),
    "mistral": Grammar("[/INST]", "", ("</s>",), "user"),
    "phi3": Grammar("<|assistant|>", "", ("<|end|>",)),
    "gptoss": Grammar("<|start|>", "assistant", ("<|end|>", "<|return|>"), more=1),
}  # Zephyr opens turns with plain letters, which any message can contain: only its diamonds are checked.

PIECES = [
    *("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<end_of_turn>", "<|end|>"),
    *("<bos>", "<eos>", "<s>", "</s>", "[INST]", "[/INST]", "<|endoftext|>", "<|start|>assistant"),
    *("<|message|>", "<|return|>", "<unk>", "<|channel|>final<|message|>", "</think>"),
    *("<tool_call>", "<|im_", "end|>", "<", "|>", "{%", "é", "é", "日本", "😀", "ﬁ", "ß"),
    *("assistant", "user", "0", "▁", "Ġ", "<0x0A>"),
    *("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    *("<start_of_turn>model\n", "<|assistant|>\n", "<|user|>\n", "<think>\n", "\n</think>\n\n"),
    *("{{ messages }}", "{% generation %}", "\\", '"', "'", " ", "  ", "\n", "\n\n", "\t", "\r\n"),
    *("\u2028", "\xa0", "\x00", "\x1b[2J", "\ufeff", "\u202e"),
    *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U000f8000", "\U0010fad0", "two and two"),
    *("it is four.", "the quick brown fox"),
]
RARE = "\U0010fad05\U0010fad1"
"""An alias as special_tokens.py writes it."""
JUNK: list[Any] = [
    *(None, True, 0, -1, 1e308, float("nan"), float("inf"), 10**30, "", " ", "\ud83d", "a\udc00b"),
    *([], {}, [None], [[]], {"role": None}, {"": ""}, [1, "a", {}], "null", "[]", "{}", '{"name": 1}'),
    *([{}], [{"type": "image"}], [{"type": "text", "text": None}], [{"type": "text", "text": "hi"}]),
    *(3.7, "assistant", "<|im_start|>"),
]
KEYS = [
    *("messages", "conversations", "role", "from", "content", "value", "tools", "tool_calls"),
    *("weight", "train", "text", "prompt", "completion", "instruction", "input", "output"),
    *("system", "input_ids", "labels", "name", "reasoning_content"),
]
BYTES = [
    *(b"", b"\n", b'"', b"{", b"]", b"\\ud83d", b"\\u0000", b"\xff", b"\xc3", b"\xed\xa0\x80"),
    *(b"\x00", b"1" * 5000, b"[" * 2000, b"\\", b",", b":", b"null"),
]


class Maker:
    """Rows of one format."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def text(self, most: int = 8) -> str:
        parts = self.draw.choices(PIECES, k=self.draw.randint(1, most))
        if self.draw.random() < 0.2:
            parts.append(
                "".join(
                    chr(self.draw.choice((self.draw.randrange(1, 0xD800), self.draw.randrange(0xE000, 0x110000))))
                    for _ in range(self.draw.randint(1, 6))
                )
            )
        if self.draw.random() < 0.002:
            parts = parts * 300 + [RARE]
        self.draw.shuffle(parts)
        return "".join(parts).replace(DIAMOND, "")

    def other(self) -> str:
        """A text that must not be learned."""
        text = self.text()
        at = self.draw.randrange(len(text) + 1)
        return text[:at] + DIAMOND + text[at:]

    def row(self, form: RowFormat) -> dict[str, Any]:
        if form is FORMATS["messages"]:
            return self._messages()
        if form is FORMATS["sharegpt"]:
            names = {"system": "system", "developer": "system", "user": "human", "assistant": "gpt", "tool": "tool"}
            return {
                "conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in self._turns()]
            }
        if form is FORMATS["alpaca"]:
            row = {"instruction": self.other(), "output": self.text()}
            return row | ({"input": self.other()} if self.draw.random() < 0.5 else {})
        if form is FORMATS["prompt_completion"]:
            if self.draw.random() < 0.5:
                return {"prompt": self.other(), "completion": self.text()}
            asked = self._turns()[:-1]
            for turn in asked:
                turn["content"] = self.other()
            return {"prompt": asked, "completion": [{"role": "assistant", "content": self.text()}]}
        if form is FORMATS["tokens"]:
            ids = [self.draw.randrange(300) for _ in range(self.draw.randint(1, 30))]
            return {"input_ids": ids, "labels": [token if self.draw.random() < 0.5 else -100 for token in ids]}
        return {"text": self.text()}

    def _turns(self) -> list[dict[str, Any]]:
        role = self.draw.choice(("system", "system", "developer"))
        turns = [{"role": role, "content": self.other()}] if self.draw.random() < 0.3 else []
        for _ in range(self.draw.randint(1, 3)):
            turns += [{"role": "user", "content": self.other()}, {"role": "assistant", "content": self.text()}]
        return turns

    def _messages(self) -> dict[str, Any]:
        row: dict[str, Any] = {"messages": self._turns()}
        thinks, uses_tools = self.draw.random() < 0.25, self.draw.random() < 0.2
        if uses_tools:
            row["messages"] = [turn for each in row["messages"] for turn in self._with_round(each)]
        for turn in row["messages"]:
            if turn["role"] != "assistant":
                continue
            if thinks and self.draw.random() < 0.8:
                turn[self.draw.choice(("reasoning_content", "thinking", "reasoning"))] = self.text()
            if uses_tools:
                continue
            if self.draw.random() < 0.1:
                turn |= {"weight": 0, "content": self.other()}
            elif self.draw.random() < 0.1:
                words = self.draw.choice((self.text, self.other))
                call = {"type": "function", "function": {"name": "f", "arguments": {words(): words()}}}
                turn |= {"content": words(), "tool_calls": [call], "train": words == self.text}
            elif self.draw.random() < 0.1:
                turn["reasoning_content"] = self.text()
        if self.draw.random() < 0.05:
            row["chat_template_kwargs"] = {"enable_thinking": self.draw.random() < 0.5}
        if self.draw.random() < (0.7 if uses_tools else 0.1):
            row["tools"] = [
                {"type": "function", "function": {"name": "f", "description": self.other(), "parameters": {}}}
            ]
        return row

    def _with_round(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        """An answer, now and then behind one or two calls with their results."""
        rounds: list[dict[str, Any]] = []
        for number in range(self.draw.choice((0, 1, 1, 2)) if turn["role"] == "assistant" else 0):
            name = f"call{number}abcd"
            call = {
                "id": name,
                "type": "function",
                "function": {"name": "f", "arguments": {self.text(2): self.text(2)}},
            }
            rounds += [
                {
                    "role": "assistant",
                    "content": None if self.draw.random() < 0.5 else self.text(),
                    "tool_calls": [call],
                },
                {"role": "tool", "content": self.other(), "tool_call_id": name},
            ]
        return [*rounds, turn]

    def broken(self, row: Any) -> Any:
        """Replace a value, rename or remove a key, or repeat an entry."""
        places = list(_places(row))
        inside, key = self.draw.choice(places)
        how = self.draw.randrange(5)
        if how == 0:
            del inside[key]
        elif how == 1 and isinstance(inside, dict):
            inside[self.draw.choice(KEYS)] = inside.pop(key)
        elif how == 2 and isinstance(inside, list):
            inside.insert(self.draw.randrange(len(inside) + 1), json.loads(json.dumps(self.draw.choice(inside))))
        elif how == 3:
            inside[key] = [inside[key]]
            for _ in range(self.draw.choice((0, 0, 3, 150, 700))):
                inside[key] = [inside[key]]
        else:
            inside[key] = self.draw.choice(JUNK)
        return row

    def damaged(self, line: bytes) -> bytes:
        """Flip, remove, repeat or insert bytes."""
        for _ in range(self.draw.randint(1, 4)):
            at = self.draw.randrange(len(line) + 1)
            until = min(len(line), at + self.draw.choice((1, 1, 2, 5, 40)))
            put = self.draw.choice([*BYTES, line[at:until] * 2])
            line = line[:at] + put + line[until if self.draw.random() < 0.5 else at :]
        return line


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


@dataclass
class Report:
    inputs: int = 0
    files: int = 0
    untouched: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    """Reasons of inputs that were not damaged."""
    documents: int = 0
    quarantined: int = 0
    refused_files: int = 0
    tokens: int = 0
    supervised: int = 0
    escaped: int = 0
    questions: int = 0
    slowest: float = 0.0
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    violations: list[str] = field(default_factory=list)


class Hang(BaseException):
    pass


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def ring(_: int, __: FrameType | None) -> None:
        raise Hang(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Fuzzer:
    def __init__(self, seed: int, folder: Path, keep: Path | None) -> None:
        self.draw = random.Random(seed)
        self.maker = Maker(self.draw)
        self.folder, self.keep = folder, keep
        self.report = Report()
        self.learn, self.on_rewritten = LearnConfig(), OnRewritten.split

    def go(self, inputs: int) -> Report:
        while self.report.inputs < inputs:
            count = min(FILE, inputs - self.report.inputs)
            if self.draw.random() < 2 / 3:
                self._lines(count)
            else:
                self._other_file()
        return self.report

    def _lines(self, count: int) -> None:
        form = self.draw.choice(
            [FORMATS["messages"]] * 5
            + [
                FORMATS["sharegpt"],
                FORMATS["alpaca"],
                FORMATS["prompt_completion"],
                FORMATS["text"],
                FORMATS["tokens"],
            ]
        )
        family, marks = self.draw.choice(ALL_FAMILIES), self.draw.random() < 0.3
        self.learn, self.on_rewritten = self.draw.choice(LEARN), self.draw.choice([OnRewritten.split, *OnRewritten])
        lines, untouched = [], set()
        for _ in range(count):
            row: Any = self.maker.row(form)
            chance = self.draw.random()
            if 0.4 < chance < 0.8:
                row = self.maker.broken(row)
            line = json.dumps(row, ensure_ascii=self.draw.random() < 0.5).encode(errors="surrogatepass")
            if chance <= 0.4:
                untouched.add(line)
            elif chance >= 0.7:
                line = self.maker.damaged(line)
            lines.append(line)
        self.report.inputs += count
        self.report.untouched += len(untouched)
        file = self.folder / "rows.jsonl"
        file.write_bytes(b"\n".join(lines) + self.draw.choice((b"", b"\n")))
        config = SourceConfig(path=str(file), format=self.draw.choice((form.name, form.name, "auto")))
        table = self._tokenized(config, families.tokenizer(family, marks), f"{family} {form.name}")
        if table is not None:
            self._look(file, table, family, marks, untouched)

    def _other_file(self) -> None:
        """Tokenize one damaged file: only fxtune's own errors may be raised."""
        rows = [self.maker.row(FORMATS["alpaca"]) for _ in range(20)]
        kind, make = self.draw.choice(list(FILES.items()))
        content = make(rows)
        file = self.folder / f"rows{kind}"
        file.write_bytes(
            self.maker.damaged(content) if self.draw.random() < 0.8 else content[: self.draw.randrange(len(content))]
        )
        self.report.inputs += 1
        self._tokenized(
            SourceConfig(path=str(file)), families.tokenizer(self.draw.choice(list(families.FAMILIES))), kind
        )

    def _tokenized(self, config: SourceConfig, tokenizer: Any, what: str) -> TokenTable | None:
        self.report.files += 1
        cache, quarantine = self.folder / "cache", self.folder / "quarantine.jsonl"
        shutil.rmtree(cache, ignore_errors=True)
        quarantine.unlink(missing_ok=True)
        # Rows that are long enough for every chat: data.on_long is not what is fuzzed.
        data = DataConfig(
            cache_dir=str(cache),
            workers=1,
            on_bad_row=OnBadRow.quarantine,
            sequence_length=1 << 30,
            learn=self.learn,
            on_rewritten=self.on_rewritten,
        )
        began = time.perf_counter()
        table = None
        try:
            with deadline(SECONDS):
                table = tokenize(config, data, tokenizer, quarantine, progress=False)
        except UserError as error:
            self.report.refused_files += 1
            if len(str(error)) > 3 * LONGEST_REASON:
                self._wrong(f"{what}: an error of {len(str(error)):,} characters", Path(config.path))
        except (Hang, Exception) as error:  # noqa: BLE001 - any other error is a violation
            self._wrong(f"{what}: {type(error).__name__}: {str(error)[:300]}", Path(config.path))
        self.report.slowest = max(self.report.slowest, time.perf_counter() - began)
        return table

    def _look(self, file: Path, table: TokenTable, family: str, marks: bool, untouched: set[bytes]) -> None:
        questions, table = (table, table.whole) if table.whole else (None, table)
        quarantine = self.folder / "quarantine.jsonl"
        entries = [json.loads(line) for line in quarantine.read_text().splitlines()] if quarantine.exists() else []
        everything = file.read_bytes().split(b"\n")
        for entry in entries:
            reason = "".join(" " if letter.isdigit() else letter for letter in entry["error"])[:70]
            self.report.reasons[reason] += 1
            self.report.refused[reason] += everything[int(entry["where"].rpartition(":")[2]) - 1] in untouched
            if len(entry["error"]) > LONGEST_REASON:
                self._wrong(f"{family}: a reason of {len(entry['error']):,} characters: {entry['error'][:200]}", file)
        out = {int(entry["where"].rpartition(":")[2]) for entry in entries}
        lines = [(number, line) for number, line in enumerate(everything, 1) if line.strip()]
        kept = [line for number, line in lines if number not in out]
        self.report.documents += len(table)
        self.report.quarantined += table.bad_rows
        self.report.escaped += table.escaped
        self.report.tokens += len(table.ids)
        self.report.supervised += table.supervised_tokens
        if not len(table) == len(kept) == len(lines) - table.bad_rows:
            self._wrong(f"{family}: {len(lines)} lines are {len(table)} documents and {table.bad_rows} bad rows", file)
            return
        tokenizer = families.tokenizer(family, marks)
        pieces = pieces_of_rows(table, questions) if questions is not None else None
        for index, line in enumerate(kept):
            here = slice(table.offsets[index], table.offsets[index + 1])
            row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            wrong = fault(
                tokenizer,
                family,
                table.format,
                row,
                np.array(table.ids[here]),
                np.array(table.supervised[here]),
                line in untouched,
                self.learn,
            )
            chat = table.format in (FORMATS["messages"], FORMATS["sharegpt"], FORMATS["alpaca"])
            if wrong is None and chat and line in untouched:
                documents = [(np.array(table.ids[here]), np.array(table.supervised[here]))]
                if pieces is not None and questions is not None and table.digests[index] in pieces:
                    self.report.questions += len(pieces[table.digests[index]])
                    documents = [
                        (np.array(questions.ids[one]), np.array(questions.supervised[one]))
                        for one in pieces[table.digests[index]]
                    ]
                # A part that the template refuses is left out, and counted.
                if self.on_rewritten is OnRewritten.keep or (questions is not None and not questions.split.refused):
                    sampled = questions is not None and families.style(family).startswith("bytelevel")
                    wrong = turns_fault(tokenizer, row, table.format, self.learn, documents, family if sampled else "")
            if wrong:
                self._wrong(
                    f"{family}{' with marks' if marks else ''}, {table.format.name}: {wrong} in {line[:2000]!r}", file
                )

    def _wrong(self, what: str, file: Path) -> None:
        self.report.violations.append(what)
        print(what, flush=True)
        if self.keep:
            self.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, self.keep / f"{len(self.report.violations)}{''.join(file.suffixes)}")


def fault(
    tokenizer: Any,
    family: str,
    form: RowFormat,
    row: dict[str, Any],
    ids: np.ndarray,
    supervised: np.ndarray,
    untouched: bool,
    learn: LearnConfig,
) -> str | None:
    """A violation in a document, or None."""
    if form is FORMATS["tokens"]:
        expected = [label != -100 for label in row["labels"]] if row.get("labels") is not None else None
        return "the mask is not the labels'" if untouched and supervised.tolist() != expected else None
    if form is FORMATS["text"]:
        return None if supervised.all() else "a token of a text is not supervised"
    chat = form is not FORMATS["prompt_completion"] or any(
        isinstance(row[side], list) for side in ("prompt", "completion")
    )
    if ChatRole.user in learn.roles:
        return None
    if untouched and DIAMOND in tokenizer.decode(ids[supervised]):
        return "text that must not be learned is supervised"
    if not chat or family not in GRAMMARS:
        return None
    return structure_fault(tokenizer, GRAMMARS[family], turns_of(row, form), ids, supervised)


def structure_fault(
    tokenizer: Any, grammar: Grammar, turns: list[tuple[str, bool]], ids: np.ndarray, supervised: np.ndarray
) -> str | None:
    """A violation in a chat, given the (role, whether it has reasoning) of its turns, or None."""
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    at = [index for index, token in enumerate(ids.tolist()) if token in special]
    inside, openings = np.zeros(len(ids), bool), 0
    opened: int | None = None
    for index, following in zip(at, [*at[1:], len(ids)], strict=True):
        name = special[ids[index]]
        if name in grammar.closes:
            if opened is not None:
                inside[opened : index + 1] = True
            opened = None
        elif name == grammar.opens:
            mine = tokenizer.decode(ids[index + 1 : following]).lstrip(" ").startswith(grammar.header)
            openings += mine
            if mine:
                opened = index
    if opened is not None:
        inside[opened:] = True
    if (supervised & ~inside).any():
        return "a supervised token outside an assistant's turn"
    spoken = sum(role == grammar.speaker for role, _ in turns)
    more = grammar.more * any(reasoning for _, reasoning in turns)
    return None if spoken <= openings <= spoken + more else f"{spoken} turns of {grammar.speaker}, {openings} openings"


def pieces_of_rows(table: TokenTable, questions: TokenTable) -> dict[int, list[slice]]:
    """The documents of single questions of each chat, by its digest. A chat that stands there twice has its documents
    once."""
    pieces: dict[int, list[slice]] = {}
    copies = collections.Counter(table.digests.tolist())
    for index, digest in enumerate(questions.digests.tolist()):
        pieces.setdefault(digest, []).append(slice(questions.offsets[index], questions.offsets[index + 1]))
    return {digest: found[: len(found) // copies[digest]] for digest, found in pieces.items()}


def turns_fault(
    tokenizer: Any,
    row: dict[str, Any],
    form: RowFormat,
    learn: LearnConfig,
    documents: list[tuple[np.ndarray, np.ndarray]],
    family: str,
) -> str | None:
    """A violation in the documents of one chat, or None. `family`: whose prompts in sampling the documents must have;
    empty if they need not, or cannot be decoded exactly."""
    turns = [{"role": "user"}, {"role": "assistant"}] if form is FORMATS["alpaca"] else row.get("messages") or []
    turns = turns or [{"role": role} for role, _ in turns_of(row, form)]
    wanted = learned_turns(turns, learn)
    runs = [
        (ids, start)
        for ids, supervised in documents
        for start in np.flatnonzero(supervised & ~np.concatenate([[False], supervised[:-1]]))
    ]
    if len(runs) != len(wanted):
        return f"{len(wanted)} turns are to be learned, and {len(runs)} are"
    variables = row.get(VARIABLES, {})
    if not family or form is not FORMATS["messages"] or any("tool_calls" in turn for turn in turns):
        return None
    if variables.get("enable_thinking") is False and any(name in turn for turn in turns for name in REASONING_KEYS):
        return None  # the prompt asks for none, the row has some: a line says so
    for (ids, start), turn in zip(runs, wanted, strict=True):
        if turns[turn]["role"] != "assistant":
            continue
        messages = [
            one | {"thinking": one[key], "reasoning_content": one[key]}
            if (key := next((name for name in REASONING_KEYS if name in one), None))
            else one
            for one in turns[:turn]
        ]
        if family != "harmony" and messages[0]["role"] == "developer":  # the only template that knows this role
            messages[0] = messages[0] | {"role": "system"}
        prompt = tokenizer.apply_chat_template(
            messages, row.get("tools"), add_generation_prompt=True, tokenize=False, **variables
        )
        if tokenizer.decode(ids[:start]) != prompt:
            return f"turn {turn} stands behind {tokenizer.decode(ids[:start])!r}, not behind {prompt!r}"
    return None


def learned_turns(turns: list[dict[str, Any]], learn: LearnConfig) -> list[int]:
    """The turns of an undamaged chat that are to be learned."""
    wanted = [
        index
        for index, turn in enumerate(turns)
        if ROLES[turn["role"]] in learn.roles
        and turn.get("weight") != 0
        and turn.get("train") is not False
        and (learn.tool_calls or not turn.get("tool_calls"))
    ]
    if wanted and learn.last_turn_only:
        wanted = wanted[-1:]
    elif wanted and learn.since_last_question:
        question = max((index for index in range(wanted[-1]) if turns[index]["role"] == "user"), default=-1)
        wanted = [index for index in wanted if index > question]
    switched_on = [index for index, turn in enumerate(turns) if turn.get("train") is True]
    return sorted({*wanted, *switched_on})


def turns_of(row: dict[str, Any], form: RowFormat) -> list[tuple[str, bool]]:
    if form is FORMATS["alpaca"]:
        return [("user", False), ("assistant", False)]
    sides = (
        [row["prompt"], row["completion"]]
        if form is FORMATS["prompt_completion"]
        else [next(row[key] for key in ("messages", "conversations", "conversation") if row.get(key) is not None)]
    )
    return [
        (
            ROLES[turn["role"] if "role" in turn or "from" not in turn else turn["from"]],
            any(key in turn for key in ("reasoning_content", "thinking", "reasoning")),
        )
        for turns in sides
        for turn in turns
    ]


def _csv(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([["instruction", "output"], *([row["instruction"], row["output"]] for row in rows)])
    return out.getvalue().encode()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


FILES: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    ".json": lambda rows: json.dumps(rows).encode(),
    ".csv": _csv,
    ".parquet": _parquet,
    ".jsonl.gz": lambda rows: gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)),
    ".txt": lambda rows: "\n\n".join(row["output"] for row in rows).encode(),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the files with violations")
    asked = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Fuzzer(asked.seed, Path(folder), asked.keep).go(asked.inputs)
    console, table = Console(), Table("", "count")
    for name, value in [
        ("inputs", report.inputs),
        ("not damaged", report.untouched),
        ("files", report.files),
        ("files refused", report.refused_files),
        ("documents", report.documents),
        ("quarantined rows", report.quarantined),
        ("documents with quoted special tokens", report.escaped),
        ("documents of single questions that were checked", report.questions),
        ("tokens", report.tokens),
        ("supervised tokens", report.supervised),
        ("violations", len(report.violations)),
    ]:
        table.add_row(name, f"{value:,}")
    table.add_row("seconds", f"{time.perf_counter() - began:,.0f}")
    table.add_row("the slowest file's seconds", f"{report.slowest:.2f}")
    console.print(table)
    for title, reasons in (("all inputs", report.reasons), ("inputs that were not damaged", +report.refused)):
        console.print(
            f"Reasons of the quarantine, {title} ({reasons.total():,}): "
            + "; ".join(f"{count:,} x {reason}" for reason, count in reasons.most_common(10)),
            highlight=False,
            markup=False,
        )
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
