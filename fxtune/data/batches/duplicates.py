"""Finds documents that repeat others, exactly or nearly, so that each is learned once (`data.dedup`).

Copies are left out before documents are held out. Of similar documents only the first is used, for training or for
evaluation, so no near-copy of a held-out document is trained on.

Exact copies have the same token ids and therefore the same stored digest. Near-copies are found by MinHash and
locality-sensitive hashing (Broder 1997; Indyk and Motwani 1998). A document counts as the set of its shingles, the
sequences of SHINGLE tokens in it. Each of PERMUTATIONS hash functions has a minimum over this set. The chance that two
sets have the same minimum is their Jaccard similarity. Documents that agree in a band, a few minima, are candidates.
The similarity of candidates is computed from the whole sets, so no document is left out by chance. Shingles that a
tenth of the documents have (of a chat template or a system prompt) are not compared. The images of a document
are part of each of its shingles, so documents with different images are never near-copies.

Everything is a function of the tokens and the settings. The minima and the bands take 0.75 KB a document at the
default similarity. The result is cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fxtune.data.batches.segments import places_within, splitmix64
from fxtune.data.config import DataConfig, Dedup
from fxtune.data.tokenized.cache import cache_root
from fxtune.data.tokenized.rows import place_of_row
from fxtune.data.tokenized.table import TokenTable
from fxtune.system.files.atomic_files import replacing

SHINGLE = 5
"""Tokens of a shingle."""
PERMUTATIONS = 128
FREQUENT, SAMPLED = 0.1, 2000
"""A shingle is not compared if at least the share FREQUENT of a sample of SAMPLED documents has it."""
FEW = 50
"""Among fewer documents every shingle is compared."""
_CATCH = 0.99
"""Two documents with exactly the required similarity become candidates with at least this chance."""
_COMPARED = 100
"""A document is compared with at most this many earlier documents."""
_BLOCK = 1 << 20
"""Tokens that are hashed at a time."""
_SHOWN = 3
_VERSION = 2


@dataclass(frozen=True)
class Duplicates:
    """The documents that `data.dedup` leaves out besides exact copies."""

    near: np.ndarray
    """uint64, ascending: the digests of near-copies."""
    like: np.ndarray
    """uint64: for each near-copy, the digest of the similar document that is kept."""


def find_duplicates(tables: Sequence[TokenTable], held_out: Sequence[TokenTable], data: DataConfig) -> Duplicates:
    """The near-copies among `tables` of data.sources: documents similar to an earlier document, or to a document of
    `held_out`, the tables of data.eval_sources."""
    none = np.zeros(0, np.uint64)
    if data.dedup is not Dedup.near:
        return Duplicates(none, none)
    tables, held_out = ([table.by_row for table in side] for side in (tables, held_out))
    prints = [[table.fingerprint for table in side] for side in (held_out, tables)]
    key = hashlib.sha256(json.dumps([_VERSION, prints, data.dedup_similarity]).encode()).hexdigest()[:32]
    file = cache_root(data) / "duplicates" / f"{key}.npy"
    try:
        near, like = np.load(file).astype(np.uint64, casting="safe")
    except (OSError, ValueError, EOFError, TypeError):  # the file is missing or damaged
        near, like = _near_copies([*held_out, *tables], len(held_out), data.dedup_similarity)
        with suppress(OSError):  # without the file, the next run computes the result again
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, shared=True) as out:
                np.save(out, np.stack([near, like]))
    return Duplicates(near, like)


def first_copies(table: TokenTable, seen: np.ndarray) -> np.ndarray:
    """A mask of the documents of a table to keep, bool. A document is not kept if `seen` has its digest or it repeats
    an earlier document. All pieces of a chat have the chat's digest; the pieces of its first copy are kept."""
    distinct, of, pieces = np.unique(table.digests, return_inverse=True, return_counts=True)
    order = np.argsort(of, kind="stable")
    rank = np.empty(len(of), np.int64)
    rank[order] = places_within(pieces)
    if table.by_row is not table:
        whole, copies = np.unique(table.by_row.digests, return_counts=True)
        pieces_of_one = pieces // copies[np.searchsorted(whole, distinct)]
    else:
        pieces_of_one = np.ones(len(distinct), np.int64)
    return (rank < pieces_of_one[of]) & ~np.isin(table.digests, seen)


def _near_copies(tables: Sequence[TokenTable], held_out: int, similarity: float) -> tuple[np.ndarray, np.ndarray]:
    """(`near`, `like`) for Duplicates. Documents of the first `held_out` tables are always kept."""
    digests = np.concatenate([table.digests for table in tables])
    first = np.unique(digests, return_index=True)[1]
    order = np.sort(first)  # the first document with each content, in the order of the tables
    ends = np.cumsum([len(table) for table in tables])
    owner = np.searchsorted(ends, order, side="right")
    inside = order - (ends - [len(table) for table in tables])[owner]
    shingles = _Shingles(tables, owner, inside)
    bands = _bands(shingles, len(order), similarity)
    suspect = np.zeros(len(order), bool)
    for band in bands:
        _, of, counts = np.unique(band, return_inverse=True, return_counts=True)
        suspect |= counts[of] > 1
    kept: dict[tuple[int, int], list[int]] = {}
    near, like = list[int](), list[int]()
    for document in np.flatnonzero(suspect).tolist():
        slots = [(number, int(band[document])) for number, band in enumerate(bands)]
        original = None
        if owner[document] >= held_out:
            candidates = sorted({other for slot in slots for other in kept.get(slot, ())[:_COMPARED]})[:_COMPARED]
            original = next(
                (other for other in candidates if shingles.similarity(other, document) >= similarity), None
            )
        if original is None:
            for slot in slots:
                kept.setdefault(slot, []).append(document)
        else:
            near.append(document)
            like.append(original)
    dropped, others = (digests[order[np.array(documents, np.int64)]] for documents in (near, like))
    sort = np.argsort(dropped)
    return dropped[sort], others[sort]


class _Shingles:
    """The sets of shingles of documents. `owner`: the table of each document; `inside`: its index in the table."""

    def __init__(self, tables: Sequence[TokenTable], owner: np.ndarray, inside: np.ndarray) -> None:
        self.tables, self.owner, self.inside = tables, owner, inside
        self.frequent = np.zeros(0, np.uint64)
        count = len(owner)
        if count >= FEW:
            sample = np.argsort(splitmix64(np.arange(count, dtype=np.uint64)), kind="stable")[:SAMPLED]
            hashes, times = np.unique(
                np.concatenate([self.of(document) for document in sample.tolist()]), return_counts=True
            )
            self.frequent = hashes[times >= max(2, FREQUENT * len(sample))]

    def of(self, document: int) -> np.ndarray:
        """The distinct hashes of a document's shingles, uint64, ascending. A document shorter than a shingle is one
        shingle."""
        table, at = self.tables[self.owner[document]], int(self.inside[document])
        start, end = int(table.offsets[at]), int(table.offsets[at + 1])
        ids = np.asarray(table.ids[start:end]).astype(np.uint64)
        size = min(SHINGLE, len(ids))
        hashed = np.zeros(len(ids) - size + 1, np.uint64)
        if table.images is not None:
            for image in table.images_in(start, end - start):
                hashed = splitmix64(hashed ^ table.images["digest"][image])
        for place in range(size):
            hashed = splitmix64(hashed ^ ids[place : place + len(hashed)])
        hashes = np.unique(hashed)
        own = hashes[~np.isin(hashes, self.frequent)] if len(self.frequent) else hashes
        return own if len(own) else hashes

    def similarity(self, one: int, other: int) -> float:
        a, b = self.of(one), self.of(other)
        shared = len(np.intersect1d(a, b, assume_unique=True))
        return shared / (len(a) + len(b) - shared)


def _bands(shingles: _Shingles, count: int, similarity: float) -> list[np.ndarray]:
    """An array for each band, uint64 [documents]: a hash of each document's minima in the band."""
    rows = max(
        rows
        for rows in (1, 2, 4, 8, 16, 32)
        if rows == 1 or 1 - (1 - similarity**rows) ** (PERMUTATIONS // rows) >= _CATCH
    )
    minima = np.empty((PERMUTATIONS, count), np.uint32)
    keys = splitmix64(np.arange(PERMUTATIONS, dtype=np.uint64))
    for first, last in _blocks(shingles, count):
        hashes = [shingles.of(document) for document in range(first, last)]
        starts = np.cumsum([0, *map(len, hashes[:-1])])
        every = np.concatenate(hashes)
        for number, key in enumerate(keys):
            minima[number, first:last] = np.minimum.reduceat((splitmix64(every ^ key) >> np.uint64(32)), starts)
    bands = []
    for begin in range(0, PERMUTATIONS, rows):
        band = np.zeros(count, np.uint64)
        for row in minima[begin : begin + rows]:
            band = splitmix64(band ^ row.astype(np.uint64))
        bands.append(band)
    return bands


def _blocks(shingles: _Shingles, count: int) -> Iterator[tuple[int, int]]:
    """(first, end) of successive ranges of documents with about _BLOCK tokens."""
    lengths = np.array(
        [
            shingles.tables[owner].offsets[at + 1] - shingles.tables[owner].offsets[at]
            for owner, at in zip(shingles.owner.tolist(), shingles.inside.tolist(), strict=True)
        ],
        np.int64,
    )
    ends, first = np.cumsum(lengths), 0
    while first < count:
        base = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, base + _BLOCK)), first + 1)
        yield first, min(last, count)
        first = last


def describe(
    found: Duplicates, tables: Sequence[TokenTable], held_out: Sequence[TokenTable], data: DataConfig
) -> Iterator[str]:
    """A line for each table: how many documents data.dedup leaves out, and the first of them by file and line."""
    if data.dedup is Dedup.off:
        return
    seen = np.zeros(0, np.uint64)
    sides = [*zip(data.sources, tables, strict=True), *zip(data.eval_sources, held_out, strict=False)]
    sides = [(source, table.by_row) for source, table in sides]
    for number, (source, table) in enumerate(sides[: len(tables)]):
        copies, near = ~first_copies(table, seen), np.isin(table.digests, found.near)
        seen = np.union1d(seen, table.digests)
        left_out, noun = np.flatnonzero(copies | near), tables[number].format.noun
        if not len(left_out):
            yield f"{table.name}: data.dedup={data.dedup.value} finds no copies among {len(table):,} {noun}."
            continue
        kinds = [f"{int((copies & ~near).sum()):,} copies"]
        if data.dedup is Dedup.near:
            kinds.append(f"{int(near.sum()):,} near-copies (similarity of {data.dedup_similarity:g} or more)")
        pairs = []
        for document in left_out[:_SHOWN].tolist():
            digest = table.digests[document]
            if near[document]:
                digest = found.like[np.searchsorted(found.near, digest)]
            first = next(side for side in sides if digest in side[1].digests)
            original = place_of_row(*first, int(np.argmax(first[1].digests == digest)), data)
            pairs.append(f"{place_of_row(source, table, document, data)} of {original}")
        yield (
            f"{table.name}: data.dedup={data.dedup.value} leaves out {len(left_out):,} of {len(table):,} {noun}, "
            f"{' and '.join(kinds)}: {', '.join(pairs)}{', ...' * (len(left_out) > _SHOWN)}"
        )
