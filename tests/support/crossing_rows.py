"""Rows with unique numbers, the documents that a run makes of them, and whether all were trained, held out or counted.

`Rows` writes the files of a case of crossings.py. Each question has a unique number (q0042), and so has each answer
(a0043): where a row went is found by comparing texts. `record` is a run that writes down the documents of its steps
and of its first evaluation.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

IMAGES = ("images", "image_pairs")

WORDS = ("red", "lamp", "table", "from", "order", "seven", "small", "chair", "please", "blue", "four", "green")
MARK = re.compile(r"[aq]\d{3}[0-9a-j]")
"""A unique number: of a question (q0042) or an answer (a0042; a004d in the near-copy of that row)."""


@dataclass
class Row:
    columns: dict[str, Any]
    answers: list[str]
    """The unique numbers of its answers, in their order; of a text, those in it."""
    questions: list[str] = field(default_factory=list)
    long: bool = False

    def learned(self, learn: str) -> list[str]:
        """The unique numbers that its supervised tokens must have."""
        return {"everyone": [*self.answers, *self.questions], "last": self.answers[-1:]}.get(learn, self.answers)

    def near_copy(self) -> Row:
        """The same row, but for the last digit of each number."""

        def changed(mark: str) -> str:
            return f"{mark[:-1]}{'abcdefghij'[int(mark[-1])]}"

        columns = json.loads(MARK.sub(lambda found: changed(found[0]), json.dumps(self.columns)))
        return Row(columns, [changed(mark) for mark in self.answers], [changed(mark) for mark in self.questions])


class Rows:
    """Writes the rows of a case: sources a.jsonl and b.jsonl, held.jsonl for evaluation. Row 3 occurs twice, row 4 has
    a near-copy, and in cases with images row 5 occurs again with another picture."""

    def __init__(self, kind: str, folder: Path, seed: int = 0, long: bool = False, two: bool = False) -> None:
        """`long`: three rows are longer than LENGTH tokens. `two`: b.jsonl is a source, too."""
        self.folder, self.kind, self.draw, self.count = folder, kind, random.Random(seed), 0
        first = [self.row() for _ in range(17)]
        near = first[4].answers[-1]
        longer = json.dumps(first[4].columns).replace(near, self._say(near, 10))  # so that one digit is a small part
        first[4] = Row(json.loads(longer), first[4].answers, first[4].questions)
        first += [first[3], first[4].near_copy()]
        first += [self.row(long=True) for _ in range(3 * long)]
        if self.kind in IMAGES:
            first.append(Row({**first[5].columns, "images": [self.picture()]}, first[5].answers, first[5].questions))
        second = [self.row(chats=True) for _ in range(8 * two)]
        self.sources = [*first, *second]
        self.removable = {first[3].answers[-1]}
        """The last answers of rows of which data.dedup leaves one."""
        self.held = [self.row() for _ in range(5)]
        for name, rows in (("a", first), ("b", second), ("held", self.held)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row.columns) + "\n" for row in rows))

    def row(self, long: bool = False, chats: bool = False) -> Row:
        """The next row. `chats`: with turns where the kind of rows may have texts."""
        made = {"chat": self._chat, "images": self._chat, "tools": self._tools, "text": self._text, "kto": self._kto}
        make = made.get(self.kind)
        return make(long) if make else self._pair(long, chats or self.kind in IMAGES)

    def picture(self) -> str:
        from PIL import Image

        self.count += 1
        size = (28 * self.draw.randint(1, 2), 28 * self.draw.randint(1, 2))
        Image.new("RGB", size, tuple(self.draw.randrange(256) for _ in range(3))).save(
            self.folder / f"{self.count}.png"
        )
        return f"{self.count}.png"

    def _mark(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count:04d}"

    def _say(self, mark: str, words: int) -> str:
        # The tokenizer of builtin:tiny-vision has half as many words.
        return " ".join([mark, *self.draw.choices(WORDS, k=words // 2 if self.kind in IMAGES else words)])

    def _ask(self, mark: str, words: int) -> str:
        """A question; its number comes last, where truncation leaves it."""
        number, _, text = self._say(mark, words).partition(" ")
        return f"{text} {number}".strip()

    def _with_picture(self, columns: dict[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
        if self.kind in IMAGES:
            messages[0]["content"] = f"<image>{messages[0]['content']}"
            columns["images"] = [self.picture()]
        return columns

    def _chat(self, long: bool) -> Row:
        turns = (4 if self.kind in IMAGES else 6) if long else 1 if self.kind in IMAGES else self.draw.randint(1, 2)
        questions, answers = [self._mark("q") for _ in range(turns)], [self._mark("a") for _ in range(turns)]
        messages = [
            {"role": role, "content": write(mark, 8 if long else self.draw.randint(2, 4))}
            for question, answer in zip(questions, answers, strict=True)
            for role, write, mark in (("user", self._ask, question), ("assistant", self._say, answer))
        ]
        return Row(self._with_picture({"messages": messages}, messages), answers, questions, long)

    def _tools(self, long: bool) -> Row:
        messages, answers, questions = list[dict[str, Any]](), list[str](), list[str]()
        for _ in range(3 if long else 1):
            question, call, answer = self._mark("q"), self._mark("a"), self._mark("a")
            function = {"name": "find", "arguments": {"key": call}}
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "content": "7"},
                {"role": "assistant", "content": answer},
            ]
            questions, answers = [*questions, question], [*answers, call, answer]
        return Row({"messages": messages}, answers, questions, long)

    def _text(self, long: bool) -> Row:
        # A first token is never a target, so a text begins with a word.
        marks = [self._mark("a") for _ in range(16 if long else self.draw.randint(1, 4))]
        return Row({"text": " ".join(["So", *(self._say(mark, 4) for mark in marks)])}, marks, [], long)

    def _pair(self, long: bool, chats: bool) -> Row:
        question, good, bad = self._mark("q"), self._mark("a"), self._mark("a")
        prompt, chosen, rejected = (
            self._ask(question, 120 if long else self.draw.randint(2, 9)),
            self._say(good, 3),
            self._say(bad, 5),
        )
        if not chats:
            return Row({"prompt": prompt, "chosen": chosen, "rejected": rejected}, [good, bad], [question], long)
        messages = [{"role": "user", "content": prompt}]
        answers = {
            name: [{"role": "assistant", "content": text}]
            for name, text in (("chosen", chosen), ("rejected", rejected))
        }
        return Row(self._with_picture({"prompt": messages, **answers}, messages), [good, bad], [question], long)

    def _kto(self, long: bool) -> Row:
        question, answer = self._mark("q"), self._mark("a")
        prompt, completion = self._ask(question, 120 if long else self.draw.randint(2, 9)), self._say(answer, 4)
        row = {"prompt": prompt, "completion": completion, "label": self.count % 3 > 0}
        return Row(row, [answer], [question], long)


def record(words: list[str]) -> int:
    """A run that also writes the documents of its steps, and of its first evaluation of held-out rows, to documents.jsonl."""
    import fxtune.cli.main
    from fxtune.training import evaluation, trainer

    out = Path("documents.jsonl").open("a", buffering=1)  # noqa: SIM115  a line at a time: the process ends abruptly
    step, evaluate, seen = trainer.Steps.take, evaluation.evaluate, list[int]()

    def recorded_step(self: Any, given: Any, lr: float) -> Any:
        def noted(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                out.write(json.dumps({"step": given.index, **documents(batch)}) + "\n")
                yield batch

        return step(self, replace(given, micro_batches=noted(given.micro_batches)), lr)

    def recorded_evaluation(model: Any, objective: Any, loader: Any, *rest: Any) -> Any:
        plan = loader.plan
        if any("general" in table.name for table in plan.tables):  # data.general, no rows of the case
            return evaluate(model, objective, loader, *rest)
        for index in range(0 if seen else plan.steps):
            for micro in range(plan.micro_batches(index)):
                out.write(json.dumps({"step": None, **documents(plan.batch(index, micro))}) + "\n")
        seen.append(plan.steps)
        return evaluate(model, objective, loader, *rest)

    trainer.Steps.take, evaluation.evaluate = recorded_step, recorded_evaluation  # type: ignore[method-assign]
    return fxtune.cli.main.main(words)


def documents(batch: Any) -> dict[str, Any]:
    """The documents of a micro-batch, each with its tokens, its targets and its label, and the number of images."""
    ids, targets = batch.input_ids.flatten().tolist(), batch.targets.flatten().tolist()
    labels = None if batch.document_labels is None else batch.document_labels.tolist()
    found = []
    for number, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        if start < end:
            learned = [target for target in targets[start:end] if target >= 0]
            label = None if labels is None or labels[number] != labels[number] else labels[number]
            found.append({"ids": ids[start:end], "learned": learned, "label": label})
    images = batch.images or {}
    return {"documents": found, "images": len(images["image_grid_thw"]) if images else 0}


@dataclass
class Conservation:
    """Compares the rows of a case with the recorded documents of its run."""

    rows: Rows
    learn: str
    """The value of the factor of crossings.py."""
    long: str
    weighted: bool
    """The mix decides how often a row is used."""
    cut: bool
    """Growing rows cut texts that fit no later stage."""
    dedup: bool
    epochs: float
    summary: dict[str, Any]
    """Of the preview."""
    log: str
    """The output of the run."""
    trained: list[dict[str, Any]] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    learned_tokens: int = 0
    images: int = 0
    """The images that the training batches hold."""

    def read(self, place: Path) -> Conservation:
        from transformers import AutoTokenizer

        (export,) = (path for path in (place / "run" / "adapter", place / "run" / "model") if path.exists())
        tokenizer = AutoTokenizer.from_pretrained(export)
        for line in map(json.loads, (place / "documents.jsonl").read_text().splitlines()):
            for document in line["documents"]:
                self.learned_tokens += len(document["learned"]) * (line["step"] is not None)
                for name in ("ids", "learned"):
                    document[name] = tokenizer.decode(document[name], skip_special_tokens=False)
            (self.held if line["step"] is None else self.trained).extend(line["documents"])
            self.images += line["images"] * (line["step"] is not None)
        if self.rows.kind == "kto":  # a mismatched answer has no label
            self.trained, self.held = (
                [one for one in side if one["label"] is not None] for side in (self.trained, self.held)
            )
        return self

    def problems(self) -> Iterator[str]:
        part = "ids" if self.rows.kind == "reward" else "learned"
        learned = Counter(mark for one in self.trained for mark in MARK.findall(one[part]))
        held = Counter(mark for one in self.held for mark in MARK.findall(one[part]))
        units = dict[str, tuple[Row, int]]()
        for row in self.rows.sources:
            units[row.answers[-1]] = (row, units.get(row.answers[-1], (row, 0))[1] + 1)
        trained = 0
        for last, (row, times) in units.items():
            expected = row.learned(self.learn)
            most = max(learned[mark] for mark in expected)
            if self.rows.kind in IMAGES and last == self.rows.sources[5].answers[-1]:
                times -= held[last]  # the same text with two pictures: two documents, each with its side
            elif most and any(held[mark] for mark in expected):
                yield f"row {last} is trained and held out"
            least = 1 if self.dedup and last in self.rows.removable else times
            low, high = least * math.floor(self.epochs), times * math.ceil(self.epochs)
            if self.epochs == math.floor(self.epochs):
                trained += min(times, most // int(self.epochs))
            if not most or self.weighted:
                continue
            loses = (row.long and (self.long == "truncate" or self.rows.kind == "text")) or self.cut
            for mark in expected:
                if not low <= learned[mark] <= high and not (loses and learned[mark] < low):
                    yield f"row {last}: {mark} is learned {learned[mark]} times in {self.epochs:g} epochs, not {low} to {high}"
        if self.rows.kind != "reward":
            may = {mark for row in self.rows.sources for mark in row.learned(self.learn)}
            if strange := sorted(set(learned) - may):
                yield f"learned, and should not be: {strange[:5]}"
        if not self.weighted and self.epochs == math.floor(self.epochs):
            yield from self._counted(units, trained, held)
        if self.rows.kind in IMAGES:
            yield from self._pictured()

    def _counted(self, units: dict[str, tuple[Row, int]], trained: int, held: Counter[str]) -> Iterator[str]:
        """The numbers of rows that were trained, held out and left out make up all rows."""
        count = len(self.rows.sources)
        kept = sum(max(held[mark] for mark in row.learned(self.learn)) for row, _ in units.values())
        left_out = sum(_number(text) for text in re.findall(r"data\.dedup=\w+ leaves out ([\d,]+)", self.log))
        too_long = re.findall(r"held out for evaluation: .*; ([\d,]+) longer", self.log)
        left_out += sum(map(_number, too_long)) if kept else 0  # rows of eval files are not among the rows
        said = sum(_number(text) for text in re.findall(r"held out for evaluation: ([\d,]+)", self.log))
        evaluated = kept or sum(any(held[mark] for mark in row.answers) for row in self.rows.held)
        if self.long == "split" and self.rows.kind != "text":
            said = kept  # the run counts each piece of a chat as a document
        elif self.held and said != evaluated:
            yield f"{said} documents are held out, says the run; {evaluated} are evaluated"
        told = {name: self.summary[name] for name in ("dropped", "overlapping", "without_targets")}
        missing = count - trained - (said if kept else 0) - left_out - told["dropped"] - told["overlapping"]
        if not 0 <= missing <= told["without_targets"]:
            yield (
                f"{count} rows: {trained} trained, {kept} held out, {left_out} left out as copies, {told}: {missing} are "
                "not counted"
            )

    def _pictured(self) -> Iterator[str]:
        """Each document with a question has the question's picture, and the batches have as many as the documents."""
        without = [
            one["ids"]
            for one in self.trained
            if re.search(r"q\d{4}", one["ids"]) and "<|vision_start|>" not in one["ids"]
        ]
        if without:
            yield f"{len(without)} of {len(self.trained)} documents ask about a picture that they do not have: {without[0][:80]!r}"
        if any(one["ids"].count("<|vision_start|>") != one["ids"].count("<|vision_end|>") for one in self.trained):
            yield "a document has a part of a picture's tokens"
        if (marks := sum(one["ids"].count("<|vision_start|>") for one in self.trained)) != self.images:
            yield f"{marks} pictures in the documents, {self.images} in the batches"


def _number(text: str) -> int:
    return int(text.replace(",", ""))
