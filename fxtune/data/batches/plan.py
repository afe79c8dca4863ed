"""Decides which documents each step learns from, as a pure function of (tables, settings, step).

Step s takes rows s x global_batch_size to (s + 1) x global_batch_size of the endless sequence of rows (epochs.py). In
a run with stages a step takes the number of rows of its stage (stages.py). If an epoch ends inside a step, the step
goes on with rows of the next epoch. Only the last step of a run can have fewer rows. There is no iterator state, so a
run resumes at any step. Batches are read from memory maps when they are requested.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import numpy as np

from fxtune.data.batches.batch import Batch, BatchSpec, build_batch
from fxtune.data.batches.batch_images import NO_IMAGES, ImageSizes, image_sizes
from fxtune.data.batches.epochs import Epoch, EpochStream
from fxtune.data.batches.growing_rows import GrowingRows
from fxtune.data.batches.layout import BatchSizes, Layout, lay_out
from fxtune.data.batches.overlap import notes_on_copies
from fxtune.data.batches.segments import SegmentCounts, Spans
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError
from fxtune.system.terminal.units import counted

KEY_COUNTS = 8
"""If documents share tokens, batch_spec() makes room for keys in portions of 1/KEY_COUNTS of all positions."""


class DocumentSlice(NamedTuple):
    """A document in a row, or the part of it that the row holds."""

    source: int
    """Index of the table."""
    document: int
    first: int
    length: int
    group: int
    """Index of the document's group in the micro-batch."""
    shared: int = 0
    """The number of tokens before `first` that the row has only in the group's first document (shared_prompts.py)."""


class Plan:
    """The batches of a training run or an evaluation."""

    def __init__(self, stream: EpochStream, sizes: BatchSizes, layout: Optional[Layout] = None) -> None:
        """`layout`: from a plan with the same stream, global batch and length of the run."""
        self.stream = stream
        self.sizes = sizes
        if sizes.micro_batch_size % (each := stream.rows_of_group):
            raise ConfigError(
                f"train.micro_batch_size={sizes.micro_batch_size}: without packing a group of {each} documents takes "
                f"{each} rows of one micro-batch. Set a multiple of {each}, or data.packing=true."
            )
        if sizes.pieces > 1 and stream.is_grouped:
            raise ConfigError(
                "parallel.context divides rows over ranks, and each rank needs whole documents of a group. Set "
                "parallel.context=1."
            )
        self.layout = layout or lay_out(stream, sizes)
        self.row_sequence, self.step_rows, planned = self.layout.rows, self.layout.step_rows, self.layout.count
        last = None if sizes.last is None else self.step_rows.first_row(sizes.last - sizes.dropped)
        self._row_count = planned if last is None else min(planned, last)
        self.steps = self.step_rows.steps(self._row_count) + sizes.dropped

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.stream, self.sizes)

    @property
    def tables(self) -> tuple[TokenTable, ...]:
        return self.stream.tables

    @property
    def fingerprint(self) -> str:
        """Equal for two plans if the steps that both have learn from the same documents. The plans may differ in the
        length of the run, the size of micro-batches and the padding."""
        sizes = self.sizes
        # Lengths are left out if all rows have one length, so that the fingerprints of earlier versions stay valid.
        starts = tuple(tuple(start) if self.step_rows.has_lengths else start[:3] for start in self.step_rows.starts)
        stages = f" {starts}" if len(sizes.stages) > 1 else ""
        return hashlib.sha256(f"{self.stream.fingerprint} {sizes.global_batch_size}{stages}".encode()).hexdigest()[:32]

    def with_micro_batch_size(self, rows: int) -> Plan:
        """The same steps, in micro-batches of `rows` rows."""
        return self._changed(micro_batch_size=rows)

    def for_rank(self, rank: int, ranks: int) -> Plan:
        """The same steps, with the micro-batches of one of `ranks` ranks."""
        return self._changed(rank=rank, ranks=ranks)

    def with_row_piece(self, piece: int, pieces: int) -> Plan:
        """The same steps and micro-batches, with piece number `piece` of the `pieces` that each row is cut into."""
        return self._changed(piece=piece, pieces=pieces)

    def until(self, last: int, dropped: int = 0) -> Plan:
        """The plan up to step `last`, in which step s has the rows of this plan's step s - dropped."""
        if (last, dropped) == (self.steps, self.sizes.dropped):
            return self
        return self._changed(last=last, dropped=dropped)

    def _changed(self, **sizes: Any) -> Plan:
        """The same rows in the same steps, with some other `sizes`."""
        return Plan(self.stream, replace(self.sizes, **sizes), self.layout)

    def of_step(self, step: int) -> Plan:
        """The plan that has the batches of `step`: this plan, unless each step makes its data shortly before."""
        return self

    def dealt_out(self, rank: int, ranks: int) -> Plan:
        """Deal out a plan of one micro-batch a step (an evaluation). A step then has a micro-batch for each rank."""
        each = self.sizes.global_batch_size
        return Plan(self.stream, replace(self.sizes, global_batch_size=each * ranks, rank=rank, ranks=ranks))

    @property
    def documents_per_step(self) -> float:
        """The mean number of documents, or pieces of long documents, in a step of global_batch_size rows. It is taken
        over the first epoch, so it does not depend on the run's length."""
        epoch = self.stream.epoch(0)
        documents = self.stream.document_counts(epoch.segments).sum()
        return float(documents) / (len(epoch) * self.stream.rows_of_group) * self.sizes.global_batch_size

    def stage(self, step: int) -> int:
        return self.step_rows.stage(step - self.sizes.dropped)

    @property
    def full_steps(self) -> int:
        """The number of steps that have all of their rows: all steps, or all except the last one."""
        return self.steps - (self.step_rows.first_row(self.steps - self.sizes.dropped) > self._row_count)

    @property
    def last_stage(self) -> int:
        """The first step of the last stage that the run reaches."""
        return self.step_rows.starts[self.stage(self.steps - 1)].step + self.sizes.dropped

    def max_row_length(self, step: int) -> int:
        """Tokens of the longest row of a step, padding included."""
        return max(self.batch_spec(step, micro).width for micro in range(self.micro_batches(step)))

    def micro_batches(self, step: int) -> int:
        """The number of micro-batches that `step` has on each rank. It is the same on all ranks, because they take
        part in the same collectives."""
        return -(-self._all_micro_batches(step) // self.sizes.ranks)

    def counted_micro_batches(self, step: int) -> int:
        """The number of this rank's micro-batches that count. If the micro-batches of a step cannot be dealt out
        evenly, some ranks repeat a micro-batch of another rank. The repeated micro-batch is left out of every sum."""
        return len(range(self.sizes.rank, self._all_micro_batches(step), self.sizes.ranks))

    def _all_micro_batches(self, step: int) -> int:
        return -(-self.rows(step) // self.micro_rows(step))

    def micro_rows(self, step: int) -> int:
        """Rows of a micro-batch of the step: n times micro_batch_size if the step's rows are n times shorter than the
        longest rows."""
        longest, length = self.stream.settings.sequence_length, self.step_rows.length(step - self.sizes.dropped)
        return self.sizes.micro_batch_size * (longest // length)

    def rows(self, step: int) -> int:
        """Rows of the step, in all its micro-batches."""
        first, last = self._row_range(step)
        return (last - first) * self.stream.rows_of_group

    def groups(self, step: int) -> int:
        """Groups of the step on all ranks. In supervised text each document, or piece of a split document, is a
        group."""
        return len(self._rows(step)[0])

    def supervised(self, step: int) -> int:
        """Targets of the step, in all its micro-batches."""
        return int(self.row_sequence.segments.supervised[self._rows(step)[0]].sum())

    def tokens(self, step: int) -> int:
        """Tokens of the step's documents. A prompt that a row has once for two answers counts twice."""
        return int(self.lengths(step).sum())

    def lengths(self, step: int) -> np.ndarray:
        """Tokens of each document, or piece of a document, of a step, int64 [documents]."""
        spans = self.row_sequence.spans(self._rows(step)[0])
        return spans.length + spans.shared

    def shared(self, step: int) -> np.ndarray:
        """For each document of a step, the number of tokens that are computed in another document, int64."""
        return self.row_sequence.spans(self._rows(step)[0]).shared

    def images(self, step: int) -> ImageSizes:
        """The images of a step, on all ranks."""
        if all(table.images is None for table in self.tables):
            return NO_IMAGES
        return image_sizes(self.tables, self.row_sequence.spans(self._rows(step)[0]))

    def epoch_images(self) -> tuple[ImageSizes, int]:
        """The images of the first epoch, and the number of image features in the row with the most features."""
        if all(table.images is None for table in self.tables):
            return NO_IMAGES, 0
        epoch = self.row_sequence.epoch(0)
        found = self.row_sequence.spans(epoch.segments)
        images = image_sizes(self.tables, found)
        rows = np.arange(len(found))  # without packing each document has a row
        if self.stream.settings.packing:
            rows = np.repeat(np.arange(len(epoch)), np.diff(epoch.offsets))[found.segment]
        return images, int(np.bincount(rows[images.document], images.features).max(initial=0))

    def epoch(self, steps: int) -> float:
        """The number of epochs that `steps` steps take. A part of an epoch counts as a fraction."""
        done = self.step_rows.first_row(steps - self.sizes.dropped)
        epoch, row = self.row_sequence.locate(min(done, self._row_count))
        return epoch + self.row_sequence.share(epoch, row) if row else float(epoch)

    def documents(self, step: int, micro: int) -> list[tuple[int, int]]:
        """(table, document) of each document of a micro-batch, row by row."""
        return [(piece.source, piece.document) for row in self.contents(step, micro) for piece in row]

    def contents(self, step: int, micro: int) -> list[list[DocumentSlice]]:
        """The document slices in each row of a micro-batch."""
        found, offsets = self._documents(step, micro)
        columns = [
            column.tolist()
            for column in (found.source, found.document, found.start, found.length, found.segment, found.shared)
        ]
        slices = [
            DocumentSlice(source, document, start - int(self.tables[source].offsets[document]), *rest)
            for source, document, start, *rest in zip(*columns, strict=True)
        ]
        return [slices[a:b] for a, b in pairwise(offsets.tolist())]

    def batch_spec(self, step: int, micro: int) -> BatchSpec:
        """The description of a micro-batch, from which build_batch() makes the batch in any process."""
        found, offsets = self._documents(step, micro)
        length, stage = found.length, self.stage(step)
        packing = self.stream.settings.packing
        # There are slots as if all rows were as full as the fullest row of the stage's first epoch. Few batches need
        # more slots.
        fullest = self.layout.fullest[stage] + 1
        width = np.asarray(self.step_rows.starts[stage].length) if packing else length.max()
        # The room for keys follows the same rule, in portions of an eighth of the positions.
        positions = int(width) * (len(offsets) - 1)
        shared = max(self.layout.most_shared[stage] * (len(offsets) - 1), int(found.shared.sum()))
        portion = -(-positions // KEY_COUNTS)
        group = label = None
        if self.stream.is_grouped:
            group, label = found.segment, self.stream.labels(found)
        return BatchSpec(
            found.source,
            found.start,
            length,
            offsets,
            int(self._padded_length(width)),
            packing,
            self.sizes.pad_id,
            slots=1 << (max(fullest * self.micro_rows(step), len(found) + len(offsets) - 1) - 1).bit_length(),
            piece=self.sizes.piece,
            pieces=self.sizes.pieces,
            group=group,
            label=label,
            shared=None if self.stream.shared is None else found.shared,
            keys=positions + -(-shared // portion) * portion,
            most=self.stream.most_documents,
        )

    def batch(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of step `step`. Raises IndexError outside the run."""
        return build_batch(self.tables, self.batch_spec(step, micro))

    def summary(self) -> dict[str, Any]:
        """Figures of the first epoch, printed and recorded. Shares are from 0 to 1."""
        epoch, of = self.row_sequence.epoch(0), self.row_sequence.segments
        source, computed, supervised = (
            column[epoch.segments] for column in (self.row_sequence.source, of.length, of.supervised)
        )
        length = computed + self.row_sequence.shared_counts(epoch.segments)
        tokens, targets = int(length.sum()), int(supervised.sum())
        sources = []
        for at, (table, counts) in enumerate(zip(self.tables, self.stream.counts, strict=True)):
            own = source == at
            learned = int(supervised[own].sum())
            sources.append(
                dict(
                    name=table.name,
                    segments=int(own.sum()),
                    tokens=int(length[own].sum()),
                    supervised_tokens=learned,
                    share=learned / max(targets, 1),
                    repeats=learned / max(self.stream.supply[at], 1),
                    **asdict(counts),
                )
            )
        totals = {name: sum(source[name] for source in sources) for name in SegmentCounts.__dataclass_fields__}
        return dict(
            rows=len(epoch) * self.stream.rows_of_group,
            segments=len(length),
            tokens=tokens,
            computed_tokens=int(computed.sum()),
            supervised_tokens=targets,
            supervised_share=targets / tokens,
            padding_share=1 - int(computed.sum()) / self._padded_tokens(epoch),
            steps_per_epoch=(
                float(self.step_rows.steps(len(epoch)))
                if self.step_rows.has_lengths
                else len(epoch) * self.stream.rows_of_group / self.sizes.global_batch_size
            ),
            steps=self.steps,
            epochs=self.epoch(self.steps),
            **totals,
            sources=sources,
            mix=self._mix_summary(epoch),
        )

    def _mix_summary(self, epoch: Epoch) -> Optional[dict[str, Any]]:
        """Figures of data.mix in an epoch; None without a mix. `lowest` and `highest`: the share in a single step."""
        mix, of = self.stream.settings.mix, self.stream.segments
        if mix is None:
            return None
        step = self.sizes.global_batch_size
        long, tokens = (
            np.add.reduceat(part, np.arange(0, len(epoch), step)) for part in self.stream.row_tokens(epoch)
        )
        shares = (long / tokens)[: max(len(epoch) // step, 1)]  # the shares of full steps
        kinds = {}
        for kind, members in (("long", self.stream.long), ("short", ~self.stream.long)):
            drawn = int(of.length[epoch.segments[members[epoch.segments]]].sum())
            supply = int(of.length[members].sum())
            kinds[kind] = dict(segments=int(members.sum()), tokens=supply, repeats=drawn / supply)
        return dict(
            asked=mix.long_share,
            threshold=mix.threshold,
            share=float(long.sum() / tokens.sum()),
            lowest=float(shares.min()),
            highest=float(shares.max()),
            **kinds,
        )

    def notes(self) -> list[str]:
        """A sentence for each change that was made to the documents of a source."""
        notes = []
        longest = self.stream.settings.sequence_length
        over = f"longer than {longest:,} tokens"
        for table, counts in zip(self.tables, self.stream.counts, strict=True):
            lost = f"{counts.lost_tokens:,} tokens left out"
            parts = counts.pieces if counts.pieces > max(counts.split - counts.dropped, 1) else 0  # 0: only cut
            split = f"documents {over} were split into {parts:,} pieces"
            cut = f"documents {over} were truncated"
            dropped = f"{over} were dropped, {lost}"
            if table.format.answers:
                cut = f"{table.format.noun} {over} lost the beginning of their prompts (data.on_long=truncate)"
                if table.split.dropped:
                    what = "answers alone are" if table.by_row.images is None else "answers, with the images, are"
                    dropped = f"were left out, because the {what} too long. Raise data.sequence_length"
            elif table.split.chats and not table.format.as_tokenized:
                split += " at their turns, each with its system prompt"
                cut = f"{'of these' if parts else 'documents'} were cut, because an answer with its question is {over}"
                lengths = np.diff((table.whole or table).offsets)
                lost = f"{counts.lost_tokens:,} of {int(lengths[lengths > longest].sum()):,} tokens left out"
                lost += f" ({table.split.lost_supervised:,} supervised). Raise data.sequence_length to keep them"
                dropped = f"are not used, because the answer begins behind the first {longest:,} tokens"
                dropped += f", {lost}" * (not counts.truncated)
            for count, fate in (
                (counts.split * bool(parts), f"{split}."),
                (counts.truncated, f"{cut}, {lost}."),
                (counts.dropped, f"{table.format.noun} {dropped}."),
                (
                    counts.without_targets,
                    f"{'groups' if table.is_grouped else 'documents or pieces'} had nothing to learn (no supervised "
                    "token after the first) and were left out.",
                ),
                (table.split.repeated_images, "images are repeated in later pieces of their chats."),
                (counts.overlapping, f"{table.format.noun} are held out as well, and were left out of training."),
            ):
                if count:
                    notes.append(f"{table.name}: {counted(count, fate)}")
        if self.stream.shared is not None:
            tokens, computed = (self.summary()[name] for name in ("tokens", "computed_tokens"))
            notes.append(
                f"Prompts are computed once for both answers of a pair, which saves {1 - computed / tokens:.1%} of "
                f"the {tokens:,} tokens of an epoch (data.share_prompts)."
            )
        notes += notes_on_copies(self.tables, self.stream.groups())
        if isinstance(self.row_sequence, GrowingRows) and (count := self.row_sequence.cut_documents(0)):
            notes.append(
                f"data.length_schedule: in the first epoch {count:,} documents are cut into shorter rows, because "
                "those that fit a row whole do not fill the steps. Each supervised token is learned once."
            )
        notes += self._weight_notes()
        if mix := self._mix_summary(self.stream.epoch(0)):
            long, short = mix["long"], mix["short"]
            notes.append(
                f"{mix['share']:.1%} of the tokens are in documents of more than {mix['threshold']:,} "
                f"({mix['lowest']:.0%} to {mix['highest']:.0%} in a step, {mix['asked']:.1%} requested): an epoch "
                f"has each of these {long['segments']:,} {long['repeats']:.2f} times, each of the "
                f"{short['segments']:,} shorter ones {short['repeats']:.2f} times."
            )
        return notes

    def _weight_notes(self) -> list[str]:
        """A sentence on how often an epoch has each source's rows, if weights change this."""
        repeats = [(source["name"], source["repeats"]) for source in self.summary()["sources"]]
        if self.stream.settings.weights is None or all(0.9 < times < 1.1 for _, times in repeats):
            return []
        parts = [f"{name} {times:.3g} times" if times >= 1 else f"{times:.0%} of {name}" for name, times in repeats]
        return [
            f"By the weights of data.sources, one epoch sees {', '.join(parts[:-1])} and {parts[-1]}. Without weights "
            "it sees each row once."
        ]

    def _row_range(self, step: int) -> tuple[int, int]:
        if not self.sizes.dropped <= step < self.steps:
            raise IndexError(f"step {step} of a plan of {self.steps} steps")
        step -= self.sizes.dropped
        return self.step_rows.first_row(step), min(self.step_rows.first_row(step + 1), self._row_count)

    def _rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(the segments of a step's rows, the offsets of rows in these segments [rows + 1])."""
        segments, offsets = self.row_sequence.rows(*self._row_range(step))
        if not self.stream.settings.packing:
            # The longest come first: rows of similar length need little padding, and a step that needs too much memory
            # fails at its start.
            segments = segments[np.argsort(-self._longest_documents(segments), kind="stable")]
        return segments, offsets

    def _longest_documents(self, segments: np.ndarray) -> np.ndarray:
        """Tokens of the longest document of each segment, int64 [segments]."""
        if self.stream.rows_of_group == 1:
            return self.row_sequence.segments.length[segments]
        return self.row_sequence.spans(segments).length.reshape(-1, self.stream.rows_of_group).max(axis=1)

    def _documents(self, step: int, micro: int) -> tuple[Spans, np.ndarray]:
        """(the documents of a micro-batch's rows, the offsets of rows in these documents [rows + 1])."""
        segments, offsets = self._rows(step)
        if not 0 <= micro < self.micro_batches(step):
            raise IndexError(f"micro-batch {micro} of a step of {self.micro_batches(step)}")
        size = self.micro_rows(step) // self.stream.rows_of_group  # without packing a group counts as one row
        micro = min(micro * self.sizes.ranks + self.sizes.rank, self._all_micro_batches(step) - 1)
        own = offsets[micro * size : (micro + 1) * size + 1]
        found = self.row_sequence.spans(segments[own[0] : own[-1]])
        if not self.stream.settings.packing:
            return found, np.arange(len(found) + 1)
        return found, np.searchsorted(found.segment, own - own[0])

    def _padded_length(self, longest: np.ndarray) -> np.ndarray:
        """The row length of a micro-batch whose longest document has `longest` tokens; elementwise."""
        lengths, pieces = self.sizes.row_lengths, self.sizes.pieces
        padded = np.asarray(lengths)[np.searchsorted(lengths, longest)] if lengths else longest
        return -(-padded // pieces) * pieces

    def _padded_tokens(self, epoch: Epoch) -> int:
        """The tokens of an epoch's rows with padding, as if its first row began a step."""
        if self.stream.settings.packing:
            return self.step_rows.tokens(len(epoch))
        total, all_lengths, each = 0, self._longest_documents(epoch.segments), self.stream.rows_of_group
        for stage, start in enumerate(self.step_rows.starts):
            step, micro = start.rows, self.micro_rows(start.step + self.sizes.dropped) // each
            length = all_lengths[start.row : self.step_rows.end(stage)]
            steps = np.pad(length, (0, -len(length) % step)).reshape(-1, step)
            micros = -np.sort(-steps, axis=1).reshape(-1, micro)
            total += int((self._padded_length(micros.max(axis=1)) * (micros > 0).sum(axis=1)).sum()) * each
        return total
