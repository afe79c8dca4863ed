"""How many CPU threads there are, and how they wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cases import slow_but

from fxtune.system.process import threads
from fxtune.system.process.threads import PROCESSES, set_threads

ROOT = Path(__file__).resolve().parents[3]
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
MKL_DYNAMIC = """
import ctypes, pathlib, torch
def dynamic():
    library = ctypes.CDLL(str(pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return getattr(library, "mkl_serv_get_dynamic", lambda: "no-mkl")()
"""


def python(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**{k: v for k, v in os.environ.items() if k not in OPENMP}, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.stdout.split()


@pytest.fixture
def machine(monkeypatch):
    """A process that torch gave six threads, on a machine with eight cores, with no variable set."""
    for name in (*OPENMP[3:], PROCESSES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr(threads, "_threads", threads._Threads())
    torch.set_num_threads(6)
    yield monkeypatch
    torch.set_num_threads(1)


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_threads_wait_passively_unless_the_environment_says_otherwise(given):
    """libgomp prints what it read when torch loads it."""
    code = (
        "import fxtune.cli.main, sys, os; assert 'torch' not in sys.modules; print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    assert python(code, **given) == [given.get("OMP_WAIT_POLICY", "None" if given else "PASSIVE")]


def test_tests_wait_passively():
    assert os.environ.keys() & set(OPENMP[:3])


def test_new_run_has_torch_s_number_within_the_cores(machine):
    assert set_threads() == torch.get_num_threads() == 6
    machine.setattr(threads, "cores", lambda: 3)  # the quota of a container, which torch does not see
    assert set_threads() == torch.get_num_threads() == 3


def test_resumed_run_has_the_recorded_number_if_there_are_the_cores(machine):
    assert set_threads(recorded=8) == torch.get_num_threads() == 8
    assert set_threads(recorded=9) == 6
    assert set_threads(recorded=2) == 2


def test_next_run_of_the_process_has_the_process_s_number(machine):
    """A process may train one run after another, as a sweep and a notebook do."""
    assert set_threads(recorded=2) == 2
    assert set_threads() == 6
    torch.set_num_threads(3)  # by the code around it
    assert set_threads() == 3


def test_processes_share_the_cores(machine):
    machine.setenv(PROCESSES, "4")
    assert set_threads() == 2
    assert set_threads(recorded=8) == 2
    assert set_threads(recorded=1) == 1
    machine.setenv(PROCESSES, "16")
    assert set_threads() == 1


@pytest.mark.parametrize("variable", OPENMP[3:])
def test_variable_of_the_user_decides(machine, variable):
    machine.setenv(variable, "6")  # torch has read it
    machine.setenv(PROCESSES, "4")
    assert set_threads() == 6
    assert set_threads(recorded=2) == 6


@pytest.mark.parametrize("given", slow_but([{}, {"OMP_NUM_THREADS": "2"}], {}))
def test_mkl_sums_in_the_same_order_in_new_and_resumed_runs(given):
    """torch.set_num_threads() changes MKL_DYNAMIC, which changes the order of MKL's sums on some machines. So it is
    called for every run, with and without a variable."""
    code = MKL_DYNAMIC + (
        "from fxtune.distributed.world import Device, World\n"
        "print(dynamic()); World.create(Device.cpu); print(dynamic())\n"
        "World.create(Device.cpu, threads=1); print(dynamic())\n"
    )
    before, new, resumed = python(code, **given)
    assert new == resumed
    assert (before, new) in (("1", "0"), ("no-mkl", "no-mkl"))
