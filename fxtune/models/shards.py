"""Builds a model that is divided over ranks. It is built without weights, and then each rank reads its own rows of the
weights. One process also uses this for a model that fits nowhere in 16 bits, and quantizes the rows as it reads them.

    built = empty(...)            every parameter on the meta device, each marked with its name in the files
    ...                           techniques replace modules; joined parameters are marked (mark_joined)
    wanted = pieces_of(built)     for each parameter: the tensors of the files, and their rows, that it consists of
    shard(built, ...)             memory for this rank's rows (distributed/sharding.py)
    read(...)                     those rows, from the files
    complete(built, ...)          what modules compute from the rows of all ranks

nf4 and int8 cannot quantize a part of a matrix. For these formats read_each() hands out whole tensors before shard().

A module whose weight has another format than in the files (fp8) is a StoresRows.

safetensors reads a slice of a tensor without the rest, so no rank ever holds the whole model on its device or in host
memory. The files must store weights as the architecture has them, under its names or older names that transformers
knows. Files may also store each expert of a mixture in its own tensor, or in separate tensors for gate and up. The
rows of the architecture's tensor are experts, so a rank reads its own experts. Other conversions are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import nn

from fxtune.distributed.chunks import chunk_of, local
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, first_line
from fxtune.models import weights
from fxtune.models.kinds.known import kind_of
from fxtune.system.files.hub import Origin
from fxtune.system.terminal.progress import phase
from fxtune.upstream.transformers import EXPERTS_APART, TURNED_EXPERTS, find_conversions, not_in_files, renamed, words

MARK = "stored_pieces"
MXFP4 = CODES, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors, both uint8, in which a checkpoint stores experts in MXFP4: codes [experts,
out, in / 32, 16] and exponents [experts, out, in / 32]."""


class Piece(NamedTuple):
    """A tensor of the files that is a part of a parameter. It fills the parameter's first columns."""

    name: str
    first: int
    """The row of the parameter where this part begins."""
    shape: tuple[int, ...]


class StoresRows:
    """A module that stores its weight as codes of dtype uint8."""

    rounding: float = 0.0
    """|dequantized - weight| / |weight| of the first rows that this rank has stored."""

    def store_rows(self, name: str, into: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Write `rows` from the files to `into`, this rank's memory for these rows in the parameter `name` of this
        module. `first`: the number of the first of `rows` in the weight."""
        raise NotImplementedError

    def complete_rows(self, world: World) -> None:
        """Compute values that depend on the rows of all ranks. All ranks call this together."""
        raise NotImplementedError


Read = Callable[[str, int, int], torch.Tensor]
"""Reads rows of a tensor of the architecture. Arguments: the tensor's name, the first row, the row after the last."""
EXPERT = re.compile(r"(.*\.)(\d+)(\..*)")
"""Splits the name of an expert's tensor in the files: the text before the expert's number, the number, the text after
it."""
BLOCK = 2**25
"""The largest count of numbers read at a time from a tensor. One row is always read whole."""


def empty(hf_config: Any, dtype: torch.dtype, world: World, code: bool) -> Any:
    """The model of `hf_config` with its parameters on the meta device and its buffers on world.device."""
    try:
        with torch.device("meta"):
            model: Any = kind_of(hf_config).auto.from_config(hf_config, dtype=dtype, trust_remote_code=code)
    except (ImportError, ValueError, TypeError, RuntimeError, KeyError, ZeroDivisionError) as error:
        raise ConfigError(f"A {hf_config.model_type} of this config cannot be built: {first_line(error)}") from error
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device=world.device)
    find_conversions(model)
    model.initialize_weights()  # computes the buffers, and skips parameters without memory
    for name, parameter in model.named_parameters():
        setattr(parameter, MARK, [Piece(name, 0, tuple(parameter.shape))])
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():  # such as the biases of routers
        if name in saved and buffer.is_floating_point() and buffer.dim():
            setattr(buffer, MARK, [Piece(name, 0, tuple(buffer.shape))])
    return model


def mark_joined(whole: nn.Parameter, parts: Sequence[Any]) -> None:
    """Mark `whole` as the rows of all `parts` in order, if all parts are marked."""
    found = [getattr(part, MARK, None) for part in parts]
    if all(found):
        starts = [sum(len(part) for part in parts[:index]) for index in range(len(parts))]
        joined = [
            piece._replace(first=start + piece.first)
            for start, pieces in zip(starts, found, strict=True)
            for piece in pieces  # type: ignore[union-attr]  # all are lists
        ]
        setattr(whole, MARK, joined)


def mark_mxfp4(weight: Any, codes: Any, scales: Any) -> None:
    """Mark `codes` and `scales` as tensors of the files. A checkpoint in MXFP4 has them in place of a marked
    `weight`."""
    for piece in getattr(weight, MARK, ()):
        setattr(codes, MARK, [Piece(piece.name + CODES, 0, (*scales.shape[:3], 16))])
        setattr(scales, MARK, [Piece(piece.name + SCALES, 0, tuple(scales.shape[:3]))])


def pieces_of(model: nn.Module) -> dict[str, list[Piece]]:
    """The pieces of each marked parameter of `model`, by the parameter's name."""
    return {name: getattr(weight, MARK) for name, weight in model.named_parameters() if hasattr(weight, MARK)}


def _buffers(model: nn.Module) -> dict[Piece, torch.Tensor]:
    """The buffers of `model` that are stored in the files. Each rank holds them whole."""
    return {getattr(buffer, MARK)[0]: buffer for buffer in model.buffers() if hasattr(buffer, MARK)}


@torch.no_grad()
def fill(
    model: nn.Module, pieces: Mapping[str, list[Piece]], read: Read, after_each: Callable[[], None] = lambda: None
) -> None:
    """Read this rank's rows of each parameter in `pieces` into the model. Numbers outside of all pieces become zero.
    Calls `after_each` after each piece."""
    for name, parameter in model.named_parameters():
        if name in pieces:
            local(parameter).zero_()
            for piece in pieces[name]:
                fill_piece(model, name, piece, read)
                after_each()


@torch.no_grad()
def fill_piece(model: nn.Module, name: str, piece: Piece, read: Read) -> None:
    """Read this rank's rows of `piece`, a part of the parameter `name`, into `model`."""
    parent, _, leaf = name.rpartition(".")
    owner = cast(Any, model.get_submodule(parent))
    parameter = owner._parameters[leaf]
    own, start = local(parameter), chunk_of(parameter).offset[0]
    end_of_piece = min(start + len(own), piece.first + piece.shape[0])
    for first, end in _blocks(max(start, piece.first), end_of_piece, piece.shape):
        into = own[first - start : end - start]
        if len(piece.shape) > 1:
            into = into.narrow(1, 0, piece.shape[1])
        rows = read(piece.name, first - piece.first, end - piece.first)
        if isinstance(owner, StoresRows) and into.dtype is torch.uint8:
            owner.store_rows(leaf, into, first, rows)
        else:
            into.copy_(rows.reshape(into.shape))


def _blocks(first: int, end: int, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide rows into blocks of at most BLOCK numbers: (first row, row after the last) of each. `shape`: the tensor's
    shape."""
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    return ((start, min(start + step, end)) for start in range(first, end, step))


@torch.no_grad()
def complete(model: nn.Module, world: World) -> None:
    """Make modules compute the values that depend on the rows of all ranks. All ranks call this together."""
    done: set[Any] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, StoresRows) and weight not in done:  # a tied head shares the embedding's weight
            done.add(weight)
            module.complete_rows(world)


def read(
    origin: Origin,
    model: Any,
    pieces: Mapping[str, list[Piece]],
    world: World,
    path: str,
    elsewhere: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Read this rank's rows from the files of `origin`. `path`: model.path, for messages. `elsewhere`: names and
    shapes of the tensors that read_each() has handed out.

    Raises StorageError on all ranks if weights are missing, have another shape, or are not finite.
    """
    wanted = {**_shapes(model, pieces), **(elsewhere or {})}
    with _opened(origin, model, wanted, path) as files:
        with phase("Reading the weights", sum(map(len, pieces.values())), "tensors", announce=False) as work:
            fill(model, pieces, files.rows, work.advance)
        for piece, buffer in _buffers(model).items():
            buffer.copy_(files.rows(piece.name, 0, piece.shape[0]))
        broken = [
            files.broken(pieces[name], parameter.dtype)
            for name, parameter in model.named_parameters()
            if name in pieces and not _finite(local(parameter), pieces[name][0].name)
        ]
        broken += [
            files.broken([piece], buffer.dtype) for piece, buffer in _buffers(model).items() if not _finite(buffer)
        ]
    for names in world.gather(broken[:1], "comparing the weights"):
        if names:
            raise _not_finite(origin, path, names[0])


def read_each(
    origin: Origin,
    model: Any,
    wanted: Mapping[str, tuple[int, ...]],
    world: World,
    dtype: torch.dtype,
    path: str,
    take: Callable[[str, torch.Tensor], None],
) -> None:
    """Read the tensors of `wanted`, given by name and shape, and call `take` with one whole tensor at a time, on
    world.device in `dtype`. `model`: the result of empty(). Raises as read() does, but only on the rank that sees the
    broken file."""
    expected = {**_shapes(model, pieces_of(model)), **wanted}
    reading = phase("Reading the weights", len(wanted), "tensors", announce=False)
    with _opened(origin, model, expected, path) as files, reading as work:
        for name, shape in work.over(wanted.items()):
            weight = torch.empty(shape, dtype=dtype, device=world.device)
            for first, end in _blocks(0, shape[0], shape):
                weight[first:end] = files.rows(name, first, end)
            if not _finite(weight):
                raise _not_finite(origin, path, files.broken([Piece(name, 0, shape)], dtype))
            take(name, weight)


def _shapes(model: nn.Module, pieces: Mapping[str, list[Piece]]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that the files must have for `pieces` and for the buffers of `model`."""
    every = [*(piece for parts in pieces.values() for piece in parts), *_buffers(model)]
    return {piece.name: piece.shape for piece in every}


class _Tensor(NamedTuple):
    """Where the files hold a tensor of the architecture."""

    parts: tuple[Mapping[int, str], ...]
    """The names of the tensors in the files that form this tensor. If it is stored whole: {0: name}. If experts are
    stored apart: one {expert: name} for each matrix of an expert (gate and up, or down), in the order in which they
    are joined."""
    shape: tuple[int, ...]
    """The shape of each of these tensors in the files."""
    apart: bool = False
    """Whether each expert is stored apart. An expert is a row of this tensor."""
    turned: bool = False
    """Whether the files have all experts in one tensor, but transposed."""

    @property
    def keys(self) -> list[str]:
        return [key for part in self.parts for key in part.values()]


class _Files:
    """The opened files of a model. `stored`: the file of each tensor in the files, by name; `tensors`: where each
    tensor of the architecture is stored."""

    def __init__(self, stored: Mapping[str, Any], tensors: Mapping[str, _Tensor]) -> None:
        self.stored, self.tensors = stored, tensors

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows of a tensor of the architecture; see Read."""
        tensor = self.tensors[name]
        if tensor.apart:
            matrices = [self._whole(part[row]) for row in range(first, end) for part in tensor.parts]
            return torch.cat(matrices).unflatten(0, (end - first, -1))
        (key,) = tensor.keys
        rows: torch.Tensor = self.stored[key].get_slice(key)[first:end]
        return rows.mT if tensor.turned else rows

    def broken(self, pieces: Sequence[Piece], dtype: torch.dtype) -> str:
        """The name in the files of the first tensor of `pieces` that is not finite in `dtype`. `dtype`: the
        parameter's."""
        packs = dtype is torch.uint8
        for piece in pieces:
            for key in self.tensors[piece.name].keys:
                if not _finite(self._whole(key) if packs else self._whole(key).to(dtype), key):
                    return key
        return self.tensors[pieces[0].name].keys[0]

    def _whole(self, key: str) -> torch.Tensor:
        return self.stored[key].get_tensor(key)


@contextmanager
def _opened(origin: Origin, model: Any, wanted: Mapping[str, tuple[int, ...]], path: str) -> Iterator[_Files]:
    """A context with the files of `origin` opened. `wanted`: names and shapes of tensors of the architecture. The
    files must hold these tensors and no others."""
    files = weights.readable_files(origin)
    with ExitStack() as opened:
        stored: dict[str, Any] = {}
        for file in files:
            handle = opened.enter_context(safe_open(file, framework="pt"))
            stored.update(dict.fromkeys(handle.keys(), handle))
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        yield _Files(stored, _found(stored, wanted, base, _place(origin, path)))


def key_of(name: str, names: Collection[str], prefix: str) -> str | None:
    """The name of a parameter among `names`, where it may have the decoder's prefix or lack it; None if it is not
    among them."""
    return next((key for key in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if key in names), None)


def names_in_files(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """{name in the model: name in its files} of each tensor. `keys`: the names in the files."""
    names = renamed(model, keys)[0]
    found = {name: key_of(name, names, model.base_model_prefix) for name in model.state_dict()}
    return {name: names[key] for name, key in found.items() if key is not None}


def _found(
    stored: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]], base: Any, place: str
) -> dict[str, _Tensor]:
    """Where each tensor of `wanted` is in the files. `wanted`: names and shapes. `stored`: the file of each tensor in
    the files, by name. Raises StorageError if the files do not fit `wanted`."""
    names, joined = renamed(base, stored)
    names |= {key: key for key in stored}
    found: dict[str, _Tensor] = {}
    missing: set[str] = set()
    converted: set[str] = set()
    for name, shape in wanted.items():
        if made := key_of(name, joined, base.base_model_prefix):
            operations, sources = joined[made]
            if operations in EXPERTS_APART:
                found[name], absent = _experts(sources, shape)
                missing |= absent
            elif operations == TURNED_EXPERTS:
                ((whole,),) = sources.values()
                turned = tuple(stored[whole].get_slice(whole).get_shape()) != shape
                stored_shape = (shape[0], shape[2], shape[1]) if turned else shape
                found[name] = _Tensor(({0: whole},), stored_shape, turned=turned)
            else:
                keys = [key for part in sources.values() for key in part]
                found[name] = _Tensor(tuple({0: key} for key in keys), ())
                converted.add(f"{keys[0]} ({words(operations)})")
        elif key := key_of(name, names, base.base_model_prefix):
            found[name] = _Tensor(({0: names[key]},), shape)
        else:
            missing.add(name)
    _require_fit(stored, found, missing, converted, base, place)
    return found


def _experts(sources: Mapping[str, Sequence[str]], shape: tuple[int, ...]) -> tuple[_Tensor, set[str]]:
    """Where the files hold experts that are stored apart, and the names of tensors that the files lack. `sources`: see
    Joined; `shape`: the shape of one tensor with all experts."""
    numbered = {
        pattern: [match for key in keys if (match := EXPERT.fullmatch(key))] for pattern, keys in sources.items()
    }
    parts: list[dict[int, str]] = []
    missing: set[str] = set()
    before = next((match[1] for found in numbered.values() for match in found), "")
    for pattern, found in numbered.items():
        parts.append({row: match[0] for match in found if (row := int(match[2])) < shape[0]})
        after = found[0][3] if found else pattern.rpartition("*")[2]
        missing.update(f"{before}{row}{after}" for row in range(shape[0]) if row not in parts[-1])
    return _Tensor(tuple(parts), (shape[1] // len(parts), *shape[2:]), apart=True), missing


def _require_fit(
    stored: Mapping[str, Any],
    found: Mapping[str, _Tensor],
    missing: Collection[str],
    converted: Collection[str],
    base: Any,
    place: str,
) -> None:
    shapes, packed = [], []
    for name, tensor in found.items():
        for key in tensor.keys:
            header = stored[key].get_slice(key)
            if tensor.shape and tuple(header.get_shape()) != tensor.shape:
                shapes.append(f"{key} ({tuple(header.get_shape())} in the file, {tensor.shape} in the config)")
            if "F" not in header.get_dtype() and not name.endswith(MXFP4):
                packed.append(f"{key} ({header.get_dtype()})")
    ignored, kind = not_in_files(base), kind_of(base.config)
    others = stored.keys() - {key for tensor in found.values() for key in tensor.keys}
    others = others.difference(kind.unused_weights(others), kind.drawn_weights(others))
    unexpected = {key for key in others if not any(re.search(pattern, key) for pattern in ignored)}
    troubles = weights.misfits(
        ("weights are converted in a way that fxtune does not know row by row", converted),
        ("weights of the architecture are not in the files", missing),
        ("weights in the files have no place in the architecture", unexpected),
        ("weights have another shape", shapes),
        ("weights are packed", packed),
    )
    if troubles:
        raise StorageError(
            f"{place} cannot be read row by row, which parallel.shard and quantized models larger than the memory "
            f"need: each tensor must be stored as in the architecture, or each expert apart. {troubles}. Use a "
            "complete copy, saved by transformers; or parallel.shard=1 and a device or host that holds the model, if "
            "this family's weights are converted as they are read."
        )


def _place(origin: Origin, path: str) -> str:
    return f"model.path={path}: the weights in {origin.folder}"


def _not_finite(origin: Origin, path: str, name: str) -> StorageError:
    return StorageError(
        f"{_place(origin, path)} hold NaN or infinite numbers, or numbers too large for model.dtype, in {name}. Use "
        "another copy of the model, or the dtype that it was saved in."
    )


def _finite(own: torch.Tensor, name: str = "") -> bool:
    """Whether no number is NaN or infinite. `name`: the tensor's name in the files."""
    if not own.numel() or (own.dtype is torch.uint8 and name.endswith(CODES)):
        return True
    if own.dtype is torch.uint8 and name.endswith(SCALES):
        return bool((own != 255).all())
    if own.dtype is torch.uint8:  # the bits of e4m3
        return bool((own & 0x7F != 0x7F).all())
    low, high = torch.aminmax(own)
    return bool((torch.stack([low, high]).float() * 0 == 0).all())
