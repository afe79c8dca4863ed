"""The tensors in a checkpoint's files. A file has whole tensors, or the parts of tensors that one rank wrote.

    step-00000120/  weights-1-of-2.safetensors  optimizer-1-of-2.safetensors    of rank 0, with all unsharded tensors
                    weights-2-of-2.safetensors  optimizer-2-of-2.safetensors    of rank 1
                    state.json  manifest.json

The manifest has the shape of each whole tensor and the offset of each part. Any number of ranks can read the files. A
rank reads only the rectangles that it needs, because the files are memory maps.

`torch.distributed.checkpoint` promises less: its writers hash nothing, its safetensors writer does not record which
files belong together, and its default format is a pickle. So fxtune writes and verifies the files itself (folder.py,
save.py). torch can still read them: each part has torch's record of offsets (`DCP_SHARDING_INFO`) for
torch.distributed.checkpoint.load() with a HuggingFaceStorageReader.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fxtune.distributed.chunks import Chunk
from fxtune.system.files.atomic_files import DTYPES

_KINDS = {name: dtype for dtype, name in DTYPES.items()}
Chunks = dict[str, dict[str, list[int]]]
"""The entry for one file in the manifest: for each tensor name, the whole `shape` and the part's `offset`."""


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: str
    """The dtype's name in safetensors."""
    parts: tuple[tuple[Any, Chunk], ...]
    """(open file, place of the file's part in the whole tensor) for each part."""


class StoredTensors(Mapping[str, StoredTensor], AbstractContextManager["StoredTensors"]):
    """The tensors in `files` by name. As a context manager it closes the files.

    `files`: the chunks of each file's tensors, or None for a file of whole tensors. Raises ValueError if a file is not
    a safetensors file, or if a tensor is incomplete or differs from its chunks.
    """

    def __init__(self, files: Mapping[Path, Chunks | None]) -> None:
        self._open, self._tensors = ExitStack(), {}
        try:
            self._tensors = dict(self._read(files))
        except (SafetensorError, OSError) as error:
            self._open.close()
            raise ValueError(f"its tensors cannot be read: {error}") from error
        except BaseException:
            self._open.close()
            raise

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def read(self, name: str, wanted: Chunk | None = None) -> torch.Tensor:
        """The rectangle `wanted` of a tensor, on the CPU; None: the whole tensor. Raises ValueError."""
        stored = self[name]
        wanted = wanted or Chunk.whole(stored.shape)
        out: torch.Tensor | None = None
        try:
            for file, part in stored.parts:
                common = part.overlap(wanted)
                if common is None:
                    continue
                data = file.get_tensor(name)
                if common != part:
                    data = file.get_slice(name)[common.within(part)]
                if common == wanted:
                    return data
                out = torch.empty(wanted.size, dtype=data.dtype) if out is None else out
                out[common.within(wanted)] = data
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{name} cannot be read: {error}") from error
        return torch.empty(wanted.size, dtype=_KINDS[stored.dtype]) if out is None else out

    def _read(self, files: Mapping[Path, Chunks | None]) -> Iterator[tuple[str, StoredTensor]]:
        found: dict[str, list[tuple[str, Any, Chunk]]] = {}
        for path, chunks in files.items():
            file: Any = self._open.enter_context(safe_open(path, "pt"))
            names = set(file.keys())
            if chunks is not None and names != chunks.keys():
                raise ValueError(f"{path.name} does not hold the tensors of the manifest")
            for name in names:
                part = file.get_slice(name)
                size = tuple(part.get_shape())
                where = Chunk.whole(size)
                if chunks is not None:
                    where = Chunk(tuple(chunks[name]["shape"]), tuple(chunks[name]["offset"]), size)
                found.setdefault(name, []).append((part.get_dtype(), file, where))
        for name, parts in found.items():
            kinds, shapes = {kind for kind, _, _ in parts}, {chunk.shape for _, _, chunk in parts}
            if len(kinds) != 1 or len(shapes) != 1 or not _complete([chunk for _, _, chunk in parts]):
                raise ValueError(f"the parts of {name} do not make a whole")
            held = tuple((file, chunk) for _, file, chunk in parts)
            yield name, StoredTensor(shapes.pop(), kinds.pop(), held)


def chunks_of(chunks: Mapping[str, Chunk]) -> Chunks:
    """The entry in the manifest for a file with these parts."""
    return {name: {"shape": list(chunk.shape), "offset": list(chunk.offset)} for name, chunk in chunks.items()}


def torch_record(chunks: Mapping[str, Chunk]) -> dict[str, str]:
    """The entries that torch's HuggingFaceStorageReader reads in the header of a file with these parts."""
    offsets = {name: {"saved_offsets": list(chunk.offset)} for name, chunk in chunks.items()}
    return {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}


def _complete(chunks: list[Chunk]) -> bool:
    """Whether the parts lie inside their tensor, do not overlap, and fill it."""
    shape = chunks[0].shape
    if any(len(chunk.offset) != len(shape) or len(chunk.size) != len(shape) for chunk in chunks):
        return False
    inside = all(
        start >= 0 and start + length <= end
        for chunk in chunks
        for start, length, end in zip(chunk.offset, chunk.size, shape, strict=True)
    )
    apart = all(chunk.overlap(other) is None for index, chunk in enumerate(chunks) for other in chunks[:index])
    filled = sum(math.prod(chunk.size) for chunk in chunks)
    return inside and (apart or not shape) and filled == math.prod(shape)
