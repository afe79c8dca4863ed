"""How ranks that torchrun, srun or a user starts find each other, and the message if they do not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import command, kill, user_environment, wait_for
from support.killing import tail
from support.processes import alive, children
from support.ranks import free_port, messages

pytestmark = pytest.mark.slow
SHORT = ("train.max_steps=4", "data.eval_fraction=0")


@pytest.fixture
def taken():
    """A port of this machine at which something else listens."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        yield str(other.getsockname()[1])


def test_tasks_of_srun_train_together(ranks, tmp_path):
    def task(rank: int) -> dict[str, str]:
        mine = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
        return {**mine, "SLURM_JOB_ID": "17", "SLURM_NODELIST": "localhost", "MASTER_PORT": port}

    port = str(free_port())
    assert ranks.run(command(tmp_path, *SHORT), tmp_path, place=task) == [0, 0], tail(tmp_path)
    assert "parallel: replicate 2" in tail(tmp_path, 10**6)
    assert tail(tmp_path, 10**6).count("step=4/4 loss") == 1


def test_port_in_use_is_named(ranks, tmp_path, taken):
    codes = ranks.run(command(tmp_path, *SHORT), tmp_path, MASTER_PORT=taken, FXTUNE_MEETING_SECONDS="4")
    assert codes == [7, 7], tail(tmp_path)
    said = "\n".join(messages(tmp_path))  # of both ranks, in any order
    assert f"Port {taken} of {socket.gethostname()}, where the ranks are to meet, is in use" in said


def test_host_that_cannot_be_reached_is_named(forks, tmp_path):
    """192.0.2.1 is an address of documentation (RFC 5737): nobody answers."""
    environ = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "FXTUNE_MEETING_SECONDS": "3"}
    place = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(free_port())}
    assert forks.start(command(tmp_path, *SHORT), tmp_path, **environ, **place).wait() == 7, tail(tmp_path)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert "cannot reach the others at 192.0.2.1:" in messages(tmp_path)[0]


def test_rank_that_never_comes_is_named(forks, tmp_path):
    """As in a shell of `srun --pty`, which is one task of several."""
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    environ = {**slurm, "SLURM_JOB_ID": "17", "SLURM_NODELIST": "localhost", "FXTUNE_MEETING_SECONDS": "30"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert forks.start(command(tmp_path, *SHORT), tmp_path, **environ, **place).wait() == 7, tail(tmp_path)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert "Only 1 of 2 ranks came to 127.0.0.1:" in messages(tmp_path)[0]
    assert "Waiting for rank 1 of 2" in tail(tmp_path, 10**6)  # long before
    assert "srun --pty" in messages(tmp_path)[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_named_by_the_other_without_a_launcher(ranks, tmp_path, victim):
    both = ranks.start(command(tmp_path, "train.epochs=400"), tmp_path)
    try:
        assert both[0].until("training", 50), tail(tmp_path)  # by then each rank has had a pulse
        os.kill(both[victim].pid, signal.SIGSTOP)
        assert both[1 - victim].wait() == 7, tail(tmp_path)
    finally:
        both[victim].kill()
        both[victim].wait()
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert f"Rank {victim} of this run ({socket.gethostname()}, process {both[victim].pid})" in messages(tmp_path)[0]
    assert "has not run for 45 s" in messages(tmp_path)[0]


def torchrun(node: int, port: int, words: list[str], folder: Path, options: str = "") -> subprocess.Popen[bytes]:
    """`options`: torchrun's, in place of two nodes of one rank each."""
    nodes = f"--nnodes=2 --nproc-per-node=1 --node-rank={node} --master-addr=127.0.0.1 --master-port={port}"
    line = [sys.executable, "-m", "torch.distributed.run", *(options or nodes).split(), "-m", "fxtune", *words]
    with (folder / "log.txt").open("ab") as log:
        environ = user_environment()
        return subprocess.Popen(
            line, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
        )


def test_two_agents_of_torchrun_train_together(tmp_path):
    words, port = command(tmp_path, *SHORT), free_port()
    agents = [torchrun(node, port, words, tmp_path) for node in (0, 1)]
    try:
        assert [agent.wait(600) for agent in agents] == [0, 0], tail(tmp_path)
    finally:
        for agent in agents:
            kill(agent)
    assert tail(tmp_path, 10**6).count("step=4/4 loss") == 1
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()


def test_mistake_under_two_agents_is_one_message(tmp_path):
    words, port = command(tmp_path, *SHORT, "optimizer.lr=much"), free_port()
    agents = [torchrun(node, port, words, tmp_path) for node in (0, 1)]
    try:
        assert all(agent.wait(600) for agent in agents)
    finally:
        for agent in agents:
            kill(agent)
    said = tail(tmp_path, 10**6)
    assert said.count("`optimizer.lr` is a number") == 1, said
    assert said.count("ended the run; the reason is in its output") == 1, said  # on the other host


def test_killed_torchrun_ends_its_ranks_with_one_message(tmp_path):
    agent = torchrun(0, 0, command(tmp_path, "train.epochs=400"), tmp_path, "--standalone --nproc-per-node=2")
    try:
        wait_for(lambda: "step=1/" in tail(tmp_path, 10**6), agent)
        ranks = children(agent.pid)
        agent.kill()  # the kernel sends its ranks a SIGTERM
        wait_for(lambda: not any(map(alive, ranks)))
    finally:
        kill(agent)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert "The same command goes on from there" in messages(tmp_path)[0]
