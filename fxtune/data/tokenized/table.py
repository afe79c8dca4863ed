"""A tokenized source on disk: its arrays, the bad rows, and a JSON file with counts and file sizes.

The arrays are .npy files that are opened as memory maps. A table of a hundred gigabytes opens immediately, all
processes share its pages, and a pickle of the table is only the name of its folder.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from fxtune.data.chat.split import SplitCounts
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import RowFormat
from fxtune.data.images.placed import PlacedImage
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.images.reference import EMBEDDED, ImageReference
from fxtune.data.read.row import Row, file_and_place
from fxtune.data.tokenized.cache import CHECKSUMS, META, checksums, keep_from_removal
from fxtune.system.terminal.console import say

ARRAYS = {"ids": np.int32, "supervised": np.bool_, "offsets": np.int64, "digests": np.uint64}
GROUP_ARRAYS = {"groups": np.int64, "labels": np.float32}
"""These arrays are stored only if a group has several documents or a document has a label."""
PROMPTS = "prompts"
"""This array is stored only for rows of preferences."""
IMAGES, BLOB = "images", "images.bin"
"""The array and the file are stored only if a document has an image. The file has the path or the bytes of each image.
"""
IMAGE = np.dtype(
    {
        "names": ["start", "tokens", "digest", "height", "width", "at", "bytes", "file_size", "modified", "is_file"],
        "formats": ["<i8", "<i8", "<u8", "<i4", "<i4", "<i8", "<i8", "<i8", "<i8", "?"],
    }
)
"""An image: the index of its first token in `ids`, its number of tokens, the hash of its file, its size in pixels, and
the place of its path or its bytes in images.bin. If the image is a file: also the file's size in bytes and its
modification time in nanoseconds."""
BAD_ROWS = "bad_rows.jsonl"
_KINDS: dict[str, Any] = ARRAYS | GROUP_ARRAYS | {PROMPTS: np.uint64, IMAGES: IMAGE}
DATA_FILES = [BAD_ROWS, BLOB, *(f"{key}.npy" for key in _KINDS)]


class TokenTable:
    """Documents of one source as token ids, in the order of the source. The documents of one row, such as several
    answers to a question, are a group. Batches keep a group together.

    Attributes:
        ids: int32 [tokens].
        supervised: bool [tokens], whether the token is a target.
        offsets: int64 [documents + 1]; document i is ids[offsets[i]:offsets[i + 1]].
        digests: uint64 [documents], a hash of the ids and the images of a document's group, the same on every machine.
        labels: float32 [documents], NaN for a document without a label. None if no document has a label and each
            document is a group by itself.
        prompts: uint64 [documents], a hash of the prompt of a document's group; None unless rows are preferences.
        images: structured array [images] of IMAGE, in the order of their tokens; None without images.
        image_processor: makes tensors of the images; None without images.
        stored: [tokens], the numbers of a frozen model for each supervised token, with names of fields of Batch; None
            unless read_stored() was called.
        features: [features], the features of distinct images, if read_stored() was called for them. The one field of
            an entry has the name of the numbers' dtype in torch and their bits.
        fingerprint: a hash of `ids`, `supervised`, the ends of documents and groups, labels and images.
        name: the source, as the user wrote it.
        format: the rows' format.
        bad_rows: how many rows could not be used.
        escaped: how many documents quote special tokens, which were tokenized as text.
        remarks: {remark: documents}. A remark names something that the chat template leaves out by design.
        rewritten: how many chats have a learned turn that the chat template writes differently in sampling.
        split: counts of pieces, if long or rewritten chats are stored as pieces. A piece has the digest of its chat.
        label_names: the names of labels; `labels` are then indices of this list. Empty: labels are numbers.
        beginning: the ids that the tokenizer puts before each text, such as `<s>`; empty unless the rows are
            preferences.
        whole: the table of the same source before chats were split, prompts shortened or twins added; otherwise None.
    """

    ids: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray
    digests: np.ndarray
    labels: np.ndarray | None = None
    prompts: np.ndarray | None = None
    images: np.ndarray | None = None
    stored: np.ndarray | None = None
    features: np.ndarray | None = None

    def __init__(
        self,
        folder: Path,
        name: str,
        stored: dict[str, str] | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """`stored`: the arguments of each call of read_stored()."""
        self.folder, self.name, self.stored_files = folder, name, dict[str, str]()
        self._open_file = keep_from_removal(folder)
        meta = read_meta(folder)
        assert meta is not None, f"{folder} is no complete token table"
        self.fingerprint: str = meta["fingerprint"]
        self.format: RowFormat = FORMATS[meta["format"]]
        self.bad_rows: int = meta["bad_rows"]
        self.escaped: int = meta["literal"]
        self.supervised_tokens: int = meta["supervised"]
        self.remarks: dict[str, int] = meta["remarks"]
        self.rewritten: int = meta["rewritten"]
        self.split = SplitCounts(**meta["split"])
        self.beginning: list[int] = meta.get("beginning", [])
        self.label_names: list[str] = meta.get("label_names", [])
        self.whole: TokenTable | None = None
        self._files: list[str] = meta["files"]
        self.is_grouped = "groups.npy" in meta["sizes"]
        extra = [key for key in (PROMPTS, IMAGES) if f"{key}.npy" in meta["sizes"]]
        self.image_processor = image_processor if IMAGES in extra else None
        self._features: dict[int, int] = {}
        for key in [*ARRAYS, *["labels"] * self.is_grouped, *extra]:
            setattr(self, key, np.load(folder / f"{key}.npy", mmap_mode="r"))
        for key, file in (stored or {}).items():
            self.read_stored(key, file)

    def read_stored(self, field: str, file: str) -> None:
        """Set `stored` or `features` from a file in the table's folder. Raises OSError, ValueError, EOFError if the
        file is damaged."""
        found = np.load(self.folder / file, mmap_mode="r")
        if found.shape != (len(self.ids) if field == "stored" else self.distinct_images[2][-1],):
            raise ValueError(f"{self.folder / file} has {found.dtype} {found.shape}")
        setattr(self, field, found)
        self.stored_files = {**self.stored_files, field: file}

    @cached_property
    def distinct_images(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(the first index in `images` of each distinct image; for each image, the number of its distinct image; where
        the features of each distinct image begin, and their number), int64."""
        assert self.images is not None
        _, first, number = np.unique(self.images["digest"], return_index=True, return_inverse=True)
        return first, number, np.concatenate([[0], self.image_sizes(first)[0].cumsum()])

    def features_of(self, indices: range) -> np.ndarray:
        """The `features` of images, copied from the memory map."""
        assert self.features is not None
        numbers, starts = self.distinct_images[1][indices.start : indices.stop], self.distinct_images[2]
        return np.concatenate([self.features[starts[number] : starts[number + 1]] for number in numbers])

    def __len__(self) -> int:
        return len(self.digests)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTable, (self.folder, self.name, self.stored_files, self.image_processor)

    def images_in(self, start: int, length: int) -> range:
        """The images whose tokens are among ids[start:start + length], as indices of `images`."""
        if self.images is None:
            return range(0)
        first, end = np.searchsorted(self.image_starts, [start, start + length])
        return range(int(first), int(end))

    @cached_property
    def image_starts(self) -> np.ndarray:
        """int64 [images]: the index in `ids` of each image's first token. This is a copy of the field in `images`: a
        search in the field itself would copy it in each call, in 3 ms for a million images."""
        assert self.images is not None
        return np.ascontiguousarray(self.images["start"])

    def image_sizes(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (vision features, height, width) of images, int64 [indices] each. Height and width are in pixels."""
        assert self.images is not None
        found = self.images[indices]
        heights, widths = (found[name].astype(np.int64) for name in ("height", "width"))
        # Images of one size have the same number of features, so features are counted once for each size.
        known, first, which = np.unique(heights << 32 | widths, return_index=True, return_inverse=True)
        features = np.zeros(len(known), np.int64)
        for at, (size, image) in enumerate(zip(known.tolist(), first.tolist(), strict=True)):
            if size not in self._features:
                start, tokens = (int(found[name][image]) for name in ("start", "tokens"))
                ids, processor = self.ids[start : start + tokens], self.image_processor
                self._features[size] = len(ids) if processor is None else int((ids == processor.feature_token).sum())
            features[at] = self._features[size]
        return features[which.reshape(-1)], heights, widths

    @property
    def embedded_bytes(self) -> int:
        """Bytes of images that rows had as bytes and not as files. The table's folder stores these images."""
        if self.images is None:
            return 0
        embedded = self.images[~self.images["is_file"]]
        first = np.unique(embedded["at"], return_index=True)[1]
        return int(embedded["bytes"][first].sum())

    def image(self, index: int) -> ImageReference:
        assert self.images is not None
        found = self.images[index]
        stored = self._blob[int(found["at"]) : int(found["at"] + found["bytes"])].tobytes()
        path = os.fsdecode(stored) if found["is_file"] else ""
        return ImageReference(
            path or EMBEDDED,
            int(found["height"]),
            int(found["width"]),
            int(found["digest"]),
            path,
            (int(found["file_size"]), int(found["modified"])),
            b"" if path else stored,
        )

    def placed_images(self, start: int, length: int) -> list[PlacedImage]:
        """The images among ids[start:start + length]. Their places are relative to `start`."""
        if (found := self.images) is None:
            return []
        return [
            PlacedImage(int(found["start"][index]) - start, int(found["tokens"][index]), self.image(index))
            for index in self.images_in(start, length)
        ]

    @cached_property
    def _blob(self) -> np.ndarray:
        return np.memmap(self.folder / BLOB, np.uint8, "r")

    def has_changed_images(self) -> bool:
        """Whether the file of an image was changed or removed after it was tokenized."""
        if self.images is None:
            return False
        for index in np.flatnonzero(self.images["is_file"]).tolist():
            image = self.image(index)
            try:
                found = os.stat(image.path)
            except OSError:
                return True
            if (found.st_size, found.st_mtime_ns) != image.stamp:
                return True
        return False

    @cached_property
    def groups(self) -> np.ndarray:
        """int64 [groups + 1]: group g has the documents groups[g]..groups[g + 1] - 1."""
        if not self.is_grouped:
            return np.arange(len(self) + 1)
        stored: np.ndarray = np.load(self.folder / "groups.npy", mmap_mode="r")
        return stored

    @cached_property
    def by_group(self) -> TokenTable:
        """This table with each group as one document: `offsets` and `digests` have an entry for each group."""
        if not self.is_grouped:
            return self
        table: TokenTable = object.__new__(TokenTable)
        vars(table).update(vars(self), is_grouped=False, labels=None)
        table.offsets, table.digests = self.offsets[self.groups], self.digests[self.groups[:-1]]
        table.prompts = None if self.prompts is None else self.prompts[self.groups[:-1]]
        vars(table).pop("groups", None)
        return table

    def relabelled(self, labels: np.ndarray, names: list[str]) -> TokenTable:
        """This table with other labels, float32 [documents], and other `label_names`."""
        table: TokenTable = object.__new__(TokenTable)
        vars(table).update(vars(self), labels=labels, label_names=names)
        vars(table).pop("by_group", None)
        return table

    @property
    def held_out_by(self) -> np.ndarray:
        """uint64 [documents]: the hash that decides whether a document is held out. For preferences this is the
        prompt's hash. Otherwise the model would be judged on prompts to which it has learned answers."""
        return self.digests if self.prompts is None else self.prompts

    @property
    def by_row(self) -> TokenTable:
        """The same source with one document for each usable row: whole chats, and each group as one document."""
        return (self.whole or self).by_group

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return int(np.diff(self.offsets).max(initial=0))

    def read_bad_rows(self, files: list[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield each bad row as {where, error, row}. `files`: the present names of the source's files, for `where`."""
        names = dict(zip(self._files, files or self._files, strict=True))
        with open(self.folder / BAD_ROWS, encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                yield {"where": names[entry["file"]] + entry["place"], "error": entry["error"], "row": entry["row"]}


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The content of a table's JSON file; None if there is no table or it is damaged."""
    try:
        meta = json.loads((folder / META).read_text())
        sizes = {name: (folder / name).stat().st_size for name in meta["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if sizes == meta["sizes"] else None


def is_intact(folder: Path, name: str) -> bool:
    """Whether `folder` has a table with the bytes that were written. Prints a line if bytes have changed.

    `name`: the source. A table without checksums, which an older version of fxtune wrote, passes."""
    if (meta := read_meta(folder)) is None or CHECKSUMS not in meta:
        return meta is not None
    try:
        damaged = [file for file, found in checksums(folder, meta).items() if found != meta[CHECKSUMS].get(file)]
    except OSError as error:
        damaged = [str(error)]
    if damaged:
        say(
            f"{name}: {' and '.join(damaged)} in {folder} changed after fxtune wrote the tokens, so they are made "
            "again. If this happens often, check the disk."
        )
    return not damaged


@dataclass
class EncodedShard:
    """The documents of one shard, in arrays as in TokenTable. `lengths`, in tokens, is in place of `offsets`."""

    ids: np.ndarray
    supervised: np.ndarray
    lengths: np.ndarray
    digests: np.ndarray
    bad: list[Row] = field(default_factory=list)
    escaped: int = 0
    remarks: Counter[str] = field(default_factory=Counter)
    rewritten: int = 0
    split: SplitCounts = field(default_factory=SplitCounts)
    group_sizes: np.ndarray | None = None
    """int64 [groups]: the number of documents in each group. None if each group has one document."""
    labels: np.ndarray | None = None
    """float32 [documents]; None if no document has a label."""
    label_names: list[str] = field(default_factory=list)
    """The names of labels; `labels` are then indices of it. Empty: labels are numbers."""
    prompts: np.ndarray | None = None
    """uint64 [documents]; None if rows are not preferences."""
    images: list[PlacedImage] = field(default_factory=list)
    """Sorted by `start`, which is an index of `ids` in this shard."""


class ShardBuilder:
    def __init__(self) -> None:
        self._ids, self._supervised = list[np.ndarray](), list[np.ndarray]()
        self._digests, self._prompts, self._images = list[int](), list[int](), list[PlacedImage]()
        self._group_sizes, self._labels = list[int](), list[float]()
        self._label_names: dict[str, int] = {}
        self._tokens = 0

    def add(
        self,
        documents: Sequence[Any],
        digest: int,
        labels: Sequence[float | str] | None = None,
        prompt: int | None = None,
    ) -> None:
        """Add the documents of a row: one document, a group, or the pieces of a chat. Each has `ids`, `supervised` and
        `images`. They share `digest`, so they are on the same side of a hold-out. `labels`: one for each document of a
        group. `prompt`: the hash of the prompt of preferences."""
        for document in documents:
            self._images += [image._replace(start=self._tokens + image.start) for image in document.images]
            self._tokens += len(document.ids)
            self._ids.append(np.asarray(document.ids, np.int32))
            self._supervised.append(np.asarray(document.supervised, np.bool_))
        self._digests += [digest] * len(documents)
        if documents and labels is not None:
            self._group_sizes.append(len(documents))
            names = self._label_names
            self._labels += [names.setdefault(each, len(names)) if isinstance(each, str) else each for each in labels]
        if prompt is not None:
            self._prompts += [prompt] * len(documents)

    def shard(self, **counts: Any) -> EncodedShard:
        """Build the shard. `counts`: the other fields of EncodedShard."""
        return EncodedShard(
            ids=np.concatenate([np.zeros(0, np.int32), *self._ids]),
            supervised=np.concatenate([np.zeros(0, np.bool_), *self._supervised]),
            lengths=np.array([len(document) for document in self._ids], np.int64),
            digests=np.array(self._digests, np.uint64),
            group_sizes=np.array(self._group_sizes, np.int64) if self._group_sizes else None,
            labels=np.array(self._labels, np.float32) if self._group_sizes else None,
            prompts=np.array(self._prompts, np.uint64) if self._prompts else None,
            images=self._images,
            label_names=list(self._label_names),
            **counts,
        )


class TableWriter(ExitStack):
    """Writes a table from front to back and keeps nothing of it in memory."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        super().__init__()
        self.folder, self.files = folder, dict.fromkeys(files)
        self.documents = self.tokens = self.supervised = self.bad_rows = self.escaped = self.rewritten = 0
        self.label_names: dict[str, int] = {}
        self.labelled = 0
        """The number of documents with a label."""
        self.first_bad: Row | None = None
        self.remarks: Counter[str] = Counter()
        self._is_grouped = self._has_prompts = False
        self._blob_bytes = 0
        hashed = ("ids", "supervised", "offsets", *GROUP_ARRAYS, IMAGES)
        self._hashes = {key: blake2b(digest_size=16) for key in hashed}
        self.split = SplitCounts()
        folder.mkdir(parents=True)
        self._bad = self.enter_context((folder / BAD_ROWS).open("w", encoding="utf-8"))
        self._blob, *arrays = (
            self.enter_context((folder / name).open("wb")) for name in (BLOB, *(f"{key}.npy" for key in _KINDS))
        )
        self._arrays = {key: _NpyFile(file, np.dtype(_KINDS[key])) for key, file in zip(_KINDS, arrays, strict=True)}
        for key in ("offsets", "groups"):
            self._arrays[key].append(np.zeros(1))

    def append(self, part: EncodedShard) -> None:
        count = len(part.lengths)
        sizes = np.ones(count, np.int64) if part.group_sizes is None else part.group_sizes
        labels = np.full(count, np.nan) if part.labels is None else part.labels
        if part.label_names:
            names = self.label_names
            labels = np.array([names.setdefault(name, len(names)) for name in part.label_names])[labels.astype(int)]
        arrays = dict(
            ids=part.ids,
            supervised=part.supervised,
            offsets=self.tokens + np.cumsum(part.lengths, dtype=np.int64),
            digests=part.digests,
            groups=self.documents + np.cumsum(sizes, dtype=np.int64),
            labels=labels,
            prompts=np.zeros(0) if part.prompts is None else part.prompts,
            images=self._stored(part.images),
        )
        # Image files may be moved, so the fingerprint does not depend on their paths.
        places = [(self.tokens + start, tokens, image.digest) for start, tokens, image in part.images]
        hashed = arrays | {IMAGES: np.array(places, np.uint64)}
        for key, values in arrays.items():
            self._arrays[key].append(values)
            if key in self._hashes:
                # Values are hashed in one byte order, so that the fingerprint is the same on every machine.
                kind = np.dtype(np.uint64 if key == IMAGES else _KINDS[key])
                self._hashes[key].update(np.ascontiguousarray(hashed[key], kind.newbyteorder("<")).data)
        self.labelled += count - int(np.isnan(labels).sum())
        self._is_grouped |= len(sizes) < count or self.labelled > 0
        self._has_prompts |= part.prompts is not None
        self.documents += count
        self.tokens += len(part.ids)
        self.supervised += int(part.supervised.sum())
        self.bad_rows += len(part.bad)
        self.escaped += part.escaped
        self.rewritten += part.rewritten
        self.remarks += part.remarks
        self.split += part.split
        self.first_bad = self.first_bad or next(iter(part.bad), None)
        for bad in part.bad:
            # File and place are stored separately, because a copy of the file has another name.
            file, place = file_and_place(bad.where)
            file, place = (file, place) if file in self.files else (bad.where, "")
            entry = {"file": file, "place": place, "error": bad.error, "row": bad.raw}
            self._bad.write(json.dumps(entry, default=_as_text) + "\n")

    def _stored(self, images: Sequence[PlacedImage]) -> np.ndarray:
        """Write the path or bytes of each image into the blob, equal content only once. Returns an array of IMAGE."""
        places: dict[bytes, int] = {}
        rows = []
        for start, tokens, image in images:
            content = os.fsencode(image.path) or image.data
            if content not in places:
                places[content] = self._blob_bytes
                self._blob_bytes += self._blob.write(content)
            size = image.digest, image.height, image.width
            place = places[content], len(content), *image.stamp, bool(image.path)
            rows.append((self.tokens + start, tokens, *size, *place))
        return np.array(rows, IMAGE)

    def finish(self, **meta: Any) -> None:
        """Write the headers and the JSON file, and flush everything to the disk."""
        for array in self._arrays.values():
            array.finish()
        _sync(self._bad)
        _sync(self._blob)
        files = list(DATA_FILES)
        # If each document is a group without a label, the arrays of groups say nothing.
        absent = [*(() if self._is_grouped else GROUP_ARRAYS), *[PROMPTS] * (not self._has_prompts)]
        if not self._blob_bytes:
            absent.append(IMAGES)
            files.remove(BLOB)
            (self.folder / BLOB).unlink()
        for key in absent:
            files.remove(f"{key}.npy")
            (self.folder / f"{key}.npy").unlink()
            self._hashes.pop(key, None)
        hashes = b"".join(hashed.digest() for hashed in self._hashes.values())
        if self.label_names:
            meta["label_names"] = list(self.label_names)
            hashes += json.dumps(meta["label_names"]).encode()
        meta |= dict(
            fingerprint=blake2b(hashes, digest_size=16).hexdigest(),
            documents=self.documents,
            tokens=self.tokens,
            supervised=self.supervised,
            bad_rows=self.bad_rows,
            literal=self.escaped,
            rewritten=self.rewritten,
            remarks=dict(self.remarks),
            split=vars(self.split),
            files=list(self.files),
            sizes={name: (self.folder / name).stat().st_size for name in files},
        )
        meta[CHECKSUMS] = checksums(self.folder, meta)
        with open(self.folder / META, "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            _sync(file)


class _NpyFile:
    """A one-dimensional .npy file whose length is known only at the end."""

    def __init__(self, file: IO[bytes], dtype: np.dtype) -> None:
        self.file, self.dtype, self.length = file, dtype, 0
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += len(values)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()
        _sync(self.file)

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self.file, header)


def _as_text(value: Any) -> str:
    """A text for a value of a bad row that JSON cannot express."""
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
