"""Draws the weights of a model that several ranks hold in parts. The numbers are the same as in one process.

Random numbers form one sequence, in the order in which constructors and init functions ask for numbers. So each rank
draws all numbers, one parameter at a time, and keeps its rows. The model is built twice, with matrices on the meta
device. The first build only finds the last write to each matrix. The second build repeats the writes with one matrix
in memory at a time, and hands over each matrix after its last write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.errors import ConfigError
from fxtune.models.shards import Piece, fill, fill_piece
from fxtune.system.terminal.progress import phase
from fxtune.upstream.torch import TorchDispatchMode, changes_arguments, storage_id

OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "bernoulli_", "exponential_"}
"""Names of operators that overwrite every element of a tensor."""


def draw(model: nn.Module, pieces: Mapping[str, list[Piece]], build: Callable[[], Any]) -> None:
    """Draw each parameter in `pieces` and write the rows that this rank holds. `build` seeds and builds the whole
    model.

    Raises ConfigError if the model does not draw its matrices one by one.
    """
    parameter_of = {piece.name: (name, piece) for name, parts in pieces.items() for piece in parts}
    fill(model, {name: [] for name in pieces}, lambda *_: torch.empty(0))  # zeros where no piece is written

    def write(name: str, value: torch.Tensor) -> None:
        parameter, piece = parameter_of[name]
        fill_piece(model, parameter, piece, lambda _, first, end: value[first:end])

    draw_each({name: piece.shape for name, (_, piece) in parameter_of.items()}, build, write)


def draw_each(
    shapes: Mapping[str, tuple[int, ...]], build: Callable[[], Any], take: Callable[[str, torch.Tensor], None]
) -> None:
    """Call take(name, value) for each parameter named in `shapes`, one at a time. Raises ConfigError as draw()
    does."""
    with _Writes() as first_build:
        names = {storage_id(weight): name for name, weight in build().named_parameters()}
    # The model's own init function overwrites the values of a constructor, so a parameter's last turn counts.
    last = {name: turn for turn, storage in enumerate(first_build.turns) if (name := names.get(storage)) is not None}
    turns = {turn: name for name, turn in last.items() if name in shapes}

    def end_turn(turn: int, value: torch.Tensor) -> None:
        if turn in turns:
            with _torch_defaults():
                take(turns[turn], value.view(shapes[turns[turn]]))
            work.advance()

    with phase("Drawing random weights", len(turns), "matrices", announce=False) as work, _Writes(end_turn):
        built = build()
    for name, parameter in built.named_parameters():
        if name in shapes and not parameter.is_meta:  # a vector: it has memory, unlike a matrix
            take(name, parameter.detach())


@contextmanager
def _torch_defaults() -> Iterator[None]:
    """A context with torch's own default dtype and device. While a model is built, other defaults are set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


class _Writes(TorchDispatchMode):
    """A mode in which new matrices get no memory. A turn is a series of writes to one matrix.

    `end_turn`: called with each turn's number and the written matrix. None: the writes are only recorded in `turns`.
    """

    def __init__(self, end_turn: Callable[[int, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.end_turn = end_turn
        self.turns: list[int] = []
        """The id of the storage that was written in each turn."""
        self.kept: list[torch.Tensor] = []
        """All matrices, kept alive so that a new matrix does not get the storage id of a freed matrix."""
        self.devices: dict[int, torch.device] = {}
        """For the storage id of each matrix, the device on which the matrix was requested."""
        self.value = torch.empty(0)
        """The memory of the matrix of the current turn."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._end_turn()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "empty" and len(args[0]) > 1:
            device = torch.device(kwargs.get("device") or "cpu")
            made = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
            self.kept.append(made)
            self.devices[storage_id(made)] = device
            return made
        target = args[0] if args else None
        if not (isinstance(target, torch.Tensor) and storage_id(target) in self.devices and changes_arguments(func)):
            return func(*args, **kwargs)
        self._write(func, name, target, args, kwargs)
        return target

    def _write(self, func: Any, name: str, target: torch.Tensor, args: Any, kwargs: Any) -> None:
        storage = storage_id(target)
        if not self.turns or self.turns[-1] != storage:
            self._end_turn()
            self.turns.append(storage)
            size = target.untyped_storage().nbytes() // target.itemsize
            if name not in OVERWRITES or target.numel() != size:
                raise ConfigError(
                    f"model.init=random: this model goes back to an earlier matrix and changes it by {name}. "
                    "parallel.shard cannot repeat this. Set parallel.shard=1."
                )
            if self.end_turn is not None:
                self.value = torch.empty(size, dtype=target.dtype, device=self.devices[storage])
        if self.end_turn is not None:
            real = partial(self._real, storage)
            func(*map(real, args), **{key: real(value) for key, value in kwargs.items()})

    def _real(self, storage: int, value: Any) -> Any:
        """An argument of an operator. A tensor without memory is replaced by the same view of `self.value`."""
        if not (isinstance(value, torch.Tensor) and value.is_meta):
            return value
        assert storage_id(value) == storage, "a matrix is computed from another matrix"
        return self.value.as_strided(value.shape, value.stride(), value.storage_offset())

    def _end_turn(self) -> None:
        if self.turns and self.end_turn is not None:
            self.end_turn(len(self.turns) - 1, self.value)
