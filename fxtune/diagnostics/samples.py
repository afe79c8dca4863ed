"""The first samples of a run as data: documents of the first batches, with their tokens, masks and images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.data.batches.plan import DocumentSlice, Plan
from fxtune.data.images.placed import PlacedImage
from fxtune.system.terminal.units import counted

SAMPLES = 6
"""Number of samples in all. A sample is a document, or the two answers of a pair."""
SAMPLES_PER_ROW = 3


class ShownDocument(NamedTuple):
    """A document of a row, as a batch holds it."""

    piece: DocumentSlice
    ids: list[int]
    supervised: list[bool]
    positions: list[int]

    def images(self, plan: Plan) -> list[PlacedImage]:
        table = plan.tables[self.piece.source]
        end = int(table.offsets[self.piece.document]) + self.piece.first + self.piece.length
        return table.placed_images(end - len(self.ids), len(self.ids))

    def after(self, first: ShownDocument) -> ShownDocument:
        """The whole document, if it shares a prompt with `first`: a row has the shared tokens only in `first`."""
        count = self.piece.shared
        return ShownDocument(
            self.piece,
            first.ids[:count] + self.ids,
            first.supervised[:count] + self.supervised,
            first.positions[:count] + self.positions,
        )


class ShownRow(NamedTuple):
    """A row of a batch. Without packing, the two rows of a pair are one ShownRow."""

    title: str
    samples: list[list[ShownDocument]]
    """The shown samples. Each has the two documents of a pair, or one document."""
    more: int
    """Number of documents that are not shown."""
    pads: int


def shown_rows(plan: Plan) -> Iterator[ShownRow]:
    """Yield the first rows of the first step, with up to SAMPLES samples in all."""
    left, row_number = SAMPLES, 0
    for micro in range(plan.micro_batches(0)):
        batch, contents = plan.batch(0, micro), plan.contents(0, micro)
        width, end = batch.input_ids.shape[1], 0
        while end < len(contents) and left:
            begin, end = end, end + 1
            while end < len(contents) and _is_pair(plan, contents[begin][:1] + contents[end][:1]):
                end += 1
            documents = list[ShownDocument]()
            for row in range(begin, end):
                at = 0
                for piece in contents[row]:
                    span = slice(at, at + piece.length)
                    targets = batch.targets[row, span][:-1] != IGNORE_INDEX
                    ids, positions = (tensor[row, span].tolist() for tensor in (batch.input_ids, batch.position_ids))
                    shown = ShownDocument(piece, ids, [False, *targets.tolist()], positions)
                    documents.append(shown.after(documents[-1]) if piece.shared else shown)
                    at += piece.length
            used, slots = sum(document.piece.length for document in documents), (end - begin) * width
            numbers = (
                f"row {row_number}" if end == begin + 1 else f"rows {row_number} to {row_number + end - begin - 1}"
            )
            title = f"step 0, {numbers}: {counted(len(documents), 'documents')}, {used:,} tokens of {slots:,}"
            samples: list[list[ShownDocument]] = []
            for document in documents:
                if samples and _is_pair(plan, [samples[-1][0].piece, document.piece]):
                    samples[-1].append(document)
                else:
                    samples.append([document])
            kept = samples[: min(SAMPLES_PER_ROW, left)]
            yield ShownRow(title, kept, len(documents) - sum(map(len, kept)), slots - used)
            left -= len(kept)
            row_number += end - begin


def _is_pair(plan: Plan, pieces: Sequence[DocumentSlice]) -> bool:
    """Whether two documents are two answers to one prompt."""
    return (
        len(pieces) == 2
        and pieces[0].group == pieces[1].group
        and len(plan.tables[pieces[0].source].format.answers) == 2
    )
