"""The ranks of a run: the device of this rank, the ranks' common decisions, and their sums.

A run has one process (a rank) for each GPU, or several on a CPU. torchrun and fxtune's own launcher (launch.py) start
them with RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in the environment, as torch.distributed defines them. Tensors
on a GPU travel through NCCL; decisions travel through gloo on the CPU, so they never wait for a GPU.

With one rank every method returns at once, and torch.distributed is not touched.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from fxtune.distributed import failure
from fxtune.distributed.heartbeat import Heartbeat
from fxtune.distributed.parallel import DEGREES, Degrees
from fxtune.distributed.ranks import HEARTBEATS, MEETING, meeting_time, process_rank
from fxtune.distributed.watch import STEP_SECONDS, StoreWatch
from fxtune.errors import ConfigError, HardwareError, LostRankError, RankError, UserError, first_line, shortened
from fxtune.system.machine.facts import BROKEN, MachineFacts, installed_packages
from fxtune.system.machine.host import cores, memory
from fxtune.system.machine.nvml import Card
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.system.process.threads import set_threads
from fxtune.system.terminal.console import say
from fxtune.system.terminal.units import GIB
from fxtune.upstream import torch as upstream

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")

CONTEXT = GIB
"""The most bytes of GPU memory that the driver and the context of a process take."""
_LIMITED: set[torch.device] = set()
"""GPUs whose memory a run of this process has limited. The next run of a sweep sets another limit, or removes it."""
_WATCH: list[StoreWatch] = []
"""The watch of the current run's ranks, if fxtune's launcher did not start them."""
PATIENCE = timedelta(hours=6)
"""How long a rank waits for another rank before torch gives up. Rank 0 may tokenize, export or answer questions for
hours while the others wait. A dead rank is noticed long before, by its closed connection."""


NCCL = {
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast needs rights that containers often lack
    "NCCL_CTA_POLICY": "2",  # gathers into symmetric memory by copy engines (copy_engines.py)
    # The flight recorder: if a GPU is stuck, the last collectives of each rank go to a file for torch's `fr_trace`.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": os.path.join(tempfile.gettempdir(), "fxtune_nccl_rank_"),
}
"""Environment variables that are set for NCCL, unless the user has set them."""
STUCK = timedelta(seconds=STEP_SECONDS + 600)
"""How long a GPU waits for another GPU, counted from the first rank's call of a collective. Ranks call collectives for
early buckets of gradients and for weights before they have agreed on the step. So this is longer than the watch lets a
rank take for a step: the watch ends the run before NCCL does, and names the rank."""


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True)
class World(AbstractContextManager["World"]):
    """The device of this process, and its place among the processes of the run. A context manager: after its body this
    process leaves the others."""

    device: torch.device
    rank: int = 0
    """From 0 to size - 1, over all hosts."""
    size: int = 1
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    """Notes this rank's work, for the message about a rank that died or hangs."""
    chosen: Degrees | None = None
    """How the ranks are divided; None: all replicate."""

    @staticmethod
    def create(device: Device = Device.auto, memory_gib: float | None = None, threads: int | None = None) -> World:
        """Select the device, join the other ranks, limit torch to `memory_gib` GiB of the device (None: no limit), and
        set the number of CPU threads. `threads`: how many threads a resumed run had at its start.

        Raises HardwareError if the device is missing or taken by another rank, ConfigError if the limit is not
        possible, RankError if the other ranks cannot be reached.
        """
        rank, size, local_rank = process_rank()
        if device is Device.cuda and not torch.cuda.is_available():
            raise HardwareError(
                "run.device=cuda, but torch sees no GPU here "
                f"(torch {torch.__version__}, built for CUDA {torch.version.cuda}). "
                "Use run.device=auto, or install a CUDA build of torch and a driver that serves it."
            )
        set_threads(threads)
        cuda = torch.cuda.is_available() and device is not Device.cpu
        by_slurm = "SLURM_STEP_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
        if cuda and torch.cuda.device_count() == 1 and by_slurm:  # which may show each rank only its own card
            local_rank = 0
        if cuda and size > 1 and local_rank >= torch.cuda.device_count():
            raise HardwareError(
                f"{socket.gethostname()} has {torch.cuda.device_count()} visible GPUs, and rank {rank} needs one "
                "more. Start fewer ranks there (run.gpus, or torchrun's --nproc-per-node), or widen "
                "CUDA_VISIBLE_DEVICES."
            )
        if cuda and size > 1:
            torch.cuda.set_device(local_rank)
        here = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        world = World(here, rank, size, _heartbeat(rank) if size > 1 else Heartbeat(None))
        if world.size > 1:
            _join(world)
        if memory_gib is not None:
            if not cuda:
                raise ConfigError(
                    f"run.memory_gib={memory_gib} limits a GPU's memory, and this run is on a CPU. Remove it."
                )
            total = torch.cuda.get_device_properties(here).total_memory
            if memory_gib * GIB > total:
                raise ConfigError(
                    f"run.memory_gib={memory_gib}, but {torch.cuda.get_device_name(here)} has {total / GIB:.1f} GiB. "
                    "Lower or remove it."
                )
            # The CUDA context (about 0.5 GiB) is not included.
            torch.cuda.set_per_process_memory_fraction(memory_gib * GIB / total, here)
            _LIMITED.add(here)
        elif world.device in _LIMITED:
            torch.cuda.set_per_process_memory_fraction(1.0, world.device)
            _LIMITED.discard(world.device)
        return world

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which alone writes files and talks to the user and to trackers."""
        return self.rank == 0

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability as (major, minor); None without a GPU."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None

    @property
    def degrees(self) -> Degrees:
        """How many ranks replicate, shard and divide rows."""
        return self.chosen or Degrees(replicate=self.size)

    def divided(self, degrees: Degrees) -> World:
        """This world with its ranks divided into `degrees`."""
        assert degrees.ranks == self.size, (degrees, self.size)
        return replace(self, chosen=degrees)

    @property
    def shares(self) -> bool:
        """Whether ranks share rows or weights, and so wait for each other inside a forward and backward pass."""
        return self.degrees.replicate < self.size

    @property
    def data_rank(self) -> int:
        """The number of the part of a step on which this rank trains. Ranks of a context group share one part."""
        return self.rank // self.degrees.context

    @property
    def data_ranks(self) -> int:
        """The number of parts into which the rows of a step are divided: replicate x shard."""
        return self.degrees.data_ranks

    @property
    def context_rank(self) -> int:
        """The number of the part of each row that this rank has."""
        return self.rank % self.degrees.context

    @property
    def context_ranks(self) -> int:
        """The number of parts into which each row is divided."""
        return self.degrees.context

    @property
    def context_group(self) -> str:
        """The name of the process group of the ranks that share this rank's rows; empty if rows are not divided."""
        return str(self.mesh["context"].get_group().group_name) if self.context_ranks > 1 else ""

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as a grid with the dimensions `replicate`, `shard` and `context`, context innermost. Each slice
        (`mesh["shard"]`) has a process group. All ranks make the mesh together, on first use. One rank has no mesh."""
        assert self.size > 1, "one rank has no mesh"
        if not _mesh.cache_info().currsize:  # agree() fails at once if a rank is gone; torch waits hours
            self.agree(0, "making a mesh of the ranks")
        return _mesh(self.device.type, self.degrees)

    @property
    def weights_mesh(self) -> DeviceMesh:
        """The mesh over which weights are divided. Its dimensions: the replicas, if there are several, and the parts
        of each weight. Ranks that share rows hold different parts of the weights."""
        return _weights_mesh(self.device.type, self.degrees)

    @property
    def weights_group(self) -> dist.ProcessGroup:
        """The ranks that hold the parts of one copy of the weights."""
        return self.weights_mesh.get_group(-1)

    def sum(
        self, tensor: torch.Tensor, doing: str = "adding up", group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Sum `tensor` over the ranks (of `group`), in place, and return it. The host does not wait for a GPU."""
        if self.size > 1:
            with self.waiting(doing):
                dist.all_reduce(tensor, group=group)
        return tensor

    def copy_first(self, tensor: torch.Tensor, doing: str) -> torch.Tensor:
        """Copy rank 0's `tensor` into the `tensor` of each other rank. The host does not wait for a GPU."""
        with self.waiting(doing):
            dist.broadcast(tensor, src=0)
        return tensor

    def gather_rows(self, tensor: torch.Tensor, doing: str) -> torch.Tensor:
        """The rows of every rank's `tensor`, by rank. All ranks have equally many. The host does not wait for a
        GPU."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.waiting(doing):
            dist.all_gather(everyone, tensor)
        return torch.cat(everyone)

    def start_sum(self, tensor: torch.Tensor) -> dist.Work:
        """Start summing `tensor` over the ranks, in place, while this process goes on. The caller keeps the tensor
        until it has called wait() on the result, within waiting(). All ranks start their sums in the same order."""
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work

    def agree(self, mine: int, doing: str = "deciding together") -> int:
        """Return the largest `mine` of all ranks, so that one rank's decision (a signal, memory that ran out) becomes
        the decision of all. The hosts wait for each other, not for their GPUs."""
        if self.size == 1:
            return mine
        value = torch.tensor(mine)
        with self.waiting(doing):
            dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def exchange(self, numbers: list[float], doing: str = "collecting from all ranks") -> list[list[float]]:
        """The `numbers` of every rank, by rank. All ranks give the same count of numbers. The hosts wait for each
        other, not for their GPUs."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with self.waiting(doing):
            dist.all_gather(everyone, mine)
        return [values.tolist() for values in everyone]

    def broadcast(self, value: Result, doing: str = "following rank 0") -> Result:
        """Return rank 0's `value` on every rank. It must be picklable."""
        if self.size == 1:
            return value
        values = [value]
        with self.waiting(doing):
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def from_main(self, work: Callable[[], Result], doing: str) -> Result:
        """Run work() on rank 0, and return its result on every rank. If it raises a UserError, all ranks raise it."""
        if self.size == 1:
            return work()
        outcome: tuple[UserError | None, Any] = (None, None)
        if self.main:
            try:
                outcome = (None, work())
            except UserError as problem:
                outcome = (problem, None)
        error, result = self.broadcast(outcome, doing)
        if error is not None:
            self.agree(0, "ending together")  # otherwise rank 0 might end before the others have its error
            raise error
        return result

    def gather(self, value: Result, doing: str = "collecting from all ranks") -> list[Result]:
        """Return a list of every rank's `value`, by rank, on all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.waiting(doing):
            dist.all_gather_object(values, value)
        return values

    def main_first(self, work: Callable[[], Result], doing: str) -> Result:
        """Run work() on rank 0, and then on the others, which find rank 0's files on the disk. If rank 0 raises a
        UserError, all ranks raise it."""
        if self.size == 1:
            return work()
        first = list[Result]()
        self.from_main(lambda: first.append(work()), doing)
        return first[0] if self.main else work()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the process group at the end of the run. Before that, `error` is announced, so that ranks which lose
        this rank know why. After an error on a GPU only the end of the process closes its connections."""
        if _WATCH:
            _WATCH.pop().stop()
        if self.size > 1 and error is not None:
            failure.announce(error)
        if self.size > 1 and dist.is_initialized():
            _mesh.cache_clear()
            _weights_mesh.cache_clear()
            if error is None or self.device.type == "cpu":
                dist.destroy_process_group()
                # A process whose group still has threads at exit may abort (pytorch#190489). Meshes and parameters
                # refer to the groups in cycles, which only the garbage collector frees.
                upstream.forget_meshes()
                gc.collect()
            else:  # destroying the group waits for the GPUs of ranks in a collective (pytorch#141510)
                failure.keep_connections()

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Note `doing` for the launcher while this rank waits; a lost connection becomes a LostRankError."""
        with self.heartbeat.waiting(doing):
            try:
                yield
            except (dist.DistBackendError, dist.DistNetworkError, RuntimeError) as error:
                if out_of_memory_reason(error):  # torch or NCCL found no memory
                    raise
                raise self._lost_rank(doing, error) from error

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Raise LostRankError if torch loses a connection to another rank in the body, as while it gathers weights."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not lost_connection(error):
                raise
            raise self._lost_rank("exchanging weights", error) from error

    def _lost_rank(self, doing: str, error: Exception) -> LostRankError:
        step = f" in step {self.heartbeat.step}" if self.heartbeat.step else ""
        return LostRankError(
            f"Rank {self.rank} of {self.size} ({socket.gethostname()}) lost another rank while {doing}{step}: "
            f"{first_line(error)}. The same command goes on from the last checkpoint."
        )

    def facts(self, strict: bool = False) -> MachineFacts:
        """The device, the memory and the installed packages of rank 0, with the free memory of the device that has the
        least. All ranks get the same facts.

        `strict`: count all memory as free except the driver's. Then `auto` settings, which depend on free memory, are
        the same whatever other processes use.
        """
        name, total = f"{cores()} cores, {platform.machine()}", memory()[0]
        free = total
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device)
            name = card.name
            total = int(card.total_memory * torch.cuda.get_per_process_memory_fraction(self.device))
            free = total - CONTEXT if strict else min(torch.cuda.mem_get_info(self.device)[0], total)
        ranks = self.gather((free, socket.gethostname()), "comparing free memory")
        here = MachineFacts(
            device=self.device.type,
            device_name=name,
            capability=self.capability,
            memory=total,
            free_memory=min(free for free, _ in ranks),
            host_memory=memory()[0] // [host for _, host in ranks].count(socket.gethostname()),
            cores=cores(),
            platform=platform.system(),
            packages=installed_packages(),
            broken=dict(BROKEN),
        )
        return self.from_main(lambda: here, "waiting for the facts of rank 0's machine")


@functools.cache
def _mesh(device: str, degrees: Degrees) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(getattr(degrees, name) for name in DEGREES), mesh_dim_names=DEGREES)


def lost_connection(error: RuntimeError) -> bool:
    """Whether `error` of a collective says that another rank is gone. (It may also say that memory ran out.)"""
    if out_of_memory_reason(error):
        return False
    backend = isinstance(error, (dist.DistBackendError, dist.DistNetworkError))
    return backend or _is_closed(error) or any(name in str(error) for name in ("gloo", "NCCL"))


def _is_closed(error: Exception) -> bool:
    return any(text in str(error) for text in ("Connection closed", "Connection reset", "Broken pipe"))


@functools.cache
def _weights_mesh(device: str, degrees: Degrees) -> DeviceMesh:
    parts, mesh = "shard", _mesh(device, degrees)
    if degrees.context > 1:
        from torch.distributed.device_mesh import init_device_mesh

        parts = "weights"
        sizes = (degrees.replicate, degrees.shard * degrees.context)
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", parts))
    return mesh["replicate", parts] if degrees.replicate > 1 else mesh[parts]


@functools.cache
def _heartbeat(rank: int) -> Heartbeat:
    return Heartbeat.open(rank)


def _join(world: World) -> None:
    """Join the process group, and refuse ranks with different packages."""
    if dist.is_initialized():
        return
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    # This import must come before the group exists: the module's default arguments keep the group that they find.
    import torch.distributed.nn.functional  # noqa: F401

    cuda = world.device.type == "cuda"
    limit = meeting_time()
    try:
        with world.heartbeat.waiting("looking for the other ranks"):
            store = failure.begin_run(failure.find_store(limit))
            _wait_for_all(world, store, limit)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=dist.PrefixStore("world", store),
                rank=world.rank,
                world_size=world.size,
                timeout=STUCK if cuda else PATIENCE,
                device_id=world.device if cuda else None,
            )
            if cuda:
                group: Any = dist.group.WORLD
                # With a bound device meshes would split this group, and the meshes of a second run of this process
                # would crash (pytorch#192109).
                group.bound_device_id = None
                # The hosts have more patience than the GPUs.
                upstream.set_host_timeout(group, PATIENCE)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RankError):
            raise
        if "connectFullMesh" in str(error) and _is_closed(error):  # all had come, and one ended meanwhile
            raise world._lost_rank("joining it", error) from error
        raise _cannot_meet(world, error) from error
    packages, process = installed_packages(), (os.getpid(), socket.gethostname())
    ranks = world.gather((packages, process), "comparing packages")
    if HEARTBEATS not in os.environ:
        _WATCH[:] = [StoreWatch(world.rank, [process for _, process in ranks], world.heartbeat, failure.runs())]
    for rank, (others, _) in enumerate(ranks):
        if differing := sorted(
            name for name in packages.keys() | others.keys() if packages.get(name) != others.get(name)
        ):
            name = differing[0]
            raise ConfigError(
                f"Ranks {world.rank} and {rank} have different packages: {name} {packages.get(name, 'missing')} and "
                f"{others.get(name, 'missing')}. Install the same versions on every host."
            )
    _require_idle_cards(world)


NOTICE = 10.0
"""After this many seconds at the start rank 0 says which ranks it waits for."""
BUSY = 0.1
"""A card is busy if other processes use more than this share of its memory."""


def _require_idle_cards(world: World) -> None:
    """Raise HardwareError on all ranks if the card of any rank is busy. A busy card would slow all ranks down, or run
    out of memory later."""
    busy = [line for line in world.gather(_other_use(world.device), "comparing cards") if line]
    if busy:
        listed = "\n".join(f"  {line}" for line in busy)
        raise HardwareError(
            f"Other processes use the cards of this run:\n{listed}\nEnd them, or choose idle cards with "
            "CUDA_VISIBLE_DEVICES."
        )


def _other_use(device: torch.device) -> str:
    """A line about a card that other processes use; empty for an idle card. The driver's figures of memory are right
    in a container, too, where the ids of other processes cannot be seen."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device) - CONTEXT
    if others <= BUSY * total:
        return ""
    card = torch.cuda.get_device_properties(device)
    where = f"GPU {device.index} ({card.name}) of {socket.gethostname()}"
    with closing(Card(device)) as driver:
        named = driver.processes()
    return f"{where}: {others / GIB:.0f} of {total / GIB:.0f} GiB are taken" + f", by {', '.join(named)}" * bool(named)


def _wait_for_all(world: World, store: dist.Store, limit: timedelta) -> None:
    """Wait until all ranks have come to `store`. Rank 0 says after NOTICE seconds which ranks it waits for. Raises
    RankError after `limit`, and LostRankError at once if a rank has failed before it came."""
    store.set(f"came {world.rank}", "")
    came, began = store.add("came", 1), time.monotonic()
    seconds, says = limit.total_seconds(), world.rank == 0
    while came < world.size:
        waited = time.monotonic() - began
        if failure.announced(store):
            raise LostRankError(f"Another rank failed before rank {world.rank} of {world.size} met it.")
        if waited > seconds or (says and waited > NOTICE):
            missing = [str(rank) for rank in range(world.size) if not store.check([f"came {rank}"])]
            which = f"rank{'s' * (len(missing) > 1)} {shortened(', '.join(missing))} of {world.size}"
            advice = ""
            if "SLURM_STEP_ID" in os.environ:
                advice = " A shell of `srun --pty` is one task: give the command to srun, or ask it for one task."
            if waited > seconds:
                raise RankError(
                    f"Only {came} of {world.size} ranks came to {_address()} within {seconds:.0f} s; there was no "
                    f"{which}. Start the other ranks, and check that they reach this address; {MEETING} changes the "
                    f"time.{advice}"
                )
            say(f"Waiting for {which} to come to {_address()}, {seconds:.0f} s at most.{advice}")
            says = False
        time.sleep(0.02)
        came = store.add("came", 0)


def _cannot_meet(world: World, error: Exception) -> RankError:
    if "EADDRINUSE" in str(error):
        return RankError(
            f"Port {os.environ.get('MASTER_PORT')} of {socket.gethostname()}, where the ranks are to meet, is in use "
            "by another process. Set MASTER_PORT to a free port on all hosts (torchrun: --rdzv-endpoint or "
            "--master-port)."
        )
    return RankError(
        f"Rank {world.rank} of {world.size} ({socket.gethostname()}) cannot reach the others at {_address()}: "
        f"{first_line(error)}. Check the address, and that no firewall is between the hosts."
    )


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
