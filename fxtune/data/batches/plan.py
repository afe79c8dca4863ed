"""Which documents each step learns from: a pure function of (tables, settings, step).

Of the endless stream of rows (stream.py) step s takes rows s x global_batch_size to (s + 1) x global_batch_size: where
an epoch ends inside a step the next one begins there, and only a run's last step can be short. Nothing iterates, so a
run resumes at any step by asking for it. Batches are cut from memory maps when they are asked for.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import numpy as np

from fxtune.data.batches.batch import Batch, BatchSpec, build_batch
from fxtune.data.batches.epochs import Epoch, EpochStream
from fxtune.data.batches.segments import Cut
from fxtune.data.tokenized.tokenize import TokenTable


@dataclass(frozen=True)
class BatchSizes:
    """How the stream is cut into steps and micro-batches."""

    micro_batch_size: int
    global_batch_size: int
    max_steps: Optional[int] = None
    epochs: Optional[float] = None
    row_lengths: tuple[int, ...] = ()
    """As `row_lengths(data)` gives them."""
    pad_id: int = 0


class DocumentSlice(NamedTuple):
    """Where a segment is from, and which of its document's tokens it holds."""

    source: int
    """Index of the table."""
    document: int
    first: int
    length: int


class Plan:
    """The batches of a run or of an evaluation."""

    def __init__(self, stream: EpochStream, sizes: BatchSizes) -> None:
        self.stream = stream
        self.sizes = sizes
        self._stop = self._rows_in_all()
        self.steps = -(-self._stop // sizes.global_batch_size)
        # Each row of the first epoch as full of documents as the fullest, padding being one: a bound for nearly all of them.
        fullest = int(np.diff(stream.epoch(0).offsets).max()) + 1 if stream.settings.packing else 2
        self._slots = _power_of_two(fullest * sizes.micro_batch_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.stream, self.sizes)

    @property
    def tables(self) -> tuple[TokenTable, ...]:
        return self.stream.tables

    @property
    def fingerprint(self) -> str:
        """Equal for two plans whose step s learns from the same documents, for each s that both have.

        Not part of it: the length of the run, how a step is cut into micro-batches, and how rows are padded.
        """
        return hashlib.sha256(f"{self.stream.fingerprint} {self.sizes.global_batch_size}".encode()).hexdigest()[:32]

    def with_micro_batch_size(self, rows: int) -> Plan:
        """The same steps, in micro-batches of `rows` rows."""
        return Plan(self.stream, replace(self.sizes, micro_batch_size=rows))

    def max_row_length(self, step: int) -> int:
        """Tokens of the longest row of a step, padding included."""
        return int(max(self.batch_spec(step, micro).width for micro in range(self.micro_batches(step))))

    def micro_batches(self, step: int) -> int:
        """How many micro-batches `step` has; only the last step of a run may have fewer than the others."""
        first, last = self._range(step)
        return -(-(last - first) // self.sizes.micro_batch_size)

    def supervised(self, step: int) -> int:
        """Targets of the whole step, over all its micro-batches."""
        return int(self.stream.segments.supervised[self._rows(step)[0]].sum())

    def tokens(self, step: int) -> int:
        """Tokens of the whole step, padding not counted."""
        return int(self.lengths(step).sum())

    def lengths(self, step: int) -> np.ndarray:
        """Tokens of each segment of a step, int64 [segments]."""
        return self.stream.segments.length[self._rows(step)[0]]

    def epoch(self, steps: int) -> float:
        """How many epochs have been seen when `steps` steps are done."""
        row = min(steps * self.sizes.global_batch_size, self._stop)
        epoch, within = self.stream.locate(row)
        return epoch + within / len(self.stream.epoch(epoch)) if within else float(epoch)

    def documents(self, step: int, micro: int) -> list[tuple[int, int]]:
        """(table, document) of each segment of a micro-batch, row by row."""
        return [(piece.source, piece.document) for row in self.contents(step, micro) for piece in row]

    def contents(self, step: int, micro: int) -> list[list[DocumentSlice]]:
        """What is in each row of a micro-batch."""
        segments, offsets = self._micro(step, micro)
        of = self.stream.segments
        columns = [column[segments].tolist() for column in (self.stream.source, of.document, of.start, of.length)]
        pieces = [
            DocumentSlice(source, document, start - int(self.tables[source].offsets[document]), length)
            for source, document, start, length in zip(*columns, strict=True)
        ]
        return [pieces[a:b] for a, b in pairwise(offsets.tolist())]

    def batch_spec(self, step: int, micro: int) -> BatchSpec:
        """The recipe of a micro-batch: `build_batch(plan.tables, pieces)` makes it, in any process."""
        segments, offsets = self._micro(step, micro)
        length = self.stream.segments.length[segments]
        return BatchSpec(
            self.stream.source[segments],
            self.stream.segments.start[segments],
            length,
            offsets,
            int(self._padded(length.max())),
            self.stream.settings.packing,
            self.sizes.pad_id,
            slots=max(self._slots, _power_of_two(len(segments) + len(offsets) - 1)),
        )

    def batch(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of step `step`. IndexError outside the run."""
        return build_batch(self.tables, self.batch_spec(step, micro))

    def summary(self) -> dict[str, Any]:
        """Figures of the first epoch, for people and for the run's record. Shares are 0..1."""
        epoch, of = self.stream.epoch(0), self.stream.segments
        length, supervised = of.length[epoch.segments], of.supervised[epoch.segments]
        source = self.stream.source[epoch.segments]
        tokens, targets = int(length.sum()), int(supervised.sum())
        sources = []
        for at, (table, counts) in enumerate(zip(self.tables, self.stream.cuts, strict=True)):
            mine = source == at
            seen = int(supervised[mine].sum())
            sources.append(
                dict(
                    name=table.name,
                    segments=int(mine.sum()),
                    tokens=int(length[mine].sum()),
                    supervised_tokens=seen,
                    share=seen / targets,
                    repeats=seen / max(self.stream.supply[at], 1),
                    **vars(counts),
                )
            )
        totals = {name: sum(getattr(counts, name) for counts in self.stream.cuts) for name in Cut.__dataclass_fields__}
        return dict(
            rows=len(epoch),
            segments=len(length),
            tokens=tokens,
            supervised_tokens=targets,
            supervised_share=targets / tokens,
            padding_share=1 - tokens / self._room(epoch),
            steps_per_epoch=len(epoch) / self.sizes.global_batch_size,
            steps=self.steps,
            epochs=self.epoch(self.steps),
            **totals,
            sources=sources,
            mix=self._mixed(epoch),
        )

    def _mixed(self, epoch: Epoch) -> Optional[dict[str, Any]]:
        """What data.mix came to in an epoch; None: there is none.

        `share`: of the tokens in long segments; `lowest` and `highest`: that of a step, the epoch beginning with one; of each
        kind the segments there are, their tokens, and how often an epoch has each.
        """
        mix, of = self.stream.settings.mix, self.stream.segments
        if mix is None:
            return None
        steps = np.arange(0, len(epoch), self.sizes.global_batch_size)
        long, tokens = (np.add.reduceat(part, steps) for part in self.stream.tokens(epoch))
        of_whole = (long / tokens)[: max(len(epoch) // self.sizes.global_batch_size, 1)]
        kinds = {}
        for kind, members in (("long", self.stream.long), ("short", ~self.stream.long)):
            seen = int(of.length[epoch.segments[members[epoch.segments]]].sum())
            supply = int(of.length[members].sum())
            kinds[kind] = dict(segments=int(members.sum()), tokens=supply, repeats=seen / supply)
        return dict(
            asked=mix.long_share,
            threshold=mix.threshold,
            share=float(long.sum() / tokens.sum()),
            lowest=float(of_whole.min()),
            highest=float(of_whole.max()),
            **kinds,
        )

    def notes(self) -> list[str]:
        """One sentence for each thing that was done to the documents, by source. Empty: nothing was."""
        said = []
        for table, counts in zip(self.tables, self.stream.cuts, strict=True):
            over = f"longer than {self.stream.settings.sequence_length:,} tokens"
            if counts.split:
                said.append(
                    f"{table.name}: {counts.split:,} documents {over} were split into {counts.pieces:,} pieces."
                )
            if counts.truncated:
                said.append(
                    f"{table.name}: {counts.truncated:,} documents {over} were truncated, "
                    f"{counts.lost_tokens:,} tokens left out."
                )
            if counts.dropped:
                said.append(
                    f"{table.name}: {counts.dropped:,} documents {over} were dropped, "
                    f"{counts.lost_tokens:,} tokens left out."
                )
            if counts.without_targets:
                said.append(
                    f"{table.name}: {counts.without_targets:,} documents or pieces had nothing to learn "
                    "(no supervised token after the first) and were left out."
                )
        if mixed := self._mixed(self.stream.epoch(0)):
            said.append(
                f"{mixed['share']:.1%} of the tokens are in documents of more than {mixed['threshold']:,} "
                f"({mixed['lowest']:.0%} to {mixed['highest']:.0%} in a step, {mixed['asked']:.1%} asked for): in an "
                f"epoch each of these {mixed['long']['segments']:,} comes {mixed['long']['repeats']:.2f} times, each of "
                f"the {mixed['short']['segments']:,} shorter ones {mixed['short']['repeats']:.2f} times."
            )
        return said

    def _rows_in_all(self) -> int:
        """Rows of the whole run."""
        by_steps = math.inf if self.sizes.max_steps is None else self.sizes.max_steps * self.sizes.global_batch_size
        epochs = self.sizes.epochs
        if epochs is None:
            if by_steps != math.inf:
                return int(by_steps)
            epochs = 1.0
        whole = int(epochs)
        rows = number = 0
        while number < whole and rows < by_steps:  # not to the last epoch at once: making weighted ones takes time
            rows, number = self.stream.end(number), number + 1
        if epochs > whole and rows < by_steps:
            rows += round((epochs - whole) * len(self.stream.epoch(whole)))
        return int(min(max(rows, 1), by_steps))

    def _range(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of a plan of {self.steps} steps")
        first = step * self.sizes.global_batch_size
        return first, min(first + self.sizes.global_batch_size, self._stop)

    def _rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a step: their segments, and the offsets [rows + 1] into those."""
        segments, offsets = self.stream.rows(*self._range(step))
        if not self.stream.settings.packing:
            # Longest first: neighbours pad little, and a step that needs too much memory fails at once.
            segments = segments[np.argsort(-self.stream.segments.length[segments], kind="stable")]
        return segments, offsets

    def _micro(self, step: int, micro: int) -> tuple[np.ndarray, np.ndarray]:
        segments, offsets = self._rows(step)
        if not 0 <= micro < self.micro_batches(step):
            raise IndexError(f"micro-batch {micro} of a step of {self.micro_batches(step)}")
        mine = offsets[micro * self.sizes.micro_batch_size : (micro + 1) * self.sizes.micro_batch_size + 1]
        return segments[mine[0] : mine[-1]], mine - mine[0]

    def _padded(self, longest: np.ndarray) -> np.ndarray:
        """The row length for a micro-batch whose longest document has `longest` tokens; elementwise."""
        lengths = self.sizes.row_lengths
        return np.asarray(lengths)[np.searchsorted(lengths, longest)] if lengths else longest

    def _room(self, epoch: Epoch) -> int:
        """Tokens that an epoch's rows have room for, were the epoch to begin with a step."""
        if self.stream.settings.packing:
            return len(epoch) * self.stream.settings.sequence_length
        micro, step = self.sizes.micro_batch_size, self.sizes.global_batch_size
        length = self.stream.segments.length[epoch.segments]
        steps = np.pad(length, (0, -len(length) % step)).reshape(-1, step)
        micros = -np.sort(-steps, axis=1).reshape(-1, micro)
        return int((self._padded(micros.max(axis=1)) * (micros > 0).sum(axis=1)).sum())


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
