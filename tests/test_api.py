"""fxtune from Python: the same recipes, refusals and runs as on the command line."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fxtune
from fxtune.cli.main import main
from fxtune.errors import ConfigError, DataError

SHORT = ["train.max_steps=3", "train.log_every=1", "data.questions.path=null", "tracking.display=none"]
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run from Python, of a recipe with a changed field."""
    config = fxtune.load_recipe("quickstart", [*SHORT, f"run.dir={tmp_path_factory.mktemp('api') / 'run'}"])
    config.optimizer.lr = 2e-3
    return fxtune.train(config)


def losses(run):
    return {row["train/step"]: row["train/loss"] for row in run.metrics if "train/loss" in row}


def test_importing_fxtune_imports_no_library():
    code = "import sys, fxtune; print(sorted({'torch', 'transformers', 'hydra', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_run_from_python_equals_that_of_the_command(trained, tmp_path):
    assert main(["+recipe=quickstart", *SHORT, "optimizer.lr=2e-3", f"run.dir={tmp_path / 'run'}"]) == 0
    other = fxtune.Run(tmp_path / "run")
    name = "adapter_model.safetensors"
    assert (trained.output / name).read_bytes() == (other.output / name).read_bytes()
    assert losses(trained) == losses(other)


def test_a_run_gives_its_figures_and_answers(trained):
    assert trained.finished
    assert trained.result["train/step"] == 3
    assert list(losses(trained)) == [1, 2, 3]
    assert trained.config["optimizer"]["lr"] == 2e-3
    assert all(one.acted for one in trained.evidence)
    assert "train/loss" in trained._repr_html_()
    assert isinstance(trained.generate("Two large pizzas for Ann", max_new_tokens=8), str)
    assert trained.generate("Two pizzas", max_new_tokens=8, show="base") == trained.generate(
        "Two pizzas", max_new_tokens=8, show="base"
    )
    for prompt, images in ("hi " * 2000, []), ("Hi", ["none.png"]), ("Hi", "none.png"):
        with pytest.raises(DataError):  # a reason is never returned as an answer
            trained.generate(prompt, images=images)
    with pytest.raises(ConfigError, match="once for each prompt"):
        trained.generate(["Hi", "Bye"])
    assert isinstance(trained.generate("Hi", system="Be brief.", max_new_tokens=2), str)


def test_a_run_is_found_after_the_working_folder_has_changed(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.folder.parent)
    run = fxtune.Run(trained.folder.name)
    monkeypatch.chdir(tmp_path)
    assert run.finished
    assert run.output.is_dir()


def test_the_end_of_a_run_writes_its_page_and_its_times(trained, capsys):
    page = (trained.folder / "report.html").read_text()
    assert page.count("<svg") == 5
    assert trained.report(trained.folder / "again.html").read_text().count("<svg") == 5
    assert "builtin:quickstart_train" in page
    parts = {name for row in trained.metrics for name in row}
    assert {
        "startup/model_seconds",
        "time/total_seconds",
        "train/forward_backward_seconds",
        "train/update_seconds",
    } <= parts
    row = trained.metrics[-1] | trained.result
    assert 0 < row["train/forward_backward_seconds"] + row["train/update_seconds"] < 2 * row["train/step_seconds"]
    assert 0 < row["time/training_seconds"] < row["time/total_seconds"]
    assert main(["why", str(trained.folder)]) == 0
    assert "forward and backward" in capsys.readouterr().out


def test_a_page_that_cannot_be_drawn_loses_nothing_of_the_run(cwd, said, monkeypatch):
    from fxtune.reports import page

    def breaks(*_):
        raise RuntimeError("no chart today")

    monkeypatch.setattr(page, "render", breaks)
    run = fxtune.train("quickstart", [*SHORT, "train.max_steps=1", "run.dir=run"])
    assert run.finished
    assert "The page run/report.html could not be written: RuntimeError: no chart today" in said
    assert not (cwd / "run" / "report.html").exists()


def test_the_same_recipe_again_continues_or_returns_the_run(trained):
    config = fxtune.load_recipe("quickstart", [*SHORT, f"run.dir={trained.folder}", "optimizer.lr=2e-3"])
    assert fxtune.train(config).result == trained.result


def test_a_mistake_raises_what_the_command_prints():
    with pytest.raises(ConfigError, match=r"unknown key `optimizer\.lrr`; did you mean `optimizer\.lr`\?"):
        fxtune.train("quickstart", ["optimizer.lrr=1"])
    with pytest.raises(ConfigError, match=r"nothing-of-this-name") as caught:
        fxtune.load_recipe("nothing-of-this-name", ["optimizer.lrr=1"])
    assert "optimizer.lrr" in str(caught.value)
    assert "command line" not in str(caught.value)
    for key in ("train.epoch", "optimiser", "data.sources.0.pat"):
        config = fxtune.load_recipe("quickstart")
        *path, name = key.split(".")
        node = functools.reduce(lambda node, word: node[0] if word == "0" else getattr(node, word), path, config)
        setattr(node, name, 1)
        with pytest.raises(ConfigError, match="unknown key"):
            fxtune.train(config)
    for overrides in ({"optimizer.lr": 1e-3}, ["optimizer.lr=1e-3", 1]):
        with pytest.raises(ConfigError, match="overrides"):
            fxtune.load_recipe("quickstart", overrides)
    for gpus in (0, "2"):
        with pytest.raises(ConfigError, match="gpus"):
            fxtune.plan("quickstart", gpus=gpus)
    config = fxtune.load_recipe("quickstart", "train.epochs=1")
    config.optimizer.lr = -1.0
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        fxtune.train(config)
    with pytest.raises(ConfigError, match="takes no overrides"):
        fxtune.train(config, ["optimizer.lr=1"])
    with pytest.raises(ConfigError, match="there is no run `nothing-of-this-name`"):
        fxtune.Run("nothing-of-this-name")


def test_a_config_is_the_same_command_line(tmp_path):
    """Ranks are started by a command, so each value must survive being written."""
    from fxtune import api
    from fxtune.config import compose

    text = """a "quoted" 'text', with: {all} [kinds] of $igns \\ and ü,
a second line \\" \\"""
    config = fxtune.load_recipe("quickstart", ["data.sources.0.limit=7", "techniques.lora.rank_pattern={q_proj: 8}"])
    config.data.system = text
    config.data.chat_template = "{% for m in messages %}{{ m }}{% endfor %}"
    config.run.dir, config.model.trust_remote_code = str(tmp_path / "it's here"), True
    assert compose.load(api._as_command(config, tmp_path / "config.yaml")) == config


def test_preview_takes_the_names_of_files_as_texts(tmp_path, capsys):
    fxtune.preview("quickstart", html=str(tmp_path / "page.html"), json=str(tmp_path / "page.json"))
    assert json.loads((tmp_path / "page.json").read_text())
    assert "<html" in (tmp_path / "page.html").read_text()


def test_plan_is_a_forecast_of_the_run():
    forecast = fxtune.plan("quickstart", gpu="L4")
    assert forecast.fits
    assert forecast.steps == 87


@pytest.mark.slow
def test_two_ranks_train_a_config_from_python(tmp_path):
    words = [*SHORT, "run.device=cpu", "run.gpus=2", "train.micro_batch_size=2", f"run.dir={tmp_path / 'run'}"]
    run = fxtune.train(fxtune.load_recipe("quickstart", words))
    assert run.result["train/ranks"] == 2


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path):
    notebook = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = done.stdout.split("before:")[-1].split("after:")
    assert '"item": "sock"' not in before
    assert '{"name": "Sven", "city": "Lyon", "item": "sock", "color": "white", "quantity": 58}' in after
