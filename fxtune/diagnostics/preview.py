"""The page of `fxtune preview`: the first samples as the model will see them (after template, split and packing), the
statistics of the data, and a forecast of a step's memory and time. The samples are read back from the first batches of
the training run."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from fxtune.checkpoint.run_folder import ROLLOUT_ANSWERS, ROLLOUTS
from fxtune.config.root import Config
from fxtune.data.batches.plan import DocumentSlice, Plan
from fxtune.data.formats.values import RowError
from fxtune.data.images.decode import decode
from fxtune.data.images.placed import PlacedImage, without
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.tokenized.profile import PERCENTILES
from fxtune.data.tokenized.table import TokenTable
from fxtune.diagnostics.samples import SAMPLES, ShownDocument, ShownRow, shown_rows
from fxtune.distributed.files import require_writable, write_text
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, DataError
from fxtune.estimate.cards import rates
from fxtune.estimate.memory import forecast
from fxtune.estimate.step_time import micro_batch_seconds
from fxtune.estimate.traffic import step_traffic
from fxtune.facts.run import Facts
from fxtune.models.load import load_tokenizer
from fxtune.settle.images import image_processor
from fxtune.settle.settled import settle
from fxtune.settle.stages import Stage
from fxtune.system.terminal import console as screen
from fxtune.system.terminal.units import GIB, counted, format_seconds
from fxtune.training.data.run_data import data_notes, held_out_note, run_data
from fxtune.training.forecast.run_forecast import micro_batch_images, seconds_here
from fxtune.training.forecast.step_count import few_steps
from fxtune.training.rollouts.folder import Rollouts

HEAD, TAIL = 300, 150
WIDE = 80
"""Columns that a terminal needs for the table of all sources, and for two answers side by side."""
SUPERVISED, SPECIAL, NOTE = "green", "bold magenta", "dim"
MAX_CHARACTER_BYTES = 4
"""The most bytes of a UTF-8 character, and so the most tokens that a character can take."""


class Signs(NamedTuple):
    """Marks for terminals without colour."""

    begin: str
    end: str
    newline: str
    more: str
    rule: str


UNICODE, ASCII = Signs("⟦", "⟧", "↵", "…", "─"), Signs("[[", "]]", "\\n", "...", "-")


def preview(config: Config, console: Console | None = None, html: Path | None = None) -> dict[str, Any]:
    """Print and return samples and statistics of a run's data. `html`: a file for the same page. Rows that the run's
    objective cannot learn from are shown, with a line that says so. Raises the other errors of a run, and StorageError
    if the file cannot be written."""
    console = console or screen.console()
    if html is not None:
        require_writable(html, "--html")
        console.record = True
    tokenizer = load_tokenizer(config.model)
    machine = World.create(config.run.device, config.run.memory_gib).facts(config.run.strict)
    settled = settle(config, machine, checks=False)
    # The content of the files is shown even if a run is refused.
    refusals, unfit = settled.refusals(), list[str]()
    images = image_processor(config.model, settled.config.data, tokenizer, settled.hf_config)
    data = run_data(settled.config, tokenizer, images, unfit.append)
    stage = Stage.first(settled).with_images(data.training.epoch_images()[1])
    rows = list(shown_rows(data.training))
    print_samples(rows, data.training, TokenTexts(tokenizer, signs_of(console)), console)
    print_statistics(data.training, console)
    print_lengths(data.tables, console)
    print_forecast(stage.facts, data.training, console)
    summary = data.training.summary()
    few = few_steps(config, summary["steps"], summary["rows"], data.training.stream.rows_of_group)
    notes = [*stage.notes, *(() if unfit else data_notes(config, data)), *few]
    if data.evaluation:
        notes = [*notes, held_out_note(data.evaluation)]
    notes += [f"A run is refused: {refusal}" for refusal in [*refusals, *unfit]]
    for note in notes:
        console.print(screen.plain(note), soft_wrap=True)
    if html is not None:
        page = console.export_html()
        if images is not None:
            page = page.replace("</body>", f"{gallery(rows, data.training, images)}\n</body>")
        write_text(html, page, "--html")
        console.record = False
    texts = TokenTexts(tokenizer)
    samples = [_as_json(sample, data.training, texts) for row in rows for sample in row.samples]
    return {"samples": samples, "summary": summary, "notes": notes}


def preview_rollouts(config: Config, run: Path) -> dict[str, Any]:
    """Print the best and the worst answer to some prompts of the newest step on the disk. Return all answers that the
    step learned from, with their prompts. `config`: the config of the run in the folder `run`. Raises ConfigError if
    the run has no answers, StorageError if they cannot be read."""
    steps = sorted((run / ROLLOUTS).glob(f"step-*/{ROLLOUT_ANSWERS}"))
    if not steps:
        raise ConfigError(
            f"{run} has no answers of a model: only runs with objective=policy have them. `fxtune preview "
            "+recipe=NAME` shows the rows of a recipe."
        )
    console, step, rollouts = screen.console(), int(steps[-1].parent.name.partition("-")[2]), Rollouts(run / ROLLOUTS)
    table, texts = rollouts.table(step - 1), TokenTexts(load_tokenizer(config.model), signs_of(console))
    answers = [answer for answer in rollouts.answers(step - 1) if answer["advantage"] is not None]
    for answer, start, end in zip(answers, table.offsets[:-1].tolist(), table.offsets[1:].tolist(), strict=True):
        supervised = table.supervised[start:end].tolist()
        answer |= {"ids": table.ids[start:end].tolist(), "supervised": supervised}
    print_legend(texts.signs, console)
    mean = rollouts.figures(step - 1)["figures"]["reward"]
    title = f"step {step}: {counted(len(answers), 'answers')} to learn from; mean reward of all answers {mean:.4g}"
    console.print(Rule(title, characters=texts.signs.rule, align="left"))
    for _, group in islice(groupby(answers, itemgetter("group")), SAMPLES // 2):
        own = sorted(group, key=itemgetter("reward"), reverse=True)
        for answer in own[:: max(len(own) - 1, 1)]:
            heading = f"{answer['where']}: reward {answer['reward']:.4g}, advantage {answer['advantage']:+.4g}"
            console.print(Text(heading + ", cut off" * (not answer["finished"]), NOTE))
            console.print(texts.document(answer["ids"], answer["supervised"]))
    return {"step": step, "answers": answers}


def signs_of(console: Console) -> Signs:
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def print_legend(signs: Signs, console: Console) -> None:
    console.print(
        Text.assemble(
            "Legend: ",
            (f"{signs.begin}supervised{signs.end}", SUPERVISED),
            " tokens, which the model learns to produce; ",
            ("special tokens", SPECIAL),
            f"; {signs.newline} a newline; \\x1b a character or byte that cannot be printed; ",
            (f"{signs.more} tokens left out, or padding", NOTE),
            ".",
        )
    )


def print_samples(rows: Sequence[ShownRow], plan: Plan, texts: TokenTexts, console: Console) -> None:
    signs = texts.signs
    print_legend(signs, console)
    for row in rows:
        console.print(Rule(row.title, characters=signs.rule, align="left"))
        for sample in row.samples:
            if len(sample) == 2:
                _print_pair(plan, sample, texts, console)
                continue
            (document,) = sample
            console.print(_heading(plan, document.piece, document.positions))
            console.print(texts.document(document.ids, document.supervised, document.images(plan)))
        if row.more:
            console.print(Text(f"{signs.more} {row.more:,} more of this row's documents", NOTE))
        if row.pads:
            console.print(Text(f"{signs.more} {counted(row.pads, 'pads')}", NOTE))


def _print_pair(plan: Plan, documents: Sequence[ShownDocument], texts: TokenTexts, console: Console) -> None:
    """Print the prompt of two answers once, then the answers side by side. A narrow terminal gets them in turn."""
    first = documents[0]
    table, prompt = plan.tables[first.piece.source], first.supervised.index(True)
    title = f"documents {first.piece.document + 1:,} and {first.piece.document + 2:,} of {screen.plain(table.name)}"
    title += f", group {first.piece.group}"
    if table.labels is not None:
        labels = table.labels[first.piece.document :][:2].tolist()
        title += "" if math.isnan(labels[0]) else f", labels {labels[0]:g} and {labels[1]:g}"
    console.print(Text(f"{title}: the prompt of both, {counted(prompt, 'tokens')}", NOTE))
    images = [document.images(plan) for document in documents]
    of_prompt = [image for image in images[0] if image.start < prompt]
    console.print(texts.document(first.ids[:prompt], [False] * prompt, of_prompt))
    names = [
        f"{name}, {counted(len(document.ids) - prompt, 'tokens')}"
        for name, document in zip(table.format.answers, documents, strict=True)
    ]
    answers = [
        texts.document(document.ids[prompt:], document.supervised[prompt:], without(own, 0, prompt))
        for document, own in zip(documents, images, strict=True)
    ]
    if console.width >= WIDE:
        for answer in answers:
            answer.rstrip()
        console.print(screen.table("", names, [answers]))
        return
    for name, answer in zip(names, answers, strict=True):
        console.print(Text(name, NOTE))
        console.print(answer)


def _as_json(documents: Sequence[ShownDocument], plan: Plan, texts: TokenTexts) -> list[dict[str, Any]]:
    """A sample for --json: its documents, with the name of the answer in a row of preferences."""
    found = []
    for at, document in enumerate(documents):
        piece, ids, supervised, positions = document
        images = document.images(plan)
        pictures = [
            {"name": it.name, "height": it.height, "width": it.width, "start": start, "tokens": tokens}
            for start, tokens, it in images
        ]
        table = plan.tables[piece.source]
        label = math.nan if table.labels is None else float(table.labels[piece.document])
        found.append(
            {
                "source": table.name,
                "document": piece.document + 1,
                "group": piece.group,
                "answer": table.format.answers[at] if table.format.answers else None,
                "label": None if math.isnan(label) else label,
                "prompt_tokens": supervised.index(True) if True in supervised else len(supervised),
                "ids": ids,
                "supervised": supervised,
                "positions": positions,
                "images": pictures,
                "text": texts.document(ids, supervised, images).plain,
            }
        )
    return found


def print_statistics(plan: Plan, console: Console) -> None:
    summary = plan.summary()
    lengths, most = plan.sizes.row_lengths, plan.stream.settings.sequence_length
    row_length = "as long as the longest of the micro-batch"
    if lengths:
        row_length = f"of {', '.join(f'{length:,}' for length in lengths)} tokens"
    changed = " / ".join(f"{summary[name]:,}" for name in ("split", "truncated", "dropped"))
    epochs = f"{summary['epochs']:.4g} epochs of {summary['steps_per_epoch']:,.1f} steps"
    noun, pieces = ("groups", "groups") if plan.stream.is_grouped else ("documents", "documents or pieces")
    rows = {
        noun: f"{summary['documents']:,}",
        "rows": f"{summary['rows']:,} ({row_length})",
        "tokens": f"{summary['tokens']:,}",
        "long documents": "",
        "supervised": f"{summary['supervised_share']:.1%} of the tokens ({summary['supervised_tokens']:,})",
        "padding": f"{summary['padding_share']:.1%} of the rows",
        "split / truncated / dropped": f"{changed} {noun} longer than {most:,} tokens",
        "without targets": f"{summary['without_targets']:,} {pieces}, left out",
        "steps": f"{summary['steps']:,} ({epochs})",
        "stages": str(plan.step_rows) if len(plan.step_rows.starts) > 1 else "",
    }
    if mix := summary["mix"]:
        spread = f"{mix['lowest']:.0%} to {mix['highest']:.0%} in a step"
        rows["long documents"] = f"{mix['share']:.1%} of the tokens, {spread} (over {mix['threshold']:,} tokens each)"
    console.print()
    console.print(screen.table("The first epoch", ["", ""], [row for row in rows.items() if row[1]]))
    columns = ["source", noun, "segments", "supervised tokens", "share", "times seen", "bad rows"]
    cells = [
        [
            source["name"],
            *(f"{source[name]:,}" for name in ("documents", "segments", "supervised_tokens")),
            f"{source['share']:.1%}",
            f"{source['repeats']:.2f}",
            f"{table.bad_rows:,}",
        ]
        for source, table in zip(summary["sources"], plan.tables, strict=True)
    ]
    if console.width >= WIDE:
        console.print(screen.table("Sources", columns, cells))
        return
    for name, *values in cells:  # seven columns would break every word
        console.print(screen.table(f"Source {name}", ["", ""], list(zip(columns[1:], values, strict=True))))


def print_lengths(tables: Sequence[TokenTable], console: Console) -> None:
    """Print the lengths and supervised shares of each source's documents, before long documents are split. Copies and
    held-out documents are included."""
    of_lengths = [f"{percentile} %" for percentile in PERCENTILES]
    columns = ["source", *of_lengths, "longest", "supervised", "5 %", "50 %", "95 %"]
    rows = []
    for table in (table.whole or table for table in tables):
        lengths = np.diff(table.offsets)
        supervised = np.add.reduceat(np.asarray(table.supervised), table.offsets[:-1], dtype=np.int64) / lengths
        percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
        shares = [
            table.supervised_tokens / len(table.ids),
            *np.percentile(supervised, PERCENTILES, method="inverted_cdf").tolist(),
        ]
        shown = [f"{length:,.0f}" for length in (*percentiles, lengths.max())]
        rows.append([table.name, *shown, *(f"{share:.0%}" for share in shares)])
    console.print(screen.table("Tokens of a document, and the share of them that is supervised", columns, rows))


def print_forecast(facts: Facts, plan: Plan, console: Console) -> None:
    """Print the forecast of a step's memory and time on each rank. `facts`: a rank's facts, with `auto` decided."""
    degrees, kept = facts.degrees, facts.execution.recompute
    need, own = forecast(facts, kept), -(-plan.micro_batches(0) // facts.degrees.data_ranks)
    fits = "fits" if need.device <= facts.free_memory else "may not fit"
    rows = {
        "ranks": f"{degrees.ranks} ({degrees})" if degrees.ranks > 1 else "",
        **need.parts,
        "in all": f"{_gib(need.device)}, {_gib(facts.free_memory)} are free: {fits}",
        "host memory": need.pinned,
    }
    if degrees.ranks > 1:
        traffic = step_traffic(facts, own)
        sizes = ", ".join(f"{size / 1e6:,.1f} MB of {name}" for name, size in vars(traffic).items() if size)
        rows["sent in a step"] = f"{sizes}; {traffic.total / rates(facts).peer * 1e3:,.2g} ms at the links' full rate"
    if facts.device == "cuda":
        summary = plan.summary()
        supervised = summary["supervised_tokens"] / summary["computed_tokens"]
        seconds = own * micro_batch_seconds(facts, kept, supervised, images=micro_batch_images(facts, plan))
        speed = plan.tokens(plan.last_stage) / seconds
        rows["a step"] = f"at least {seconds:,.2g} s, at most {speed:,.0f} tokens/s in all, by the kernels' rates"
    elif whole := seconds_here(facts, plan):
        rows["the steps"] = f"about {format_seconds(whole)} if these cores stay as free as now (a product was timed)"
    shown = [(name, _gib(row) if isinstance(row, int) else row) for name, row in rows.items() if row]
    title = f"Forecast for {'each rank' if degrees.ranks > 1 else 'a step'} on {facts.device_name}"
    console.print(screen.table(title, ["", ""], shown))


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f} GiB"


class TokenTexts:
    """Readable text of each token: no byte is lost, and no control character reaches the terminal."""

    def __init__(self, tokenizer: Any, signs: Signs = UNICODE) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.tokenizer, self.signs = tokenizer, signs
        self.bytes = {character: byte for byte, character in bytes_to_unicode().items()}
        """The byte of each character that stands for a byte in byte-level BPE."""
        self.special = set(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def document(self, ids: list[int], supervised: list[bool], images: Sequence[PlacedImage] = ()) -> Text:
        """A document's text, with a line for each of its images. The middle of a long text is replaced by its number
        of tokens."""
        if images:
            text, end = Text(), 0
            for number, image in enumerate(images, 1):
                text.append_text(self.document(ids[end : image.start], supervised[end : image.start]))
                end = image.end
                text.append(f"\n{self.signs.more} {about_image(number, image)} {self.signs.more}\n", NOTE)
            return text.append_text(self.document(ids[end:], supervised[end:]))
        if len(ids) <= HEAD + TAIL:
            return self._tokens(ids, supervised)
        left_out, learned = len(ids) - HEAD - TAIL, sum(supervised[HEAD:-TAIL])
        gap = f"\n{self.signs.more} {left_out:,} tokens left out, {learned:,} of them supervised {self.signs.more}\n"
        return Text.assemble(
            self._tokens(ids[:HEAD], supervised[:HEAD]), (gap, NOTE), self._tokens(ids[-TAIL:], supervised[-TAIL:])
        )

    def _tokens(self, ids: list[int], supervised: list[bool]) -> Text:
        text = Text()
        learned, at = False, 0
        while at < len(ids):
            if supervised[at] != learned:
                text.append(self.signs.end if learned else self.signs.begin, SUPERVISED)
                learned = not learned
            shown, count = self._next(ids[at : at + MAX_CHARACTER_BYTES], supervised[at : at + MAX_CHARACTER_BYTES])
            text.append(shown, SPECIAL if ids[at] in self.special else SUPERVISED if learned else "")
            at += count
        if learned:
            text.append(self.signs.end, SUPERVISED)
        return text

    def _next(self, ids: list[int], supervised: list[bool]) -> tuple[str, int]:
        """The text of the next character or token, and its number of tokens: one character can be several tokens."""
        if ids[0] in self.special:
            return self._printable(str(self.tokenizer.convert_ids_to_tokens(ids[0]))), 1
        for count in range(1, len(ids) + 1):
            if supervised[count - 1] != supervised[0] or ids[count - 1] in self.special:
                break
            text = self.tokenizer.decode(ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if text and "\ufffd" not in text:
                token = self.tokenizer.convert_ids_to_tokens(ids[0])
                dropped = token.startswith("▁") and not text.startswith(" ")  # SentencePiece drops a first space
                return " " * dropped + self._printable(text), count
        return self._bytes(ids[0]), 1

    def _bytes(self, index: int) -> str:
        token = self.tokenizer.convert_ids_to_tokens(index)
        if token is None:
            return f"<no token {index}>"
        if re.fullmatch("<0x[0-9A-F]{2}>", token) is None and all(character in self.bytes for character in token):
            return "".join(f"\\x{self.bytes[character]:02x}" for character in token)
        return self._printable(token)

    def _printable(self, text: str) -> str:
        shown = (c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text)
        return "".join(shown).replace("\n", f"{self.signs.newline}\n")


def about_image(number: int, placed: PlacedImage) -> str:
    image = placed.image
    name = screen.plain(Path(image.name).name)
    return f"image {number}: {name}, {image.width:,} x {image.height:,} pixels, {counted(placed.tokens, 'tokens')}"


def gallery(rows: Sequence[ShownRow], plan: Plan, processor: ImageProcessor) -> str:
    """HTML with the images of the samples as the model sees them. Raises DataError if a file has changed."""
    figures = []
    for document in (document for row in rows for sample in row.samples for document in sample):
        table = plan.tables[document.piece.source]
        for number, placed in enumerate(document.images(plan), 1):
            out = io.BytesIO()
            try:
                seen = processor.seen(decode(placed.image.read()))
            except RowError as reason:
                raise DataError(f"{table.name}: {placed.image.name}: {reason}.") from None
            seen.save(out, "PNG")
            caption = f"document {document.piece.document + 1:,} of {table.name}, {about_image(number, placed)}"
            caption = escape(f"{caption}; shown at {seen.width:,} x {seen.height:,}")
            source = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
            figures.append(f'<figure><img src="{source}" alt=""><figcaption>{caption}</figcaption></figure>')
    return "\n".join(figures)


def _heading(plan: Plan, piece: DocumentSlice, positions: list[int]) -> Text:
    table = plan.tables[piece.source]
    total = int(table.offsets[piece.document + 1] - table.offsets[piece.document])
    title = f"document {piece.document + 1:,} of {screen.plain(table.name)}"
    if piece.length < total:
        title += f", its tokens {piece.first:,}-{piece.first + piece.length - 1:,} of {total:,}"
    if table.labels is not None:
        label = float(table.labels[piece.document])
        judged = f", judged {'good' if label else 'bad'}" if table.format.answers else f", label {label:g}"
        if math.isnan(label):
            judged = ", the mismatched answer of objective=kto" if len(table.format.answers) == 1 else ""
        title += f", group {piece.group}{judged}"
    return Text(f"{title}: positions {positions[0]:,}-{positions[-1]:,}", NOTE)
