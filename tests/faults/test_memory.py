"""Memory runs out, for real: a limit of the kernel's refuses it to a process that trains, evaluates or answers (short.py)."""

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
"""Bytes that no allocator has."""
SCENARIOS = ["training", "middle", "looking", "nothing", "stop", "program", "building", "eval"]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """What became of each scenario."""
    folder = tmp_path_factory.mktemp("short")
    done = subprocess.run(
        [sys.executable, str(SHORT), str(folder), *SCENARIOS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]

    def result(name):
        file = folder / name / "result.json"
        assert file.exists(), done.stderr[-3000:]
        return json.loads(file.read_text())

    return result


def told(result: dict) -> list[str]:
    return [note for note in result["notes"] if "ran out of memory" in note]


def steps(result: dict) -> list:
    return [pytest.approx(figures, rel=1e-5) for figures in result["steps"]]


def test_a_first_step_that_does_not_fit_is_taken_again_in_smaller_parts(short):
    """The global batch, the loss and the gradient's norm are those of a run that has all the memory it wants."""
    result, whole = short("training"), short("middle")[2]
    assert result["rows"]["training"] in (4, 2)
    assert result["figures"]["train/micro_batch_size"] == result["rows"]["training"]
    assert len(result["steps"]) == 3
    assert result["steps"] == steps(whole)
    assert result["supervised"] == whole["supervised"]
    notes = told(result)
    assert len(notes) == {4: 1, 2: 2}[result["rows"]["training"]]  # each halving is told once
    assert "with 8 rows at once: DefaultCPUAllocator: can't allocate memory" in notes[0]
    assert "From here on 4 at a time. Step 1 is repeated; its 8 rows and its loss stay as they are." in notes[0]


def test_half_of_a_sum_of_gradients_is_dropped(short):
    """Memory ran out when one micro-batch of the step had left its gradients; the loader's processes are there again."""
    result, _, whole = short("middle")
    assert result["rows"]["training"] < 4
    assert "Step 2 is repeated" in told(result)[0]
    assert result["steps"] == steps(whole)
    assert result["supervised"] == whole["supervised"]


def test_a_resumed_run_takes_the_same_split_from_the_same_step_on(short):
    """Bit for bit, and not what whole micro-batches give: their sums are rounded otherwise."""
    result, resumed, whole = short("middle")
    assert any("after step 2" in note for note in resumed["notes"])
    assert not told(resumed)
    assert resumed["rows"] == result["rows"]
    assert resumed["weights"] == result["weights"] != whole["weights"]


def test_evaluation_and_answers_are_halved_by_themselves(short):
    result, whole = short("looking")
    assert result["rows"]["questions"] < 8
    assert result["rows"]["evaluation"] < 8
    assert "training" not in result["rows"]
    assert whole["rows"] == {}
    assert result["figures"]["eval/loss"] == pytest.approx(whole["figures"]["eval/loss"], rel=1e-5)
    assert result["figures"]["questions/exact_match"] == whole["figures"]["questions/exact_match"]
    assert result["weights"] == whole["weights"]  # what ran out left nothing in training's way


def test_where_nothing_is_left_to_halve_the_steps_so_far_are_saved_and_three_changes_named(short):
    result = short("nothing")
    done = len(result["steps"])
    assert done == 2
    assert result["code"] == HardwareError.exit_code
    assert result["weights"] is not None  # though none was due
    first, saved, most, *changes = result["message"].splitlines()
    assert first.startswith("Training ran out of memory with 1 row at once: DefaultCPUAllocator")
    assert saved == f"Saved after step {done}: the same command resumes there, given more memory."
    assert most.startswith(
        "What would help most, each alone, by arithmetic for this model and 1 x 256 tokens, which need"
    )
    gib = [float(change.split("about ")[1].split(" GiB less")[0]) for change in changes]
    assert len(gib) == 3
    assert gib == sorted(gib, reverse=True)
    assert all(each > 0 for each in gib)
    assert {change.split()[0] for change in changes} >= {"techniques.checkpointing.enabled=true"}


def test_a_run_may_ask_to_stop_instead(short):
    result = short("stop")
    assert result["code"] == HardwareError.exit_code
    assert result["rows"] == {}
    assert result["message"].startswith("Training ran out of memory with 8 rows at once")
    assert "\n  train.micro_batch_size=4 " in result["message"]


def test_the_program_ends_with_words_and_the_code_of_hardware(short):
    result = short("program")
    assert result["code"] == HardwareError.exit_code
    assert "Traceback" not in result["text"]
    assert "1 x 8,192 tokens" in result["text"]
    assert result["text"].count(" GiB less") == 3


def test_weights_that_do_not_fit_are_another_thing(short):
    """Fewer rows would not help, and are not among the changes."""
    result = short("building")
    assert result["code"] == HardwareError.exit_code
    assert "fxtune: Building the model ran out of memory: " in result["text"]
    assert "arithmetic for the weights, their gradients and moments, which need" in result["text"]
    assert "techniques.lora.enabled=true " in result["text"]
    assert "data.sequence_length" not in result["text"].partition("Building")[2]


def test_memory_that_runs_out_where_nobody_has_advice_is_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr("fxtune.config.compose.prepare", lambda *_, **__: np.empty(HUGE, np.uint8))
    assert main(["+recipe=quickstart"]) == HardwareError.exit_code
    assert "fxtune: This process was given no more memory (Unable to allocate" in capsys.readouterr().err


def test_fxtune_eval_halves_too(short):
    result = short("eval")
    assert result["code"] == 0
    assert "Evaluation ran out of memory with 16 rows at once" in result["text"]
    assert "eval/loss" in result["text"]


def test_memory_to_pin_that_is_refused_goes_back_to_the_pool(monkeypatch):
    """Three pieces are wanted, two can be had: they are there for who tries again with less."""
    offload = Offload([torch.nn.Linear(1, 1)], torch.device("cpu"))
    true, made = torch.empty, []

    def scarce(size, **options):
        made.append(size)
        return true(size if len(made) <= 2 else HUGE, **options)

    monkeypatch.setattr(torch, "empty", scarce)
    with pytest.raises(MemoryShortError, match=r"0\.1 GiB are pinned.*offload_layers"):
        offload.buffers(3 << 26)
    assert len(offload.pool) == 2
    assert len(offload.buffers(2 << 26)) == 2
    assert len(made) == 3
