"""The weights of an export: rank 0 writes files of bounded size, and all ranks compare the files with the model.

A model whose weights are divided over ranks is gathered one decoder layer at a time: rank 0 needs host memory for one
file and one layer. transformers merges experts and renames some weights when it loads a model. This is undone for each
layer, so the files have the names and shapes of the family's files on the hub. Then each rank reads its rows out of
the files and compares them, bit by bit, with the rows in its memory.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from fxtune.distributed.chunks import Chunk, chunk_of, is_divided, local, whole
from fxtune.distributed.world import World
from fxtune.models.end_tokens import GENERATION_CONFIG
from fxtune.models.mtp import read_mtp
from fxtune.models.prepared import PreparedModel
from fxtune.system.files.atomic_files import DTYPES, write_tensors
from fxtune.upstream.transformers import as_stored, saved_names

Result = TypeVar("Result")

FILE_BYTES = 5 * 10**9
"""The largest size of a file in bytes, unless a single tensor is larger."""
ADAPTER = "adapter_model.safetensors"
INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


class Mismatch(OSError):
    """A file of an export differs from the trained model."""


class LoadMismatch(Mismatch):
    """The files are right, but plain peft or transformers loads something else from them."""


@dataclass
class ExportedWeights:
    """What write() has written to `folder`."""

    folder: Path
    files: Mapping[str, str]
    """{name of a tensor: name of its file}."""
    live: Tensors
    """Tensors of the model; each must equal the tensor of its name in the files."""
    converted: list[Tensors] = field(default_factory=list)
    """Layers in the form of the model, whose tensors have other names or shapes in the files."""
    model: Any = None
    mtp: dict[str, Path] = field(default_factory=dict)
    """See PreparedModel.mtp."""
    _handles: dict[Path, Any] = field(default_factory=dict)

    @staticmethod
    def write(model: PreparedModel, folder: Path, world: World) -> ExportedWeights:
        """Write the adapter of a PEFT model with its options, or a whole model with its config. All ranks of `world`
        call it. Raises OSError on all ranks."""
        if hasattr(model.module, "get_base_model"):
            return _write_adapter(model, folder, world)
        return _write_model(model, folder, world)

    def compare(self, world: World) -> None:
        """Raise Mismatch, on all ranks, unless the files hold exactly the weights of the model."""
        on_main(world, self._require_complete)
        with ExitStack() as opened:
            on_all(world, partial(self._compare_live, opened, world.main))
            for layer in self.converted:
                on_main(world, partial(self._compare_converted, opened, _gathered(layer, world)))
            on_main(world, partial(self._compare_mtp, opened))

    def _require_complete(self) -> None:
        """Raise Mismatch unless the files and their index name the tensors that were written, each in its file."""
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    found.update(dict.fromkeys(file.keys(), path.name))
            except (SafetensorError, OSError) as error:
                raise Mismatch(f"{path.name} cannot be read back: {error}") from error
        index = self.folder / INDEX
        named = {"the files": found}
        if len(set(self.files.values())) > 1:
            try:
                named[INDEX] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (OSError, ValueError, LookupError) as error:
                raise Mismatch(f"{INDEX} cannot be read back: {error}") from error
        elif index.exists():
            raise Mismatch(f"{INDEX} is there, and the weights are in one file")
        for where, files in named.items():
            for name in sorted(files.keys() ^ self.files.keys()):
                raise Mismatch(f"{name} is {'missing in' if name in self.files else 'left over in'} {where}")
            for name, file in self.files.items():
                if files[name] != file:
                    raise Mismatch(f"{name} is in {files[name]} by {where}, and was written to {file}")

    def _compare_live(self, opened: ExitStack, main: bool) -> None:
        """Compare this rank's part of each tensor; undivided tensors on rank 0 only."""
        for name, tensor in self.live.items():
            if is_divided(tensor) or main:
                self._require_equal(opened, name, local(tensor), chunk_of(tensor))

    def _compare_converted(self, opened: ExitStack, layer: Tensors) -> None:
        for name, tensor in as_stored(self.model, layer).items():
            self._require_equal(opened, name, tensor, Chunk.whole(tuple(tensor.shape)))

    def _compare_mtp(self, opened: ExitStack) -> None:
        for name, tensor in read_mtp(self.mtp):
            self._require_equal(opened, name, tensor, Chunk.whole(tuple(tensor.shape)))

    def _require_equal(self, opened: ExitStack, name: str, held: torch.Tensor, chunk: Chunk) -> None:
        """Raise Mismatch unless part `chunk` of the tensor `name` in its file equals `held`. `opened` closes the
        file."""
        if chunk.empty:
            return
        path = self.folder / self.files.get(name, "model.safetensors")
        try:
            if path not in self._handles:
                self._handles[path] = opened.enter_context(safe_open(path, "pt"))
            file = self._handles[path]
            header = file.get_slice(name)
            same = tuple(header.get_shape()) == chunk.shape and header.get_dtype() == DTYPES[held.dtype]
            read = header[chunk.within(Chunk.whole(chunk.shape))] if same and chunk.shape else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise Mismatch(f"{name} cannot be read back from {path.name}: {error}") from error
        if not (same and torch.equal(bits(read), bits(held))):
            raise Mismatch(f"{name}, read back from {path.name}, is not what the model holds{_apart(read, held)}")


def on_main(world: World, work: Callable[[], Result]) -> Result:
    """Call work() on rank 0 only. All ranks get its result, or raise its OSError."""
    return on_all(world, lambda: work() if world.main else None)[0]  # type: ignore[return-value]


def on_all(world: World, work: Callable[[], Result]) -> list[Result]:
    """The results of work() on all ranks. An OSError or Mismatch of one rank is raised on all ranks."""
    error: OSError | None = None
    result: Any = None
    try:
        result = work()
    except OSError as problem:
        error = problem
    kind = type(error) if isinstance(error, Mismatch) else OSError
    found = world.gather((result, None if error is None else str(error), kind), "exporting")
    for rank, (_, words, kind) in enumerate(found):
        if words is not None:
            raise kind(f"rank {rank}: {words}" if rank else words) from error
    return [returned for returned, *_ in found]


def _write_adapter(prepared: PreparedModel, folder: Path, world: World) -> ExportedWeights:
    from peft import get_peft_model_state_dict

    model = prepared.module
    state = model.state_dict()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    divided = {name: tensor for name, tensor in state.items() if name in trained and is_divided(tensor)}
    gathered = _gathered(divided, world)

    def write() -> None:
        for adapter in model.peft_config.values():
            if isinstance(adapter.target_modules, set):  # the order of a set differs between processes
                adapter.target_modules = sorted(adapter.target_modules)
        try:
            # By default peft asks the hub whether the vocabulary was resized, to save the embedding in that case.
            model.save_pretrained(folder, save_embedding_layers=False, state_dict={**state, **gathered})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        if prepared.config_edited:
            model.config.save_pretrained(folder)
        if prepared.added_ends:
            # save_pretrained() would refuse a base whose sampling options contradict each other.
            model.generation_config.to_json_file(folder / GENERATION_CONFIG)

    on_main(world, write)
    with warnings.catch_warnings(action="ignore"):
        live = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return ExportedWeights(folder, dict.fromkeys(live, ADAPTER), live)


def _write_model(prepared: PreparedModel, folder: Path, world: World) -> ExportedWeights:
    model, mtp = prepared.module, prepared.mtp
    files, live, converted = _Files(folder), {}, []
    on_main(world, lambda: model.save_pretrained(folder, state_dict={}))  # the config, and code that came with it
    for layer in _layers(_state(model)):
        if on_main(world, partial(_add, files, model, layer, _gathered(layer, world))):
            live.update(layer)
        else:
            converted.append(layer)

    def copy_mtp() -> None:
        for name, tensor in read_mtp(mtp):
            files.add({name: tensor})

    on_main(world, copy_mtp)
    return ExportedWeights(folder, on_main(world, files.finish), live, converted, model, mtp)


def _add(files: _Files, model: Any, layer: Tensors, gathered: Tensors) -> bool:
    """Write a layer. Returns whether its tensors have the same names and shapes in the files as in the model."""
    stored = as_stored(model, gathered)
    files.add(stored)
    return {name: weight.shape for name, weight in stored.items()} == {
        name: weight.shape for name, weight in layer.items()
    }


class _Files:
    """Collects tensors of a model, and writes a file whenever it is full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: Tensors = {}
        self._bytes: list[int] = [0]
        self._names: list[list[str]] = []
        self._parameters = 0

    def add(self, tensors: Tensors) -> None:
        """Add tensors. They must not change until finish(). Raises OSError."""
        for name, tensor in tensors.items():
            if self._tensors and self._bytes[-1] + tensor.nbytes > FILE_BYTES:
                self._flush()
            self._tensors[name] = tensor.detach()
            self._bytes[-1] += tensor.nbytes
            self._parameters += tensor.numel()

    def finish(self) -> dict[str, str]:
        """Write the last file, and the index if there are several. Returns the file of each tensor. Raises OSError."""
        self._flush()
        count = len(self._names)
        if count == 1:
            (self.folder / self._staged(0)).rename(self.folder / "model.safetensors")
            return dict.fromkeys(self._names[0], "model.safetensors")
        files = {}
        for number, names in enumerate(self._names):
            name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / self._staged(number)).rename(self.folder / name)
            files.update(dict.fromkeys(names, name))
        sizes = {"total_parameters": self._parameters, "total_size": sum(self._bytes)}
        index = json.dumps({"metadata": sizes, "weight_map": files}, indent=2, sort_keys=True)
        (self.folder / INDEX).write_text(index + "\n")
        return files

    def _flush(self) -> None:
        write_tensors(self.folder / self._staged(len(self._names)), self._tensors)
        self._names.append(list(self._tensors))
        self._bytes.append(0)
        self._tensors = {}

    @staticmethod
    def _staged(number: int) -> str:
        return f"model-{number + 1:05d}.safetensors"


def _state(model: Any) -> Tensors:
    """The tensors for a model's files, still divided over ranks. Tied weights have only one of their names."""
    state = model.state_dict(keep_vars=True)
    # transformers recognizes tied weights by their memory, and an empty part of a divided weight has no memory.
    stand_ins = {id(tensor): torch.empty(1) for tensor in state.values()}
    kept = saved_names(model, {name: stand_ins[id(tensor)] for name, tensor in state.items()})
    return {name: state[name] for name in kept}


def _layers(state: Tensors) -> list[Tensors]:
    """`state` divided into decoder layers. The first entry has the tensors outside layers."""
    layers: dict[str, Tensors] = {"": {}}
    for name, tensor in state.items():
        found = re.match(r".*?\.\d+\.", name)
        layers.setdefault(found[0] if found else "", {})[name] = tensor
    return list(layers.values())


def _gathered(layer: Tensors, world: World) -> Tensors:
    """The whole tensors of `layer` on rank 0, gathered one by one; nothing on other ranks."""
    found = {}
    for name, tensor in layer.items():
        full = whole(tensor)
        if world.main:
            found[name] = full.cpu() if is_divided(tensor) else full
    return found


def _apart(read: torch.Tensor, held: torch.Tensor) -> str:
    if (read.shape, read.dtype) != (held.shape, held.dtype):
        return f"; {list(read.shape)}, {read.dtype} there; {list(held.shape)}, {held.dtype} here"
    count = int((read.double() != held.double().cpu()).sum())
    return f": {count:,} of {held.numel():,} numbers differ" if count else ": some bits differ"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
