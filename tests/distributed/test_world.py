"""The device of a process, and what is refused."""

import os
import signal
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.harness import command, start, user_environment, wait_for
from support.killing import tail
from support.sharded import run_ranks

from fxtune.distributed import failure
from fxtune.distributed import world as worlds
from fxtune.distributed.world import Device, World
from fxtune.errors import ConfigError, HardwareError, LostRankError, RankError


def test_cpu_world_has_the_facts_of_the_machine():
    world = World.create(Device.cpu)
    assert world.device == torch.device("cpu")
    facts = world.facts()
    assert (facts.device, facts.capability) == ("cpu", None)
    assert 0 < facts.free_memory <= facts.memory
    assert "torch" in facts.packages


def test_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match=r"run\.device=cuda, but torch sees no GPU here"):
        World.create(Device.cuda)


def test_one_process_needs_no_collective():
    world = World.create(Device.cpu)
    assert (world.rank, world.size, world.main) == (0, 1, True)
    assert world.agree(3) == 3
    assert world.gather("one") == ["one"]
    assert world.broadcast({"any": "value"}) == {"any": "value"}
    assert world.main_first(lambda: 5, "anything") == 5


def test_memory_limit_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"run\.memory_gib=1\.0 limits a GPU's memory"):
        World.create(Device.cpu, memory_gib=1.0)


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB, 30 of them used by process 7, and NVML."""
    gib = 2**30
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1a": "handle"}[uuid],
        nvmlDeviceGetComputeRunningProcesses=lambda _: [
            SimpleNamespace(pid=7, usedGpuMemory=30 * gib),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=gib),
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (49 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H200", uuid="1a"))
    return nvml


def test_card_that_others_use_is_refused_with_their_processes(card, monkeypatch):
    world = World(torch.device("cuda", 1))
    with pytest.raises(
        HardwareError, match=r"GPU 1 \(H200\) of .*: 30 of 80 GiB are taken, by process 7 \(30\.0 GiB\)"
    ):
        worlds._require_idle_cards(world)
    monkeypatch.setattr(card, "nvmlInit", lambda: (_ for _ in ()).throw(OSError))
    with pytest.raises(HardwareError, match=r"30 of 80 GiB are taken\nEnd them, or choose idle cards"):
        worlds._require_idle_cards(world)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (76 * 2**30, 80 * 2**30))
    worlds._require_idle_cards(world)


@pytest.mark.parametrize(
    ("device", "error", "closes"), [("cuda", True, False), ("cuda", False, True), ("cpu", True, True)]
)
def test_rank_that_fails_on_a_gpu_waits_for_no_other_gpu(monkeypatch, device, error, closes):
    """Closing NCCL's connections waits for ranks that are in a collective, so they stay open until the process ends."""
    closed, kept = [], []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: closed.append(True))
    monkeypatch.setattr(failure, "announce", lambda _: None)
    monkeypatch.setattr(failure, "_KEPT", kept)
    with suppress(HardwareError), World(torch.device(device, 0), 1, 2):
        if error:
            raise HardwareError("out of memory in a layer")
    assert bool(closed) == closes
    assert failure.keeps_connections() != closes


def test_memory_that_nccl_lacks_is_no_lost_rank():
    world = World(torch.device("cpu"), 0, 2)
    full = dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nCuda failure 2 'out of memory'"
    )
    gone = dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error")
    for waits in (lambda: world.waiting("adding up"), world.connected):
        with pytest.raises(dist.DistBackendError, match="out of memory"), waits():
            raise full
        with pytest.raises(LostRankError, match="lost another rank while"), waits():
            raise gone


def test_meshes_of_gpus_do_not_split_the_group(monkeypatch):
    """torch splits a group that knows its device, and crashes if it is the second one of the process."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    )

    def init(*_, device_id, **__):
        group.bound_device_id = device_id

    monkeypatch.setenv("FXTUNE_HEARTBEATS", "")
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "PrefixStore", lambda _, store: store)
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", group)
    monkeypatch.setattr(failure, "find_store", lambda _: None)
    monkeypatch.setattr(failure, "begin_run", lambda store: store)
    for name in ("_wait_for_all", "_require_idle_cards"):
        monkeypatch.setattr(worlds, name, lambda *_: None)
    monkeypatch.setattr(World, "gather", lambda self, value, doing: [value])
    worlds._join(World(torch.device("cuda", 1), 1, 2))
    assert group.bound_device_id is None


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:1234", LostRankError),
        ("[gloo/transport/tcp/device.cc:84] rv != -1. Unable to resolve hostname", RankError),
    ],
)
def test_a_rank_that_ends_while_the_others_join_is_lost_and_a_wrong_address_is_named(monkeypatch, said, error):
    """The launcher then names the rank that ended: its end is the cause, and no firewall."""

    def init(*_, **__):
        raise RuntimeError(said)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "PrefixStore", lambda _, store: store)
    monkeypatch.setattr(failure, "find_store", lambda _: None)
    monkeypatch.setattr(failure, "begin_run", lambda store: store)
    monkeypatch.setattr(worlds, "_wait_for_all", lambda *_: None)
    with pytest.raises(RankError) as raised:
        worlds._join(World(torch.device("cpu"), 1, 2))
    assert type(raised.value) is error
    assert ("firewall" in str(raised.value)) == (error is RankError)


def _chosen(world) -> tuple[str, str]:
    def refuse():
        raise ConfigError(f"refused by rank {world.rank}")

    found = world.from_main(lambda: f"by rank {world.rank}", "choosing")
    try:
        world.from_main(refuse, "choosing")
    except ConfigError as error:
        return found, str(error)
    return found, ""


@pytest.mark.slow
def test_choice_of_rank_0_and_its_error_are_those_of_all_ranks():
    assert run_ranks(2, _chosen) == [("by rank 0", "refused by rank 0")] * 2


COUNTING = """
import atexit, os, pathlib

def count(rank=os.environ.get("RANK")):
    names = []
    for task in pathlib.Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(task.read_text())
        except OSError:  # the thread has just ended
            pass
    if rank is not None:
        pathlib.Path(os.environ["THREADS"], rank).write_text(str(sum("gloo" in name for name in names)))

atexit.register(count)
"""
"""Counts the threads of gloo in a rank that exits. Python runs a file sitecustomize.py when it starts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stopped"),
    [
        pytest.param((), False, id="replicas"),
        pytest.param(("parallel.shard=2", "techniques.lora.enabled=false"), False, id="shard"),
        pytest.param(("parallel.context=2",), False, id="context"),
        pytest.param(("parallel.shard=2",), True, id="stopped", marks=pytest.mark.vital),
    ],
)
def test_no_thread_of_a_process_group_runs_when_a_rank_exits(words, stopped, tmp_path):
    """Or the rank might abort after its work is done (pytorch#190489). Each rank is a process that imports what it
    needs itself; a forked one has imported all of it before it joins the others."""
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    (tmp_path / "threads").mkdir()
    steps = f"train.max_steps={10**6 if stopped else 3}"
    argv = command(tmp_path, "run.gpus=2", "run.device=cpu", "train.epochs=null", steps, *words)
    path = os.pathsep.join([str(tmp_path), user_environment()["PYTHONPATH"]])
    process = start(argv, tmp_path, PYTHONPATH=path, THREADS=str(tmp_path / "threads"))
    if stopped:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("train/loss") > 2, process)
        process.send_signal(signal.SIGTERM)
    assert process.wait(600) == (75 if stopped else 0), tail(tmp_path)
    assert {file.name: file.read_text() for file in (tmp_path / "threads").iterdir()} == {"0": "0", "1": "0"}
