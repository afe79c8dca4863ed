"""Token tables in memory, and training plans for them."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from fxtune.data.batches.build import plan_training
from fxtune.data.batches.plan import Plan
from fxtune.data.chat.split import SplitCounts
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import RowFormat

PAD = 0


@dataclasses.dataclass
class Table:
    """The part of a token table that a plan reads, in memory."""

    ids: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray
    digests: np.ndarray
    name: str = "table"
    fingerprint: str = ""
    bad_rows: int = 0
    split: SplitCounts = dataclasses.field(default_factory=SplitCounts)
    format: RowFormat = FORMATS["text"]
    whole: Table | None = None
    stored: np.ndarray | None = None
    sizes: np.ndarray | None = None
    """Documents of each group."""
    labels: np.ndarray | None = None
    prompts: np.ndarray | None = None
    images: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def is_grouped(self) -> bool:
        return self.sizes is not None

    @property
    def groups(self) -> np.ndarray:
        return np.arange(len(self) + 1) if self.sizes is None else np.cumsum([0, *self.sizes])

    @property
    def held_out_by(self) -> np.ndarray:
        return self.digests if self.prompts is None else self.prompts

    @property
    def by_group(self) -> Table:
        if not self.is_grouped:
            return self
        ends, digests = self.offsets[self.groups], self.digests[self.groups[:-1]]
        return dataclasses.replace(self, offsets=ends, digests=digests, sizes=None, labels=None)

    @property
    def by_row(self) -> Table:
        return (self.whole or self).by_group


def table(documents: list[tuple[list[int], list[bool]]], name: str = "table") -> Table:
    ids = np.array([token for tokens, _ in documents for token in tokens], np.int32)
    supervised = np.array([mark for _, marks in documents for mark in marks], bool)
    offsets = np.cumsum([0, *(len(tokens) for tokens, _ in documents)])
    digests = np.array(
        [
            int.from_bytes(hashlib.blake2b(str(tokens).encode(), digest_size=8).digest(), "big")
            for tokens, _ in documents
        ],
        np.uint64,
    )
    return Table(
        ids, supervised, offsets, digests, name, hashlib.sha256(ids.tobytes() + offsets.tobytes()).hexdigest()
    )


def natural(count: int, mean: float, seed: int, name: str = "table", share: float = 0.5) -> Table:
    """A table of documents with log-normal lengths. The last `share` of each document is supervised."""
    draw = np.random.default_rng(seed)
    length = np.clip(draw.lognormal(np.log(mean), 0.7, count), 2, None).astype(int)
    documents = []
    for size in length:
        tokens = draw.integers(1, 30_000, size)
        documents.append((tokens.tolist(), (np.arange(size) >= size * (1 - share)).tolist()))
    return table(documents, name)


def training(tables, *, micro=2, step=4, seed=0, max_steps=None, epochs=None, weights=None, ramp=(), **data) -> Plan:
    sources = [SourceConfig(path=t.name, weight=weights[i] if weights else None) for i, t in enumerate(tables)]
    return plan_training(
        tables,
        DataConfig(sources=sources, **data),
        micro_batch_size=micro,
        global_batch_size=step,
        max_steps=max_steps,
        epochs=epochs,
        seed=seed,
        pad_id=PAD,
        ramp=ramp,
    )


def grouped(groups: list[list[tuple[list[int], list[bool]]]], labels=None, name: str = "groups") -> Table:
    """A table of groups of documents. `labels`: a number for each document, None without one."""
    found = table([document for group in groups for document in group], name)
    sizes = np.array([len(group) for group in groups])
    whole = table([([token for tokens, _ in group for token in tokens], []) for group in groups])
    numbers = [np.nan] * len(found) if labels is None else [np.nan if one is None else one for one in labels]
    return dataclasses.replace(
        found,
        digests=np.repeat(whole.digests, sizes),
        fingerprint=hashlib.sha256(f"{found.fingerprint} {sizes} {numbers}".encode()).hexdigest(),
        format=FORMATS["group"],
        sizes=sizes,
        labels=np.array(numbers, np.float32),
    )
