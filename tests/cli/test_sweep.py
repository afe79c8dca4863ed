"""`fxtune sweep`: its mistakes, and with `slow` whole sweeps in processes of their own, also killed ones."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.harness import user_environment

from fxtune.cli.main import main
from fxtune.cli.sweep import environments, plan_of
from fxtune.config.compose import load
from fxtune.errors import ConfigError
from fxtune.tuning.race import Bracket
from fxtune.tuning.sampling import Sampler
from fxtune.tuning.sweep import Method
from fxtune.tuning.sweep_space import parse

QUICKSTART = ["+recipe=quickstart", "data.eval_fraction=0.1"]
SPACE = parse(["sweep.lr=loguniform(1e-4,1e-2)"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*QUICKSTART], "nothing is swept: add sweep.KEY=VALUES"),
        ([*QUICKSTART, "sweep.lrr=1,2"], "there is no key `lrr`"),
        ([*QUICKSTART, "sweep.lr=1e-3,2e-3", "optimizer.lr=1e-3"], "`optimizer.lr` has a value and is swept"),
        (["+recipe=quickstart", "sweep.lr=1e-3,2e-3"], "nothing is held out"),
        ([*QUICKSTART, "sweep.lr=1e-3,2e-3", "--trials", "1"], "a whole number, 2 or more"),
        ([*QUICKSTART, "sweep.lr=1e-3,2e-3", "--output", "mine.txt"], "a recipe is a file NAME.yaml"),
        ([*QUICKSTART, "sweep.lr=1e-3,2e-3", "optimizer.lrr=1"], "unknown key `optimizer.lrr`"),
    ],
)
def test_mistake_is_one_message(words, told, cwd, capsys):
    assert main(["sweep", *words]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("fxtune:") == 1
    assert not Path("runs").exists()


def test_help_shows_the_options_and_an_example(capsys):
    assert main(["sweep", "--help"]) == 0
    said = capsys.readouterr().out
    assert "sweep.lr='loguniform(1e-3,2e-2)'" in said
    assert all(option in said for option in ("--trials", "--method", "--eta", "--rungs", "--workers", "--sampler"))


@pytest.mark.parametrize(
    ("method", "trials", "eta", "rungs", "brackets"),
    [
        (Method.halving, None, 2, None, [Bracket(8, (1, 2, 4, 8))]),
        (Method.halving, 9, 3, None, [Bracket(9, (1, 3, 9))]),
        (Method.halving, 200, 2, None, [Bracket(200, (1, 2, 4, 8, 16))]),
        (Method.halving, 4, 2, 2, [Bracket(4, (1, 2))]),
        (Method.none, 5, 2, None, [Bracket(5, (1,))]),
        (Method.hyperband, None, 2, 2, [Bracket(2, (1, 2)), Bracket(2, (2,))]),
        (Method.asha, 5, 2, 3, [Bracket(5, (1, 2, 4))]),
    ],
)
def test_options_decide_the_rungs(method, trials, eta, rungs, brackets):
    plan = plan_of(SPACE, trials, method, eta, rungs, None, 0)
    assert plan.brackets() == brackets
    assert plan.sampler is (Sampler.spread if method is Method.halving else Sampler.tpe)


def test_no_more_configurations_than_there_are():
    assert plan_of(parse(["sweep.r=8,16,32"]), 8, Method.halving, 2, None, None, 0).trials == 3


def test_each_worker_has_a_card_or_its_share_of_the_cores(monkeypatch):
    config = load(["run.device=cpu"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("fxtune.system.threads.cores", lambda: 8)
    torch.set_num_threads(6)
    assert environments(config, None) == [{"OMP_NUM_THREADS": "6"}]
    assert environments(config, 2) == [{"OMP_NUM_THREADS": "4"}] * 2
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert environments(config, 2) == [{}] * 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environments(load([]), None) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert environments(load([]), 1) == [{"CUDA_VISIBLE_DEVICES": "3"}]
    with pytest.raises(ConfigError, match="--workers 3, but there are 2 GPUs"):
        environments(load([]), 3)


SWEEP = [
    *QUICKSTART,
    "train.max_steps=8",
    "data.cache_dir=cache",
    "data.questions.path=null",
    "sweep.lr=loguniform(1e-3,2e-2)",
    "sweep.r=choice(4,8)",
    "--trials=4",
]


def start(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fxtune", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=user_environment(),
    )


def finish(*words: str) -> str:
    process = start(*words)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return said


def outcome(folder: Path) -> dict:
    found = json.loads((folder / "sweep.json").read_text())
    return {"runs": [{**run, "folder": "", "energy": {}} for run in found["runs"]], "winner": found["winner"]}


def adapter(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a command line in which a sweep has run to its end."""
    place = tmp_path_factory.mktemp("sweep")
    before = os.getcwd()
    os.chdir(place)
    try:
        (place / "said.txt").write_text(finish("sweep", *SWEEP))
    finally:
        os.chdir(before)
    return place


@pytest.mark.slow
def test_sweep_ends_with_a_table_curves_and_a_recipe_that_gives_the_same_bits(whole, monkeypatch):
    monkeypatch.chdir(whole)
    said = (whole / "said.txt").read_text()
    found = json.loads(Path("runs/quickstart_sweep/sweep.json").read_text())
    assert found["whole_runs"] == 2.0
    best = found["runs"][0]
    assert best["trial"] == found["winner"]
    assert [run["state"] for run in found["runs"]] == ["done", "stopped", "stopped", "stopped"]
    assert f"The best is trial {best['trial']}" in said
    assert "The recipe is recipes/quickstart_swept.yaml: fxtune +recipe=quickstart_swept" in said
    curves = Path("runs/quickstart_sweep/curves.svg").read_text()
    assert all(f"trial {run['trial']}: " in curves for run in found["runs"]), "the legend names each trial"
    assert Path("recipes/quickstart_swept.yaml").read_text().startswith("# quickstart with the lowest held-out loss")
    assert "finished" not in finish("+recipe=quickstart_swept", "run.dir=alone", "data.cache_dir=cache")
    assert adapter(Path("alone")) == adapter(Path(best["folder"]))
    result = json.loads(Path("alone/result.json").read_text())
    assert math.isclose(result["eval/best_loss"], best["loss"], rel_tol=0)


@pytest.mark.slow
def test_sweep_that_is_killed_again_and_again_ends_the_same(whole, cwd):
    """Also if the next call trains another number of runs at a time."""
    words = ["sweep", *SWEEP, "--workers=2"]
    for kills, after in enumerate(("trial-0/metrics.jsonl", "trial-2/checkpoints", "trial-3.log")):
        process = start(*words, f"--workers={1 + kills % 2}")
        until = time.monotonic() + 300
        while not Path("runs/quickstart_sweep", after).exists() and time.monotonic() < until:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM if kills == 1 else signal.SIGKILL)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == (75 if kills == 1 else -signal.SIGKILL), said
        assert kills != 1 or "The same command goes on." in said
    finish(*words)
    assert outcome(Path("runs/quickstart_sweep")) == outcome(whole / "runs/quickstart_sweep")
    winner = f"runs/quickstart_sweep/trial-{outcome(Path('runs/quickstart_sweep'))['winner']}"
    assert adapter(Path(winner)) == adapter(whole / winner)
    assert "stopped" in finish(*words), "the same command shows the table again"
