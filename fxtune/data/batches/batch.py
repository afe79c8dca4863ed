"""A micro-batch as the model takes it, cut from the memory maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from fxtune.data.tokenized.table import TokenTable

IGNORE_INDEX = -100
"""The target where there is none: `torch.nn.functional.cross_entropy`'s ignore_index, and Hugging Face's."""
SIZES = 16
"""How many numbers of supervised tokens filled() tells apart, of a batch of one shape."""
FEWEST = 128
"""The rows of a tile of the head's matmul: fewer take no less time."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: int64 tensors [rows, length], what kernels need to know of them, and counts known without looking."""

    input_ids: torch.Tensor
    targets: torch.Tensor
    """`targets[r, t]` is the token after `input_ids[r, t]` in the same document if that one is supervised, else -100."""
    position_ids: torch.Tensor
    """Restart at 0 in each document. Padding of a packed row is a document of its own; that of a row with a single
    document goes on counting."""
    cu_seqlens: torch.Tensor
    """int32 [slots + 1]: where each document begins in the flattened [rows x length] tokens, then their number, repeated to
    a length that is the same for all of a plan's batches (documents of no tokens), so that no compiled code sees a new shape.
    A row that is not packed is one document, its padding included, which stands behind all that counts."""
    supervised_at: torch.Tensor
    """int64 [supervised]: the flattened positions that have a target: the only ones that need logits."""
    labels: torch.Tensor
    """int64 [supervised]: their targets; IGNORE_INDEX where filled() added one."""
    tokens: int
    """Tokens that are not padding."""

    @property
    def supervised(self) -> int:
        """Targets that are not -100, in a batch that was not filled()."""
        return len(self.labels)

    def with_rounded_targets(self) -> Batch:
        """The same with a number of `supervised_at` and `labels` that few batches do not share: a multiple of FEWEST and of a
        SIZES-th of all positions, completed by positions without a target, each once, and the label IGNORE_INDEX.

        The loss and its gradients are the same: an ignored row has none. What the head does for it is wasted, half a SIZES-th
        of the positions on average. In return its matmuls and buffers have few sizes: memory that is freed fits what is asked for
        next, and a recorded pass (kernels/recorded.py) serves every batch of its size. On the host only.
        """
        positions = self.targets.numel()
        step = max(-(-positions // SIZES), FEWEST)
        missing = min(-(-max(len(self.labels), 1) // step) * step, positions) - len(self.labels)
        spare = (self.targets.flatten() == IGNORE_INDEX).nonzero().flatten()[:missing]
        return replace(
            self,
            supervised_at=torch.cat([self.supervised_at, spare]),
            labels=torch.cat([self.labels, torch.full_like(spare, IGNORE_INDEX)]),
        )

    def _tensors(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return replace(
            self, **{name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors().items()}
        )

    def pin_memory(self) -> Batch:
        return replace(self, **{name: tensor.pin_memory() for name, tensor in self._tensors().items()})

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Tell the allocator that `stream` reads these tensors, which another stream wrote."""
        for tensor in self._tensors().values():
            tensor.record_stream(stream)


@dataclass(frozen=True)
class BatchSpec:
    """What a micro-batch is made of, small enough to send to a worker. The arrays are int64, one entry a segment."""

    source: np.ndarray
    """Which table."""
    start: np.ndarray
    """First token in the table's `ids`."""
    length: np.ndarray
    offsets: np.ndarray
    """int64 [rows + 1]: row r is made of the segments offsets[r]:offsets[r + 1]."""
    width: int
    """Tokens in a row, padding included."""
    packed: bool
    pad_id: int
    slots: int
    """Room for documents in `cu_seqlens` of packed rows: at least one for each segment, and one more a row for its padding.
    Rows that are not packed need one each, and are known by that (kernels/packed_attention.py)."""


def build_batch(tables: Sequence[TokenTable], pieces: BatchSpec) -> Batch:
    """Copy the segments into rows. Work is one slice a segment; tokens are only touched by numpy."""
    rows = len(pieces.offsets) - 1
    ids = np.full((rows, pieces.width), pieces.pad_id, np.int64)
    supervised = np.zeros((rows, pieces.width), bool)
    begins = np.zeros((rows, pieces.width), np.int64)
    for row in range(rows):
        at = 0
        for piece in range(pieces.offsets[row], pieces.offsets[row + 1]):
            table, start, length = tables[pieces.source[piece]], pieces.start[piece], pieces.length[piece]
            ids[row, at : at + length] = table.ids[start : start + length]
            supervised[row, at + 1 : at + length] = table.supervised[start + 1 : start + length]
            begins[row, at] = at
            at += length
        if pieces.packed and at < pieces.width:
            begins[row, at] = at
    targets = np.full_like(ids, IGNORE_INDEX)
    targets[:, :-1] = np.where(supervised[:, 1:], ids[:, 1:], IGNORE_INDEX)
    positions = np.arange(pieces.width) - np.maximum.accumulate(begins, axis=1)
    starts = np.flatnonzero(positions == 0)
    cu_seqlens = np.full((pieces.slots if pieces.packed else rows) + 1, ids.size, np.int32)
    cu_seqlens[: len(starts)] = starts
    wanted = np.flatnonzero(targets != IGNORE_INDEX)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(wanted),
        torch.from_numpy(targets.ravel()[wanted]),
        tokens=int(pieces.length.sum()),
    )
