"""A small model that several processes hold in parts, and what they do with its checkpoints.

    run_ranks(2, save, folder)          # save(folder, world) in two processes; their results

The processes are forked from a server that has imported torch. Their ranks meet over a file.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support.decoder_sizes import decoder_sizes
from torch import nn

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint import host_copy
from fxtune.checkpoint import save as saving
from fxtune.checkpoint.manager import Checkpoint, CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState
from fxtune.distributed.background import BackgroundGroup
from fxtune.distributed.chunks import Chunk, chunk_of, divided_like, is_divided, local, whole
from fxtune.distributed.world import World
from fxtune.errors import RankError, StorageError
from fxtune.models.prepared import PreparedModel
from fxtune.training.run.state import copy_weights

SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["support.sharded", "support.sharding", "support.image_models", "torch.distributed.fsdp", "peft", "numpy"]
"""What the server imports once, so that not every process of a test imports it."""


def run_ranks(count: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """work(*given, world) in `count` processes; what each returns, or the exit code of one that died.

    Raises AssertionError with the words of the first that raised.
    """
    SERVER.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1])):  # it does not get our sys.path
        forkserver.ensure_running()
    with tempfile.TemporaryDirectory() as meeting:
        ends = []
        for rank in range(count):
            mine, theirs = SERVER.Pipe()
            process = SERVER.Process(target=_rank, args=(theirs, meeting, rank, count, work, given), daemon=True)
            process.start()
            theirs.close()
            ends.append((process, mine))
        results: list[Any] = []
        for process, end in ends:
            try:
                results.append(end.recv())
            except EOFError:
                process.join()
                results.append(process.exitcode)
        for process, end in ends:
            end.close()
            process.join()
    for result in results:
        if isinstance(result, AssertionError):
            raise result
    return results


def _rank(end: Connection, meeting: str, rank: int, count: int, work: Callable[..., Any], given: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=count)
    try:
        with World(torch.device("cpu"), rank, count) as world:
            end.send(work(*given, world))
            end.poll(None)  # a rank that ends breaks the connections of a rank that is still making them
    except BaseException as error:  # the test shows it
        end.send(AssertionError(f"rank {rank}: {type(error).__name__}: {error}"))
        raise


class Toy(nn.Module):
    """A model whose rows do not divide by two or four. Of four ranks the last one has no rows of some weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.first(x)))
        return result


Weights = dict[str, torch.Tensor]


class Training:
    """The model, divided over the ranks of `world` in `replicas` equal groups, and AdamW on what this rank holds."""

    def __init__(self, world: World, seed: int = 0, replicas: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = Toy()
        if world.size > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            shape = (replicas, world.size // replicas) if replicas > 1 else (world.size,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for module in (self.model.first, self.model.norm, self.model):
                fully_shard(module, mesh=mesh)
        self.weights: Weights = dict(self.model.named_parameters())
        self.own = {name: nn.Parameter(local(weight)) for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.own.values(), lr=1e-2)

    def step(self, steps: int = 2) -> None:
        """Steps of which each rank sees the same rows."""
        for step in range(steps):
            torch.manual_seed(step)
            self.model(torch.randn(4, 6)).square().mean().backward()
            for name, weight in self.weights.items():
                assert weight.grad is not None
                self.own[name].grad = local(weight.grad)
            self.optimizer.step()
            self.model.zero_grad()

    def moments(self) -> Weights:
        found = {}
        for name, weight in self.weights.items():
            for key, value in self.optimizer.state[self.own[name]].items():
                found[f"{name}/{key}"] = value if key == "step" else divided_like(value, weight)
        return found

    def load(self, saved: Checkpoint) -> None:
        copy_weights(saved.weights, self.weights)
        for full, moment in saved.moments.items():
            name, _, key = full.rpartition("/")
            self.optimizer.state[self.own[name]][key] = local(moment)


def checkpoints(folder: Path, world: World, training: Training, **config: Any) -> Checkpoints:
    found = Checkpoints(folder / "checkpoints", CheckpointConfig(**config), note=print, ranks=BackgroundGroup(world))
    found.prepare(training.weights)
    return found


def save(folder: Path, replicas: int, world: World) -> list[str]:
    """Train, save checkpoint 2, and rank 0 writes the whole tensors beside it. Returns the files of the checkpoint."""
    training = Training(world, replicas=replicas)
    training.step()
    everything = {name: whole(one).clone() for name, one in {**training.weights, **training.moments()}.items()}
    if world.main:
        save_file(everything, folder / "whole.safetensors")
    with checkpoints(folder, world, training) as found:
        found.save(TrainState(step=2, figures={"rank": world.rank}), training.weights, training.moments())
        for one in {**training.weights, **training.moments()}.values():
            local(one).zero_()  # the copy has been taken
        found.wait()
    return sorted(path.name for path in (folder / "checkpoints" / "step-00000002").iterdir())


def load(folder: Path, world: World) -> int:
    """Load the newest checkpoint into another model and compare each part with the whole tensors. Returns its step."""
    training = Training(world, seed=1)
    with checkpoints(folder, world, training) as found:
        saved = found.load_newest(training.weights)
    assert saved is not None
    assert not any(map(is_divided, saved.moments.values())), "they stay in host memory"
    training.load(saved)
    reference = load_file(folder / "whole.safetensors")
    everything = {**training.weights, **training.moments()}
    assert everything.keys() == reference.keys()
    for name, tensor in everything.items():
        chunk = chunk_of(tensor)
        wanted = reference[name][chunk.within(Chunk.whole(chunk.shape))]
        assert torch.equal(local(tensor), wanted), name
        assert is_divided(tensor) == (world.size > 1 and not name.endswith("/step")), name
    training.step(1)  # AdamW continues with the moments
    return saved.state.step


def save_and_die(folder: Path, dying: int, world: World) -> tuple[str, list[str]]:
    """Save checkpoints 2 and 3; rank `dying` kills itself when it has written its part of checkpoint 3. Returns the
    error of the others, and what is then in the folder.
    """
    training = Training(world)
    training.step()
    found = checkpoints(folder, world, training)
    found.save(TrainState(step=2), training.weights, training.moments())
    found.wait()
    if world.rank == dying:

        def write(*given: Any) -> Any:
            real(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        real, stored.write = stored.write, write  # type: ignore[assignment]
    found.save(TrainState(step=3), training.weights, training.moments())
    try:
        found.wait()
    except RankError as error:
        return str(error), names(folder)
    raise AssertionError("the save of step 3 did not fail")


def meet_faults(folder: Path, failing: int, world: World) -> dict[str, Any]:
    """Save checkpoints while rank `failing` alone has a full disk, then too little memory. Returns what this rank saw."""
    training, notes = Training(world), []
    training.step()
    found, seen = checkpoints(folder, world, training), {}
    found.note = notes.append

    def save(step: int) -> str | None:
        found.save(TrainState(step=step, figures={"rank": world.rank}), training.weights, training.moments())
        error = found.settle()
        return str(error) if error else None

    seen["first"] = save(1), names(folder)
    with mock.patch.object(stored, "write", _full if world.rank == failing else stored.write):
        seen["full"] = save(2), names(folder)
    room = 0 if world.rank == failing else 2**40
    with mock.patch.object(host_copy, "memory", return_value=(room, room)):
        seen["short"] = save(2), names(folder)
    written = (folder / "checkpoints" / "step-00000002").stat().st_mtime_ns
    seen["again"] = save(2), (folder / "checkpoints" / "step-00000002").stat().st_mtime_ns == written
    seen["notes"] = [text.split(". ")[0] for text in notes]
    return seen


def _full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def pass_over_damage(folder: Path, world: World) -> tuple[int, list[str], int]:
    """Load a folder of which a part is damaged, go on, save the damaged step again, and load it."""
    training, notes = Training(world), []
    found = checkpoints(folder, world, training)
    found.note = notes.append
    saved = found.load_newest(training.weights)
    assert saved is not None
    found.save(TrainState(step=3), training.weights, {})
    found.wait()
    again = found.load_newest(training.weights)
    assert again is not None
    return saved.state.step, notes, again.state.step


def look_for_folder(folder: Path, world: World) -> str:
    """The error of ranks that do not share a disk."""
    saving.SHOWN_WITHIN = 0.5
    own = folder / f"host{world.rank}"
    own.mkdir()
    try:
        checkpoints(own, world, Training(world))
    except StorageError as error:
        return str(error)
    raise AssertionError("nobody missed the folder of rank 0")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


SIZES: dict[str, Any] = dict(
    **decoder_sizes(vocabulary=50, hidden=32, intermediate=48, layers=2, heads=4, key_heads=2),
)
"""The shape of the small models below."""


def llama(tied: bool = False) -> Any:
    """A small random Llama for save_model()."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return LlamaForCausalLM(config)


def mixtral() -> Any:
    """A small random mixture of experts, whose files have each expert apart."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4)
    return MixtralForCausalLM(config)


MODELS = {"llama": llama, "tied llama": partial(llama, tied=True), "mixtral": mixtral}


def export(folder: Path, kind: str, file_bytes: int, broken: int, world: World) -> str:
    """Export a divided model in files of at most `file_bytes`. On rank `broken` (-1: none) the weights change before
    they are compared. Returns the error.
    """
    from torch.distributed.fsdp import fully_shard

    from fxtune.export import weights
    from fxtune.export.save import save_model

    model = MODELS[kind]()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    weights.FILE_BYTES = file_bytes
    compare = weights.ExportedWeights.compare

    def changed(written: Any, world: World) -> None:
        if world.rank == broken:
            local(next(iter(written.live.values()))).view(-1)[0] += 1
        compare(written, world)

    with mock.patch.object(weights.ExportedWeights, "compare", changed):
        try:
            save_model(PreparedModel(model), NoTokenizer(), folder, world=world)
        except StorageError as error:
            return str(error)
    return ""
