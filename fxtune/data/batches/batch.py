"""A micro-batch in the form that the model takes, read from the memory maps of token tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fxtune.data.batches.batch_images import BatchImages
from fxtune.data.batches.shared_prompts import keys_of
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError

IGNORE_INDEX = -100
"""Marks positions without a target: the ignore_index of `torch.nn.functional.cross_entropy` and of Hugging Face."""
TARGET_COUNTS = 16
"""After with_rounded_targets() batches of one shape have at most this many different numbers of targets."""
MIN_TARGETS = 128
"""Rows in one tile of the head's matmul. with_rounded_targets() takes no smaller steps."""
STORED = ("reference", "teacher_ids", "teacher_log_probs", "teacher_tail", "sampled", "advantages")
"""Fields of Batch that a token table stores for each target."""
ON_HOST = {"image_grid_thw", "image_sizes", "batch_num_images"}
"""Tensors of images that stay in host memory: sizes and counts, by which models shape other tensors."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: int64 tensors [rows, length], the bounds of documents for kernels, and counts on the host."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    """`targets[r, t]`: the token after `input_ids[r, t]`, if it belongs to the same document and is supervised;
    otherwise -100."""
    position_ids: torch.Tensor
    """Positions begin at 0 in each document, or continue the prompt that two documents share. The padding of a packed
    row counts as a document. In a row that is not packed positions go on through the padding."""
    cu_seqlens: torch.Tensor
    """int32 [slots + 1]: the position of each document's first token in the flattened [rows x length] tokens of whole
    rows, also if the batch has pieces. Unused slots repeat the total, so that compiled code sees no new shape. A row
    that is not packed is one document, padding included."""
    supervised_at: torch.Tensor
    """int64 [supervised]: the flattened positions that have a target. Only these need logits."""
    labels: torch.Tensor
    """int64 [supervised]: the targets at `supervised_at`; IGNORE_INDEX where with_rounded_targets() added a
    position."""
    tokens: int
    """Tokens that are not padding."""
    pieces: int = 1
    """The number of pieces of equal length that each row is cut into. All tensors except `cu_seqlens` hold one
    piece."""
    filled: torch.Tensor | None = None
    """int64 [rows]: the tokens of each row before its padding. None: there is no padding."""
    group_of: torch.Tensor | None = None
    """int64 [slots]: for each document of `cu_seqlens`, the index of its group in the micro-batch, from 0 on; -1 for
    padding and unused slots. None: each document of the data is a group by itself, without a label."""
    document_labels: torch.Tensor | None = None
    """float32 [slots]: the label of each document of `cu_seqlens`, NaN without one. None if `group_of` is None."""
    reference: torch.Tensor | None = None
    """float32 [supervised]: the log-probability of each target under the reference model, if it is stored."""
    teacher_ids: torch.Tensor | None = None
    """int32 [supervised, k]: the teacher's likeliest tokens in the place of each target, if they are stored."""
    teacher_log_probs: torch.Tensor | None = None
    """float16 [supervised, k]: the log-probabilities of these tokens."""
    teacher_tail: torch.Tensor | None = None
    """float32 [supervised]: the logarithm of the teacher's probability of all other tokens."""
    sampled: torch.Tensor | None = None
    """float32 [supervised]: the log-probability that the sampler gave to each target, if the answers are rollouts."""
    advantages: torch.Tensor | None = None
    """float32 [supervised]: the advantage of each target of rollouts, times the weight of objective.reduction."""
    step_part: torch.Tensor | None = None
    """float32 [slots, numbers]: what Objective.step_parts() has computed for these documents from the whole optimizer
    step, or from all documents of an evaluation. None: the micro-batch stands alone, or needs nothing."""
    images: dict[str, torch.Tensor] | None = None
    """Arguments of the model's forward for all images of the micro-batch, in the order of its documents
    (`pixel_values`, `image_grid_thw`, ...). None: there is no image. Tensors in ON_HOST stay in host memory."""
    rope_positions: torch.Tensor | None = None
    """int64 [3, rows, length]: time, height and width of each token for rotary embeddings, from 0 on in each document
    (M-RoPE). None: the rotary embeddings take `position_ids`."""
    cu_seqlens_k: torch.Tensor | None = None
    """int32 [slots + 1]: `cu_seqlens` for keys and values. They differ if documents also attend to a prompt in another
    document (shared_prompts.py). None: each document attends only to its own tokens."""
    key_index: torch.Tensor | None = None
    """int64 [keys]: the flattened token of each key. Keys after the last bound of `cu_seqlens_k` belong
    to no document."""
    key_copies: torch.Tensor | None = None
    """int64 [n, rows x length]: for each token, the index of its key in its own document, and in each later document
    of its group that attends to the token, or -1 (shared_prompts.py)."""

    def is_token(self) -> torch.Tensor:
        """float32 [rows x length]: 0 for padding, else 1."""
        if self.filled is None:
            return torch.ones(self.input_ids.numel(), device=self.input_ids.device)
        column = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return (column < self.filled[:, None]).flatten().float()

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:
        """`values` [supervised], one for each of `labels`, summed over each document of `cu_seqlens`: [slots]. 0 for a
        document without supervised tokens and for unused slots. `values` must be 0 where the label is IGNORE_INDEX.
        Raises ConfigError if the batch has a piece of rows, because a piece may cut a document."""
        if self.pieces > 1:
            raise ConfigError("parallel.context: this objective needs whole documents. Set it to 1.")
        return values.new_zeros(len(self.cu_seqlens) - 1).index_add(0, self.document_of_target(), values)

    def document_of_target(self) -> torch.Tensor:
        """int64 [supervised]: the document of `cu_seqlens` that has each of `labels`."""
        return torch.searchsorted(self.cu_seqlens[1:].long(), self.supervised_at, right=True)

    def first_tokens(self) -> torch.Tensor:
        """int64 [slots]: the flattened position of each document's first token. The positions of unused slots mean
        nothing."""
        return self.cu_seqlens[:-1].long().clamp(max=self.input_ids.numel() - 1)

    def bounds_without_padding(self) -> torch.Tensor:
        """`cu_seqlens` in which the padding of each row is a document by itself, also if rows are not packed."""
        if self.filled is None or len(self.cu_seqlens) != len(self.input_ids) + 1:
            return self.cu_seqlens
        starts = self.cu_seqlens[:-1]
        return torch.cat([torch.stack([starts, starts + self.filled.int()], 1).flatten(), self.cu_seqlens[-1:]])

    def last_tokens(self) -> torch.Tensor:
        """int64 [slots]: the flattened position of each document's last token before padding. The positions of unused
        slots mean nothing."""
        last = self.cu_seqlens[1:].long() - 1
        if self.filled is None:
            return last
        row = last // self.input_ids.shape[1]
        return torch.minimum(last, row * self.input_ids.shape[1] + self.filled[row] - 1).clamp(min=0)

    @property
    def supervised(self) -> int:
        """The number of supervised tokens, in a batch without the positions that with_rounded_targets() adds."""
        return len(self.labels)

    def with_rounded_targets(self) -> Batch:
        """The same batch with more entries in `supervised_at`: positions without a target, with IGNORE_INDEX in
        `labels`. The number of entries becomes a multiple of 1/TARGET_COUNTS of all positions, or of MIN_TARGETS if
        that is more. On the host only.

        The loss and its gradients stay the same. The head computes some useless rows, but its matmuls and buffers have
        few sizes: freed memory fits the next request, and a recorded CUDA graph serves every batch.
        """
        positions = self.targets.numel()
        step = max(-(-positions // TARGET_COUNTS), MIN_TARGETS)
        missing = min(-(-max(len(self.labels), 1) // step) * step, positions) - len(self.labels)
        spare = (self.targets.flatten() == IGNORE_INDEX).nonzero().flatten()[:missing]
        stored: dict[str, Any] = {name: _with_rows(getattr(self, name), len(spare)) for name in STORED}
        return replace(
            self,
            supervised_at=torch.cat([self.supervised_at, spare]),
            labels=torch.cat([self.labels, torch.full_like(spare, IGNORE_INDEX)]),
            **stored,
        )

    def _with_each_tensor(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        if self.images is not None:
            changed["images"] = {
                name: tensor if name in ON_HOST else change(tensor) for name, tensor in self.images.items()
            }
        return replace(self, **changed)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._with_each_tensor(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._with_each_tensor(torch.Tensor.pin_memory)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` reads these tensors. Another stream wrote them."""

        def record(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)
            return tensor

        self._with_each_tensor(record)


def _with_rows(values: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """`values` with as many further rows of zeros."""
    return None if values is None else torch.cat([values, values.new_zeros(rows, *values.shape[1:])])


@dataclass(frozen=True)
class BatchSpec:
    """A description of a micro-batch, small enough to send to a worker. The arrays are int64, with an entry for each
    document or part of a document."""

    source: np.ndarray
    """Index of the table."""
    start: np.ndarray
    """Position of the first token in the table's `ids`."""
    length: np.ndarray
    offsets: np.ndarray
    """int64 [rows + 1]: row r has the documents offsets[r]:offsets[r + 1]."""
    width: int
    """Tokens in a row, padding included."""
    packed: bool
    pad_id: int
    slots: int
    """`cu_seqlens` of packed rows has room for this many documents. The padding of a row counts as a document. Rows
    that are not packed have one slot each; attention recognizes them by this."""
    piece: int = 0
    pieces: int = 1
    """Each row is cut into `pieces` pieces, and the batch has number `piece` of them. `pieces` divides `width`."""
    group: np.ndarray | None = None
    """Index of each document's group in the micro-batch. None: each document is a group without a label."""
    label: np.ndarray | None = None
    """float32: the label of each document, NaN without one. None if `group` is None."""
    shared: np.ndarray | None = None
    """For each document, the number of tokens before `start` that it shares with the first document of its group.
    None: each document attends only to its own tokens."""
    keys: int = 0
    """The size of `key_index`, if `shared` is not None."""
    most: int = 2
    """The number of documents in the largest group of the plan."""

    def whole(self) -> BatchSpec:
        """The same documents, each with all its tokens, also the shared ones. They may not fit the rows."""
        if self.shared is None:
            return self
        return replace(self, start=self.start - self.shared, length=self.length + self.shared, shared=None)


def build_batch(tables: Sequence[TokenTable], spec: BatchSpec) -> Batch:
    """Copy the documents into rows: one slice a document, all in numpy. Rows are complete before they are cut into
    pieces, so the last token of a piece has a target, and positions go on in the next piece."""
    rows = len(spec.offsets) - 1
    ids = np.full((rows, spec.width), spec.pad_id, np.int64)
    supervised = np.zeros((rows, spec.width), bool)
    begins = np.zeros((rows, spec.width), np.int64)
    filled = np.zeros(rows, np.int64)
    is_first = np.zeros((rows, spec.width), bool)
    first_token = np.zeros(len(spec.start), np.int64)
    shared = np.zeros(len(spec.start), np.int64) if spec.shared is None else spec.shared
    images, moved = BatchImages(tables, spec.pieces), list[tuple[int, int, np.ndarray]]()
    for row in range(rows):
        at = 0
        for document in range(spec.offsets[row], spec.offsets[row + 1]):
            table, start, length = tables[spec.source[document]], spec.start[document], spec.length[document]
            first_token[document] = row * spec.width + at
            ids[row, at : at + length] = table.ids[start : start + length]
            supervised[row, at + 1 : at + length] = table.supervised[start + 1 : start + length]
            begins[row, at], is_first[row, at] = at - shared[document], True
            images.add(table, start, length)
            if (own := images.rope_positions(table, start, length, shared[document])) is not None:
                moved.append((row, at, own))
            at += length
        filled[row] = at
        if spec.packed and at < spec.width:
            begins[row, at], is_first[row, at] = at, True
    targets = np.full_like(ids, IGNORE_INDEX)
    targets[:, :-1] = np.where(supervised[:, 1:], ids[:, 1:], IGNORE_INDEX)
    positions = np.arange(spec.width) - np.maximum.accumulate(begins, axis=1)
    rope_positions = None
    if images.processor is not None and images.processor.rope_positions is not None:
        rope_positions = np.stack([positions] * 3)
        for row, at, own in moved:
            rope_positions[:, row, at : at + own.shape[1]] = own
    starts = np.flatnonzero(is_first)
    cu_seqlens = np.full((spec.slots if spec.packed else rows) + 1, ids.size, np.int32)
    cu_seqlens[: len(starts)] = starts
    group_of = labels = None
    keys = dict[str, np.ndarray]()
    slot, slots = np.searchsorted(starts, first_token), len(cu_seqlens) - 1
    if spec.shared is not None:
        assert spec.group is not None, "documents that share a prompt are a group"
        begins_group = np.diff(spec.group, prepend=-1) != 0
        number = np.arange(len(slot))
        head = np.maximum.accumulate(np.where(begins_group, number, 0))  # the first document of each one's group
        shares, owner, place = by_slot = np.zeros((3, slots), np.int64)
        by_slot[:, slot] = spec.shared, slot[head], number - head
        keys = keys_of(cu_seqlens, shares, owner, place, spec.most, spec.keys)
    if spec.group is not None and spec.label is not None:
        group_of, labels = torch.full((slots,), -1), torch.full((slots,), math.nan)
        group_of[slot], labels[slot] = torch.from_numpy(spec.group), torch.from_numpy(spec.label)
    length = spec.width // spec.pieces
    first = spec.piece * length
    ids, targets, positions = (
        np.ascontiguousarray(columns[:, first : first + length]) for columns in (ids, targets, positions)
    )
    supervised_at = np.flatnonzero(targets != IGNORE_INDEX)
    in_row, column = np.divmod(supervised_at, length)
    numbers = _stored_numbers(tables, spec, first_token, in_row * spec.width + first + column + 1)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(supervised_at),
        torch.from_numpy(targets.ravel()[supervised_at]),
        tokens=int((filled - first).clip(0, length).sum()),
        pieces=spec.pieces,
        filled=torch.from_numpy((filled - first).clip(0, length)),
        group_of=group_of,
        document_labels=labels,
        **numbers,
        **{name: torch.from_numpy(values) for name, values in keys.items()},
        images=images.tensors(),
        rope_positions=None if rope_positions is None else torch.from_numpy(rope_positions),
    )


def _stored_numbers(
    tables: Sequence[TokenTable], spec: BatchSpec, first_token: np.ndarray, targets: np.ndarray
) -> dict[str, torch.Tensor]:
    """The stored numbers of targets, by field of Batch, [targets, ...]. Empty if a table has no stored numbers.
    `first_token`: the position of each document's first token in the flattened rows, ascending; `targets`: the
    positions of the targets."""
    stored = [table.stored for table in tables if table.stored is not None]
    if len(stored) < len(tables):
        return {}
    document = np.searchsorted(first_token, targets, "right") - 1
    source, token = spec.source[document], spec.start[document] + targets - first_token[document]
    numbers = np.zeros(len(targets), stored[0].dtype)
    for index, of_tokens in enumerate(stored):
        numbers[source == index] = of_tokens[token[source == index]]
    return {name: torch.from_numpy(numbers[name].copy()) for name in numbers.dtype.names or ()}
