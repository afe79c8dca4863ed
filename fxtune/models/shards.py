"""Builds a model that is divided over ranks: first without weights, then each rank reads its own rows of the weights.
One process does the same with a model that fits nowhere in 16 bits: it quantizes the rows as it reads them.

    built = empty(...)            every parameter on the meta device, each marked with its name in the files
    ...                           techniques replace modules; who joins parameters marks the result (mark_joined)
    wanted = pieces_of(built)     which rows of which tensor of the files each parameter consists of
    shard(built, ...)             memory for this rank's rows (distributed/sharding.py)
    read(...)                     those rows, from the files
    complete(built, ...)          what modules compute from the rows of all ranks

For formats that cannot quantize a part of a matrix (nf4, int8), read_each() hands out whole tensors before shard().

A module whose weight is not stored as the files have it (fp8) is one that StoresRows.

safetensors reads a slice of a tensor without the rest of it, so no rank ever holds the model, on its device or in its
memory. The files must store weights as the architecture has them, under its names or under older names that
transformers knows. Families whose weights transformers converts while it reads them (experts of a mixture) are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fxtune.distributed.chunks import chunk_of, local
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, first_line
from fxtune.models import weights
from fxtune.models.kinds.known import kind_of
from fxtune.system.hub import Origin
from fxtune.upstream.transformers import find_conversions, not_in_files, renamed

MARK = "stored_pieces"
MXFP4 = CODES, SCALES = "_blocks", "_scales"
"""Ends of the names of experts that a checkpoint stores in MXFP4: codes [experts, out, in / 32, 16] and exponents
[experts, out, in / 32], both uint8."""


class Piece(NamedTuple):
    """A tensor of the files that is a part of a parameter, from its first column on."""

    name: str
    first: int
    """The row of the parameter where it begins."""
    shape: tuple[int, ...]


class StoresRows:
    """A module that stores codes, of dtype uint8, in place of the rows of its weight."""

    def store_rows(self, into: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Write `rows` of the files to `into`, this rank's memory for them. `first`: their first row in the weight."""
        raise NotImplementedError

    def complete_rows(self, world: World) -> None:
        """Compute what follows from the rows of all ranks. All ranks call this together."""
        raise NotImplementedError


Read = Callable[[str, int, int], torch.Tensor]
"""(name, first row, row after the last) -> these rows of a tensor of the files."""


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
    model.initialize_weights()  # computes the buffers; on parameters without memory it does nothing
    for name, parameter in model.named_parameters():
        setattr(parameter, MARK, [Piece(name, 0, tuple(parameter.shape))])
    return model


def mark_joined(whole: nn.Parameter, parts: Sequence[Any]) -> None:
    """Mark `whole` as the rows of `parts`, one part after the other, if these are marked."""
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
    """Mark `codes` and `scales` as the tensors that a checkpoint in MXFP4 has in place of a marked `weight`."""
    for piece in getattr(weight, MARK, ()):
        setattr(codes, MARK, [Piece(piece.name + CODES, 0, (*scales.shape[:3], 16))])
        setattr(scales, MARK, [Piece(piece.name + SCALES, 0, tuple(scales.shape[:3]))])


def pieces_of(model: nn.Module) -> dict[str, list[Piece]]:
    """The pieces of each marked parameter of `model`, by its name in it."""
    return {name: getattr(weight, MARK) for name, weight in model.named_parameters() if hasattr(weight, MARK)}


@torch.no_grad()
def fill(model: nn.Module, pieces: Mapping[str, list[Piece]], read: Read) -> None:
    """Write the rows that this rank holds of each parameter of `pieces`; numbers without a piece become zero."""
    for name, parameter in model.named_parameters():
        if name in pieces:
            local(parameter).zero_()
            for piece in pieces[name]:
                fill_piece(model, name, piece, read)


@torch.no_grad()
def fill_piece(model: nn.Module, name: str, piece: Piece, read: Read) -> None:
    """Write the rows of `piece`, a part of the parameter `name` of `model`, that this rank holds."""
    parent, _, leaf = name.rpartition(".")
    owner = cast(Any, model.get_submodule(parent))
    parameter = owner._parameters[leaf]
    own, start = local(parameter), chunk_of(parameter).offset[0]
    first, end = max(start, piece.first), min(start + len(own), piece.first + piece.shape[0])
    if first < end:
        into = own[first - start : end - start]
        if len(piece.shape) > 1:
            into = into.narrow(1, 0, piece.shape[1])
        rows = read(piece.name, first - piece.first, end - piece.first)
        if isinstance(owner, StoresRows) and into.dtype is torch.uint8:
            owner.store_rows(into, first, rows)
        else:
            into.copy_(rows.reshape(into.shape))


@torch.no_grad()
def complete(model: nn.Module, world: World) -> None:
    """Let modules compute what follows from the rows that all ranks have stored. All ranks call this together."""
    done: set[Any] = set()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, StoresRows) and weight not in done:  # a tied head and embedding have one weight
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
    wanted = {piece.name: piece.shape for parts in pieces.values() for piece in parts}
    with _opened(origin, model, {**wanted, **(elsewhere or {})}, path) as rows:
        fill(model, pieces, rows)
    broken = [
        name
        for name, parameter in model.named_parameters()
        if name in pieces and not _finite(local(parameter), pieces[name][0].name)
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
    """Hand each tensor of `wanted`, by name and shape, to `take`, whole, on world.device in `dtype`, one at a time.
    `model`: empty(). Raises what read() raises, but only on the rank that sees the broken file."""
    every = {piece.name: piece.shape for parts in pieces_of(model).values() for piece in parts}
    with _opened(origin, model, {**every, **wanted}, path) as rows:
        for name, shape in wanted.items():
            weight = rows(name, 0, shape[0]).to(world.device, dtype)
            if not _finite(weight):
                raise _not_finite(origin, path, name)
            take(name, weight)


@contextmanager
def _opened(origin: Origin, model: Any, wanted: Mapping[str, tuple[int, ...]], path: str) -> Iterator[Read]:
    """Reads rows of `wanted`, tensors by name and shape, which must be all that the files of `origin` hold."""
    from safetensors import safe_open

    files = weights.readable_files(origin)
    with ExitStack() as opened:
        stored: dict[str, Any] = {}
        for file in files:
            handle = opened.enter_context(safe_open(file, framework="pt"))
            stored.update(dict.fromkeys(handle.keys(), handle))
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        names = {**{name: key for key, name in renamed(base, stored).items()}, **{key: key for key in stored}}
        found = {name: _key(name, names, base.base_model_prefix) for name in wanted}
        keys = {name: names[stored_as] for name, stored_as in found.items() if stored_as is not None}
        _require_fit(stored, wanted, keys, base, _place(origin, path))

        def rows(name: str, first: int, end: int) -> torch.Tensor:
            tensor: torch.Tensor = stored[keys[name]].get_slice(keys[name])[first:end]
            return tensor

        yield rows


def _key(name: str, names: Mapping[str, str], prefix: str) -> str | None:
    """The key of a parameter among the `names` of tensors: its name, with or without the prefix of the decoder."""
    return next((key for key in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if key in names), None)


def _require_fit(
    stored: Mapping[str, Any],
    wanted: Mapping[str, tuple[int, ...]],
    keys: Mapping[str, str],
    base: Any,
    place: str,
) -> None:
    shapes, packed = [], []
    for name, key in keys.items():
        header = stored[key].get_slice(key)
        if tuple(header.get_shape()) != wanted[name]:
            shapes.append(f"{key} ({tuple(header.get_shape())} in the file, {wanted[name]} in the config)")
        if "F" not in header.get_dtype() and not name.endswith(MXFP4):
            packed.append(f"{key} ({header.get_dtype()})")
    ignored, kind = not_in_files(base), kind_of(base.config)
    others = stored.keys() - set(keys.values())
    others = others.difference(kind.unused_weights(others), kind.drawn_weights(others))
    unexpected = {key for key in others if not any(re.search(pattern, key) for pattern in ignored)}
    troubles = weights.misfits(
        ("weights of the architecture are not in the files", wanted.keys() - keys.keys()),
        ("weights in the files have no place in the architecture", unexpected),
        ("weights have another shape", shapes),
        ("weights are packed", packed),
    )
    if troubles:
        raise StorageError(
            f"{place} cannot be read row by row, which parallel.shard and quantized models larger than the memory "
            f"need: each tensor must be stored as in the architecture. {troubles}. Use a complete copy, saved by "
            "transformers; or parallel.shard=1 and a device or host that holds the model, if this family's weights "
            "are converted as they are read (experts of a mixture)."
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
