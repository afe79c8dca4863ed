"""Out of memory: the kernel refuses memory to a process that trains, evaluates or answers questions (short.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fxtune.cli.main import main
from fxtune.errors import HardwareError, MemoryShortError
from fxtune.techniques.checkpointing.offload import Offload

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHORT = ROOT / "tests" / "support" / "short.py"
HUGE = 1 << 58
"""More bytes than any allocator can provide."""
SCENARIOS = ["training", "middle", "looking", "nothing", "stop", "program", "building", "eval"]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A function that returns the result of a scenario. All scenarios run once."""
    folder = tmp_path_factory.mktemp("short")
    done = subprocess.run(
        [sys.executable, str(SHORT), str(folder), *SCENARIOS],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]

    def result(name):
        file = folder / name / "result.json"
        assert file.exists(), done.stderr[-3000:]
        return json.loads(file.read_text())

    return result


def memory_notes(result: dict) -> list[str]:
    return [note for note in result["notes"] if "ran out of memory" in note]


def steps(result: dict) -> list:
    return [pytest.approx(figures, rel=1e-5) for figures in result["steps"]]


def test_first_step_that_does_not_fit_is_retried_with_smaller_micro_batches(short):
    """The global batch, the loss and the gradient norm equal those of a run with enough memory."""
    result, undisturbed = short("training"), short("middle")[2]
    assert result["rows"]["training"] in (4, 2)
    assert result["figures"]["train/micro_batch_size"] == result["rows"]["training"]
    assert len(result["steps"]) == 3
    assert result["steps"] == steps(undisturbed)
    assert result["supervised"] == undisturbed["supervised"]
    notes = memory_notes(result)
    assert len(notes) == {4: 1, 2: 2}[result["rows"]["training"]]  # one note per halving
    assert "with 8 rows at once: DefaultCPUAllocator: can't allocate memory" in notes[0]
    assert "From here on 4 at a time. Step 1 is repeated; its 8 rows and its loss stay as they are." in notes[0]


def test_partial_gradient_sum_is_dropped(short):
    """Memory ran out after one micro-batch had added its gradients. The loader's processes are started again."""
    result, _, undisturbed = short("middle")
    assert result["rows"]["training"] < 4
    assert "Step 2 is repeated" in memory_notes(result)[0]
    assert result["steps"] == steps(undisturbed)
    assert result["supervised"] == undisturbed["supervised"]


def test_resumed_run_uses_the_same_micro_batches_from_the_same_step(short):
    """The result is bit for bit equal.

    It differs from that of full micro-batches, whose sums are rounded differently.
    """
    result, resumed, undisturbed = short("middle")
    assert any("after step 2" in note for note in resumed["notes"])
    assert not memory_notes(resumed)
    assert resumed["rows"] == result["rows"]
    assert resumed["weights"] == result["weights"] != undisturbed["weights"]


def test_evaluation_and_answers_halve_their_own_batches(short):
    result, undisturbed = short("looking")
    assert result["rows"]["questions"] < 8
    assert result["rows"]["evaluation"] < 8
    assert "training" not in result["rows"]
    assert undisturbed["rows"] == {}
    assert result["figures"]["eval/loss"] == pytest.approx(undisturbed["figures"]["eval/loss"], rel=1e-5)
    assert result["figures"]["questions/exact_match"] == undisturbed["figures"]["questions/exact_match"]
    assert result["weights"] == undisturbed["weights"]  # the failed evaluation does not affect training


def test_single_row_that_does_not_fit_saves_and_suggests_three_changes(short):
    result = short("nothing")
    done = len(result["steps"])
    assert done == 2
    assert result["code"] == HardwareError.exit_code
    assert result["weights"] is not None  # although no checkpoint was due
    first, saved, most, *changes = result["message"].splitlines()
    assert first.startswith("Training ran out of memory with 1 row at once: DefaultCPUAllocator")
    assert saved == f"Saved after step {done}: the same command resumes there, given more memory."
    assert most.startswith("What would help most, each change alone (by arithmetic this model and 1 x 256 tokens need")
    gib = [float(change.split("about ")[1].split(" GiB less")[0]) for change in changes]
    assert len(gib) == 3
    assert gib == sorted(gib, reverse=True)
    assert all(each > 0 for each in gib)
    assert {change.split()[0] for change in changes} >= {"techniques.checkpointing.enabled=true"}


def test_out_of_memory_stop_ends_the_run(short):
    result = short("stop")
    assert result["code"] == HardwareError.exit_code
    assert result["rows"] == {}
    assert result["message"].startswith("Training ran out of memory with 8 rows at once")
    assert "\n  train.micro_batch_size=4 " in result["message"]


def test_out_of_memory_prints_advice_and_exits_with_hardware_code(short):
    result = short("program")
    assert result["code"] == HardwareError.exit_code
    assert "Traceback" not in result["text"]
    assert "1 x 8,192 tokens" in result["text"]
    assert result["text"].count(" GiB less") == 3


def test_weights_that_do_not_fit_have_their_own_advice(short):
    """Fewer rows would not help, so the message does not suggest them."""
    result = short("building")
    assert result["code"] == HardwareError.exit_code
    assert "fxtune: Building the model ran out of memory: " in result["text"]
    assert "by arithmetic the weights, their gradients and moments need" in result["text"]
    assert "techniques.lora.enabled=true " in result["text"]
    assert "data.sequence_length" not in result["text"].partition("Building")[2]


def test_out_of_memory_outside_training_prints_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("fxtune.config.compose.prepare", lambda *_, **__: np.empty(HUGE, np.uint8))
    assert main(["+recipe=quickstart"]) == HardwareError.exit_code
    assert "fxtune: This process was given no more memory (Unable to allocate" in capsys.readouterr().err


def test_eval_command_halves_its_batches(short):
    result = short("eval")
    assert result["code"] == 0
    assert "Evaluation ran out of memory with 16 rows at once" in result["text"]
    assert "eval/loss" in result["text"]


def test_refused_pinned_memory_keeps_buffers_in_the_pool(monkeypatch):
    """Of three requested buffers two are available. They stay in the pool for the next, smaller request."""
    offload = Offload([torch.nn.Linear(1, 1)], torch.device("cpu"))
    true, made = torch.empty, []

    def scarce(size, **options):
        made.append(size)
        return true(size if len(made) <= 2 else HUGE, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    with pytest.raises(MemoryShortError, match=r"0\.1 GiB are pinned"):
        offload.buffers(3 << 26)
    assert len(offload.pool) == 2
    assert len(offload.buffers(2 << 26)) == 2
    assert len(made) == 3
