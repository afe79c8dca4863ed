"""`fxtune sweep`: its mistakes, and with `slow` whole sweeps in processes of their own, also killed ones."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.harness import user_environment, wait_for

from fxtune.cli.main import main
from fxtune.cli.sweep import environments
from fxtune.config.compose import load
from fxtune.errors import ConfigError

QUICKSTART = ["+recipe=quickstart", "data.eval_fraction=0.1"]


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
        ([*QUICKSTART, "sweep.lr=1e-3,2e-3", "--max-kl", "0"], "give the largest KL, a number above 0"),
        ([*QUICKSTART, "sweep.lr=1e-3,2e-3", "data.general=[]", "--max-kl", "0.1"], "no KL is measured"),
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
    assert all(option in said for option in ("--trials", "--method", "--workers", "--output"))


def test_each_worker_has_a_card_or_its_share_of_the_cores(monkeypatch):
    config = load(["run.device=cpu"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("fxtune.system.process.threads.cores", lambda: 8)
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
    "train.max_steps=16",
    "data.cache_dir=cache",
    "data.questions.path=null",
    "sweep.lr=loguniform(1e-3,2e-2)",
    "sweep.r=choice(4,8)",
    "--trials=4",
]


@pytest.mark.slow
def test_a_configuration_that_has_forgotten_too_much_does_not_win(cwd, capsys):
    """The first command names the nearest configuration, and the second has a bound between two of them."""
    words = [
        "sweep",
        *QUICKSTART,
        "train.max_steps=6",
        "data.cache_dir=cache",
        "data.questions.path=null",
        "data.eval_limit=20",
    ]
    words += ["sweep.lr=1e-4,4e-3", "--trials=2", "--method=none"]
    assert main([*words, "--max-kl=1e-9"]) == 2
    assert "No configuration stays within --max-kl 1e-09 of its base" in capsys.readouterr().err
    runs = json.loads(Path("runs/quickstart_sweep/sweep.json").read_text())["runs"]
    near, far = sorted(runs, key=lambda run: run["kl"])
    assert near["values"] == {"optimizer.lr": 1e-4}
    assert near["loss"] > far["loss"]
    assert main([*words, f"--max-kl={(near['kl'] + far['kl']) / 2}"]) == 0
    said = capsys.readouterr().out
    assert "(too far)" in said
    assert f"KL from the base on general text {near['kl']:.3f}" in said
    assert load(["+recipe=quickstart_swept"]).optimizer.lr == 1e-4
    written = yaml.safe_load(Path("recipes/quickstart_swept.yaml").read_text())
    assert written.keys().isdisjoint({"run", "tracking"}), (
        "what the sweep sets for its own runs is no part of the recipe"
    )


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


def adapter(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_killed_sweep_ends_with_a_table_curves_and_a_recipe_that_gives_the_same_bits(cwd):
    folder = Path("runs/quickstart_sweep")
    for number, after in ((signal.SIGKILL, "trial-0/metrics.jsonl"), (signal.SIGTERM, "trial-1/metrics.jsonl")):
        process = start("sweep", *SWEEP)
        wait_for(lambda file=folder / after, process=process: file.exists() or process.poll() is not None)
        process.send_signal(number)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == (75 if number == signal.SIGTERM else -number), said
        assert number == signal.SIGKILL or "The same command goes on." in said
    said = finish("sweep", *SWEEP)
    found = json.loads((folder / "sweep.json").read_text())
    best = found["runs"][0]
    assert (best["trial"], best["state"]) == (found["winner"], "done")
    assert sorted(run["trial"] for run in found["runs"]) == [0, 1, 2, 3]
    assert {run["state"] for run in found["runs"]} <= {"done", "stopped"}
    assert f"The best is trial {best['trial']}" in said
    assert "recipes/quickstart_swept.yaml" in said
    curves = (folder / "curves.svg").read_text()
    assert all(f"trial {run['trial']}: " in curves for run in found["runs"]), "the legend names each trial"
    assert Path("recipes/quickstart_swept.yaml").read_text().startswith("# quickstart with the lowest held-out loss")
    assert "finished" not in finish("+recipe=quickstart_swept", "run.dir=alone", "data.cache_dir=cache")
    assert adapter(Path("alone")) == adapter(Path(best["folder"]))
    result = json.loads(Path("alone/result.json").read_text())
    assert math.isclose(result["eval/best_loss"], best["loss"], rel_tol=0)
    assert "stopped" in finish("sweep", *SWEEP), "the same command shows the table again"
