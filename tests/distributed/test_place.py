"""Which rank a process is, by what torchrun or Slurm put into its environment."""

import os

import pytest

from fxtune.distributed.ranks import first_host, process_rank


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha"),
        ("gpu-[003-005,9],login", "gpu-003"),
        ("rack[2,4]-node[1-3]", "rack2-node1"),
        ("", "localhost"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_task_of_srun_is_a_rank(monkeypatch):
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "4711",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_NODELIST": "gpu[07-08]",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "taken back after the test")
        monkeypatch.delenv(name)
    assert process_rank.__wrapped__() == (5, 8, 1)
    assert os.environ["MASTER_ADDR"] == "gpu07"
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 32000
    assert not os.environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"}
    assert process_rank.__wrapped__() == (0, 1, 0), "what a rank starts is no rank"


def test_script_of_a_slurm_job_is_no_rank(monkeypatch):
    """Slurm sets the numbers of tasks there, too, but only `srun` starts a step."""
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert process_rank.__wrapped__() == (0, 1, 0)
