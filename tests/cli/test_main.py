"""The command line, as a user types it: words, overrides, mistakes, sweeps, completion."""

from __future__ import annotations

import logging
import os
import re
import resource
import subprocess
import sys
import time
import types
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fxtune.cli import main as command
from fxtune.errors import DataError, NumbersError

QUICK = "+recipe=quickstart"


@pytest.fixture
def trained(monkeypatch) -> list:
    """The configs that training was called with; a stand-in takes its place, so that no model is touched."""
    calls: list = []
    module = types.ModuleType("stand_in_train")
    module.run = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stand_in_train", module)
    monkeypatch.setitem(command.COMMANDS, "train", command.Command("stand_in_train", "", reads_data=True))
    return calls


@pytest.fixture(autouse=True)
def _own_logging():
    """Hydra's --info turns the root logger on; in a test, that would outlive its process."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def fail_with(monkeypatch, error: BaseException) -> None:
    def run(config):
        raise error

    monkeypatch.setattr(sys.modules["stand_in_train"], "run", run)


def recipe(text: str, name: str = "mine") -> Path:
    path = Path("recipes") / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def refused(capsys, *argv: str) -> str:
    """The one block that a wrong command line prints."""
    assert command.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("fxtune: ")
    assert "Traceback" not in err
    assert out == ""
    return err


def fxtune(*argv: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], cwd=cwd, capture_output=True, text=True, timeout=60)


# --- what works


def test_training_gets_the_typed_config_of_recipe_groups_and_keys(cwd, trained):
    assert command.main([QUICK, "optimizer=muon", "data.sources.0.path=docs.jsonl", "run.seed=3"]) == 0
    (config,) = trained
    assert config.optimizer.name.value == "muon"
    assert config.data.sources[0].path == "docs.jsonl"
    assert config.run.seed == 3
    assert config.run.name == "quickstart"
    assert config.run.dir is None
    assert list(cwd.iterdir()) == [], "Hydra left something in the working directory"


def test_the_word_train_can_be_left_out_or_said(cwd, trained):
    assert command.main(["train", QUICK]) == 0
    assert command.main([QUICK]) == 0
    assert trained[0] == trained[1]


@pytest.mark.parametrize("spelling", ["recipe=quickstart", "+recipe=quickstart", "++recipe=quickstart"])
def test_a_plus_more_or_less_means_the_same(cwd, trained, spelling):
    assert command.main(["+optimizer=sgd", "+train.max_steps=7", spelling, "model.architecture.hidden_size=64"]) == 0
    (config,) = trained
    assert (config.optimizer.name.value, config.train.max_steps) == ("sgd", 7)
    assert config.model.architecture == {"hidden_size": 64}


def test_a_field_of_any_keys_can_be_given_whole(cwd, trained):
    assert command.main([QUICK, "model.architecture={model_type:llama,hidden_size:64}"]) == 0
    assert trained[0].model.architecture == {"model_type": "llama", "hidden_size": 64}


def test_a_recipe_in_the_working_directory_hides_the_shipped_one_and_may_build_on_others(cwd, trained):
    recipe("# mine\ntrain: {max_steps: 5}\ndata: {sources: [{path: x.jsonl}]}\n", "quickstart")
    recipe(
        "defaults:\n  - quickstart\n  - override /optimizer: lion\ntrain: {epochs: 2}\noptimizer: {lr: 1e-5}\n", "mine"
    )
    assert command.main(["+recipe=mine"]) == 0
    (config,) = trained
    assert config.run.name == "mine"
    assert (config.train.max_steps, config.train.epochs) == (5, 2.0)
    assert (config.optimizer.name.value, config.optimizer.lr, config.optimizer.betas) == ("lion", 1e-5, [0.9, 0.99])


def test_a_recipe_can_be_given_as_a_path(cwd, trained):
    path = recipe("run: {seed: 9}\ndata: {sources: [{path: x.jsonl}]}\n")
    elsewhere = path.rename(cwd / "other.yaml")
    assert command.main(["+recipe=./other.yaml"]) == 0
    assert command.main([f"+recipe={elsewhere}", "run.name=named"]) == 0
    assert [(config.run.seed, config.run.name) for config in trained] == [(9, "other"), (9, "named")]


def test_a_broken_recipe_that_was_not_chosen_stops_nobody(cwd, trained):
    recipe("a: [1\n", "broken")
    assert command.main([QUICK]) == 0


def test_without_arguments_it_says_what_it_is(cwd, capsys):
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {word} " in text for word in command.COMMANDS)
    assert command.main(["preview", "--help"]) == 0


@pytest.mark.parametrize("word", command.COMMANDS)
def test_every_word_that_is_listed_is_there(word):
    import importlib

    entry = command.COMMANDS[word]
    module = importlib.import_module(entry.module)
    assert callable(module.run)
    assert entry.positional is None or callable(getattr(module, entry.positional))


def test_cfg_prints_the_whole_config_and_runs_nothing(cwd, trained, capsys):
    import yaml

    assert command.main([QUICK, "--cfg", "job", "train.max_steps=11"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["train"]["max_steps"] == 11
    assert "hydra" not in printed
    assert command.main([QUICK, "--cfg", "job", "-p", "train.log_every"]) == 0
    assert capsys.readouterr().out.strip().isdigit()
    assert command.main([QUICK, "-i", "defaults-tree"]) == 0
    assert "recipe" in capsys.readouterr().out
    assert trained == []


# --- multirun


def test_a_multirun_gives_each_job_a_folder_that_shows_what_it_changes(cwd, trained, capsys):
    assert command.main(["-m", QUICK, "optimizer.lr=1e-3,0.01", "run.seed=1"]) == 0
    assert [config.optimizer.lr for config in trained] == [1e-3, 1e-2]
    folders = [config.run.dir for config in trained]
    assert folders == ["runs/quickstart/optimizer.lr=0.001", "runs/quickstart/optimizer.lr=0.01"]
    err = capsys.readouterr().err
    assert all(folder in err for folder in folders)
    assert list(cwd.iterdir()) == []


def test_recipes_and_groups_can_be_swept(cwd, trained):
    assert command.main(["-m", "+recipe=quickstart,full_quickstart", "optimizer=adamw,sgd", "run.dir=here"]) == 0
    assert {config.run.dir for config in trained} == {
        f"here/recipe={name},optimizer={optimizer}"
        for name in ("quickstart", "full_quickstart")
        for optimizer in ("adamw", "sgd")
    }
    assert {(config.run.name, config.optimizer.name.value) for config in trained} == {
        (name, optimizer) for name in ("quickstart", "full_quickstart") for optimizer in ("adamw", "sgd")
    }


def test_a_recipe_may_carry_a_grid(cwd, trained):
    recipe("defaults: [quickstart]\nhydra: {sweeper: {params: {optimizer.lr: '1e-3,1e-2', optimizer: 'sgd,lion'}}}\n")
    assert command.main(["-m", "+recipe=mine", "optimizer=sgd"]) == 0
    assert [(config.optimizer.name.value, config.optimizer.lr) for config in trained] == [("sgd", 1e-3), ("sgd", 1e-2)]
    assert command.main(["+recipe=mine"]) == 0
    assert trained[-1].optimizer.lr == 4e-3, "a grid is for -m only"


def test_folders_of_jobs_stay_apart_and_fit_a_file_system():
    paths = [f"data.sources.0.path=/{path}.jsonl" for path in ("a b/c", "a_b/c", "x" * 300, "x" * 301)]
    titles = [command.title_of([path], 1) for path in paths]
    assert len(set(titles)) == 4
    assert all(re.fullmatch(r"[\w.=,+-]{1,120}", title) for title in titles)


def test_one_failing_job_does_not_stop_the_others(cwd, trained, capsys, monkeypatch):
    done, models = [], []

    def run(config):
        if config.optimizer.lr > 0.05:
            model = UserDict()
            models.append(weakref.ref(model))
            raise NumbersError("diverged [not markup]")
        assert models[0]() is None, "the next job needs the memory"
        done.append(config.optimizer.lr)

    monkeypatch.setattr(sys.modules["stand_in_train"], "run", run)
    assert command.main(["-m", QUICK, "optimizer.lr=0.1,0.01"]) == 5
    assert done == [0.01]
    err = capsys.readouterr().err
    assert "diverged [not markup]" in err
    assert "1 of 2 runs failed" in err


def test_the_last_job_of_a_sweep_is_checked_before_the_first_one_runs(cwd, trained, capsys):
    assert "train.micro_batch_size=0" in refused(capsys, "-m", QUICK, "train.micro_batch_size=4,2,0")
    assert "is a number" in refused(capsys, "-m", QUICK, "optimizer.lr=1e-3,high")
    assert trained == []


# --- errors of the called word


def test_a_users_error_is_printed_once_and_its_code_returned(cwd, trained, capsys, monkeypatch):
    fail_with(monkeypatch, DataError("docs.jsonl:3: no [bold]messages[/bold]"))
    assert command.main([QUICK]) == 3
    out, err = capsys.readouterr()
    assert err == "fxtune: docs.jsonl:3: no [bold]messages[/bold]\n"
    assert out == ""


def test_a_bug_keeps_its_traceback(cwd, trained, monkeypatch):
    fail_with(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours") as caught:
        command.main([QUICK])
    assert caught.traceback[-1].name == "run"


def test_interrupted_is_130(cwd, trained, capsys, monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert command.main([QUICK]) == 130
    assert "Traceback" not in capsys.readouterr().err


# --- mistakes


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["optimizer.lrr=1"], "unknown key `optimizer.lrr`; did you mean `optimizer.lr`?"),
        (["+optimizer.lrr=1"], "did you mean `optimizer.lr`?"),
        (["++optimizer.lrr=1"], "did you mean `optimizer.lr`?"),
        (["+techniques.lora.enbled=true"], "did you mean `techniques.lora.enabled`?"),
        (["data.sources.0.pth=x"], "did you mean `data.sources.0.path`?"),
        (["learning_rate=1e-4"], "did you mean `optimizer.lr`?"),
        (["lr=1e-4"], "did you mean `optimizer.lr`?"),
        (["train.sequence_length=9"], "did you mean `data.sequence_length`?"),
        (["zzz=1"], "A config has: run, model, data,"),
        (["optimizer.lr.x=1"], "has no keys"),
        (["data.sources.first.path=x"], "counted from 0"),
        (["data.sources.4.path=x"], "data.sources has 1 here"),
        (["optimizer=moun"], "the config group `optimizer` has no `moun`; did you mean `muon`?"),
        (["optimizr=muon"], "did you mean `optimizer=muon`?"),
        (["optimizer={name: sgd}"], "is a config group"),
        (
            ["optimizer.name=adam"],
            "is not one of adamw, adamw_8bit, apex_adamw, sgd, adafactor, lion, muon; did you mean `adamw`?",
        ),
        (["run.resume=off"], "is not one of auto, never, must"),
        (["train.max_steps=many"], "is a whole number"),
        (["train.max_steps=1.5"], "is a whole number"),
        (["train.max_steps=true"], "is a whole number"),
        (["data.packing=2"], "is true or false"),
        (["model.revision=12e4"], "put it in quotes"),
        (["run.name=null"], "cannot be null"),
        (["optimizer.betas=0.9"], "is a list"),
        (["train=3"], "has keys of its own"),
        (["optimizer.lr=1,2"], "Add -m for one run each"),
        (["~optimizer.lr"], "no key can be taken out"),
        (["optimizer@model=sgd"], "cannot move it"),
        (["data.sources.0.path=a(b.jsonl"], "Quote the value twice"),
        (["run.name=${run.nam}"], "did you mean `run.name`?"),
        (["run.name=${run.dir}", "run.dir=${run.name}"], "ecursi"),
        (["data.sources.0.path=???"], "`data.sources.0.path` is not set"),
        (["optimizer.lr=-1", "train.epochs=nan", "train.global_batch_size=6"], "must be above 0"),
        (["techniques.lora.enabled=2"], "`techniques.lora.enabled` is"),
        (["-m", "optimizer.lr=1e-3,-1"], "on the command line: `optimizer.lr=-1.0` must be above 0"),
        (["+recipe=quickstart,qwen_lora"], "Add -m"),
        (["quickstart"], "write +recipe=quickstart"),
        (["docs.jsonl"], "neither a command of fxtune nor key=value"),
        (["--config-dir=recipes"], "unrecognized arguments: --config-dir"),
        (["--experimental-rerun=x.pickle"], "unrecognized arguments"),
        (["--mutlirun"], "unrecognized arguments"),
        (["--resolve"], "add --cfg job"),
        (["-m", "--cfg", "job"], "not allowed with"),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_the_way_out(cwd, trained, capsys, argv, told):
    text = refused(capsys, QUICK, *argv)
    assert told in text
    assert trained == []


def test_all_mistakes_are_told_at_once(cwd, trained, capsys):
    text = refused(capsys, QUICK, "optimizer.lrr=1", "train.max_steps=x", "optimizer=moun")
    assert len(text.strip().splitlines()) == 3


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["+recipe=lama_lora"], "did you mean `llama_lora`?"),
        (["+recip=quickstart"], "did you mean `+recipe=quickstart`?"),
        (["+recipe=./none.yaml"], "there is no recipe file ./none.yaml"),
        (["previw", QUICK], "did you mean `preview`?"),
        (["quickstart"], "fxtune +recipe=quickstart"),
        (["train.max_steps=3"], "data.sources is empty"),
        (["recipes", "list"], "There is no `fxtune recipes list`"),
    ],
)
def test_a_mistake_without_a_recipe(cwd, trained, capsys, argv, told):
    assert told in refused(capsys, *argv)


def test_a_switch_may_be_written_without_quotes(cwd, trained, capsys):
    recipe("defaults: [quickstart]\ntechniques:\n  liger: {enabled: on, rope: off, swiglu: 'off', rms_norm: on}\n")
    assert command.main(["train", "+recipe=mine"]) == 0
    liger = trained[0].techniques.liger
    assert (liger.enabled, liger.rope.value, liger.swiglu.value, liger.rms_norm.value) == (True, "off", "off", "on")
    block = refused(capsys, "+recipe=mine", "techniques.liger.rope=true")
    assert "`techniques.liger.rope=true` is not one of auto, on, off; did you mean `on`?" in block


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("optimizer:\n  lrr: 1\n", 2, "did you mean `optimizer.lr`?"),
        ("# x\nlearning_rate: 1\n", 2, "did you mean `optimizer.lr`?"),
        ("data:\n  sources:\n    - path: a\n      pth: b\n", 4, "did you mean `data.sources.0.path`?"),
        ("optimizer.lr: 3\n", 1, "dots become nesting"),
        ("\noptimizer: {name: adam}\n", 2, "did you mean `adamw`?"),
        ("train:\n  max_steps: soon\n", 2, "is a whole number"),
        ("model:\n  revision: 0123456\n", 2, "put it in quotes"),
        ("run:\n  name: on\n", 2, "put it in quotes"),
        ("run: {resume: no}\n", 1, "YAML reads an unquoted"),
        ("optimizer: 3\n", 1, "has keys of its own"),
        ("run:\n  name: ${optimizer.rate}\n", 2, "points at nothing"),
        ("a: [1\nb: 2\n", 2, "not YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", 2, "not YAML"),
        ("- a\n- b\n", 1, "a recipe is `key: value` lines"),
        ("just text", 1, "a recipe is `key: value` lines"),
        ("run:\n\tname: x\n", 2, "not YAML"),
        ("# @package optimizer\nlr: 1\n", 2, "unknown key `lr`"),
        ("defaults:\n  - quickstrat\n", 2, "did you mean `quickstart`?"),
        ("defaults:\n  - override /optimizer: moun\n", 2, "did you mean `muon`?"),
        ("defaults:\n  - override /optimizr: muon\n", 2, "did you mean `optimizer`?"),
        ("defaults:\n  - mine\n", 1, "build on each other"),
        ("hydra:\n  sweeper:\n    params:\n      optimizer.lrr: 1,2\n", 4, "did you mean `optimizer.lr`?"),
    ],
)
def test_a_mistake_in_a_recipe_is_named_with_file_and_line(cwd, trained, capsys, text, line, told):
    recipe(text)
    block = refused(capsys, "+recipe=mine")
    assert told in block
    assert f"recipes/mine.yaml:{line}: " in block or "build on each other" in block


# --- a recipe from a stranger


@pytest.fixture
def marker(cwd, monkeypatch) -> Path:
    """A file that appears where a recipe got code to run."""
    monkeypatch.setenv("FXTUNE_TEST_SECRET", "hunter2-hunter2")
    (cwd / "strange.py").write_text(
        "import pathlib\npathlib.Path('ran').touch()\nclass X:\n    def __init__(self, **k): pass\n"
    )
    monkeypatch.syspath_prepend(cwd)
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    return cwd / "ran"


STRANGE = {
    "callback": "hydra: {callbacks: {x: {_target_: strange.X}}}",
    "callback group": "defaults: [{override /hydra/callbacks: x}]",
    "logging": "hydra: {job_logging: {version: 1, root: {handlers: [x]}, handlers: {x: {(): strange.X}}}}",
    "hydra logging": "hydra: {hydra_logging: {version: 1, root: {handlers: [x]}, handlers: {x: {(): strange.X}}}}",
    "sweeper": "hydra: {sweeper: {_target_: strange.X}}",
    "launcher": "hydra: {launcher: {_target_: strange.X}}",
    "launcher plugin": "defaults: [{override hydra/launcher: submitit_slurm}]",
    "search path": "hydra: {searchpath: [file:///tmp]}",
    "environment": "hydra: {job: {env_set: {PYTHONSTARTUP: strange.py}}}",
    "copied environment": "hydra: {job: {env_copy: [FXTUNE_TEST_SECRET]}}",
    "run folder": "hydra: {run: {dir: /tmp/elsewhere}}",
    "output": "hydra: {output_subdir: .hydra}",
    "mode": "hydra: {mode: MULTIRUN}",
    "not a mapping": "hydra: x",
    "grid": "hydra: {sweeper: {params: {+hydra.callbacks.x._target_: strange.X}}}",
    "grid over secrets": "hydra: {sweeper: {params: {run.name: '${oc.env:FXTUNE_TEST_SECRET}'}}}",
    "grid over trust": "hydra: {sweeper: {params: {model.trust_remote_code: true}}}",
    "target": "techniques: {lora: {_target_: strange.X}}",
    "target in a free field": "model: {architecture: {a: [{_target_: strange.X}]}}",
    "secret": "run: {name: '${oc.env:FXTUNE_TEST_SECRET}'}",
    "secret, nested": "run: {name: '${oc.env:${run.dir}}'}",
    "secret in a free field": "model: {architecture: {a: ['${oc.env:FXTUNE_TEST_SECRET}']}}",
    "secret by create": "run: {name: '${oc.create:\"${oc.env:FXTUNE_TEST_SECRET}\"}'}",
    "decode": "run: {name: \"${oc.decode:'${oc.env:FXTUNE_TEST_SECRET}'}\"}",
    "hydra's own": "run: {name: '${hydra:runtime.cwd}'}",
    "hydra's node": "run: {name: '${hydra.runtime.cwd}'}",
    "secret in the defaults": "defaults: [{override /optimizer: '${oc.env:FXTUNE_TEST_SECRET}'}]",
    "python tag": "run: !!python/object/apply:strange.X {}",
    "python tag in a list": "data: {buckets: [!!python/name:strange.X ]}",
    "custom tag": "run: {name: !x y}",
    "anchors": "model: {architecture: {a: &a [1, 1], b: &b [*a, *a], c: &c [*b, *b], d: [*c, *c]}}",
    "endless alias": "model: {architecture: &a {b: *a}}",
    "merge key": "optimizer: {<<: {lr: 1}}",
    "deep": "model: {architecture: " + "{a: " * 200 + "1" + "}" * 200 + "}",
    "deep list": "data: {buckets: " + "[" * 5000 + "]" * 5000 + "}",
    "big": "model: {architecture: {a: " + "x" * 300_000 + "}}",
    "remote code": "model: {path: x/y, revision: '" + "a" * 40 + "', trust_remote_code: true}",
    "remote code, in a word": "model: {trust_remote_code: 'yes'}",
    "remote code, pointed at": "model: {trust_remote_code: '${data.packing}'}",
    "compiled code": "techniques: {attention: {backend: 'hub:x/y@" + "a" * 40 + "', trust_remote_code: true}}",
    "out of runs": "run: {name: ../../elsewhere}",
    "out of here": "run: {dir: /etc/fxtune}",
    "out of here, up": "run: {dir: runs/../../elsewhere}",
    "out of here, home": "run: {dir: ~/.ssh}",
    "into what is hidden": "run: {dir: .git/hooks}",
    "out of here, by a pointer": "run: {dir: '${model.path}'}",
    "out of here, around a pointer": "run: {dir: '../${run.name}'}",
    "out of here, in a grid": "hydra: {sweeper: {params: {run.dir: /etc/fxtune}}}",
    "a cache elsewhere": "data: {cache_dir: /etc/fxtune}",
    "binary": 'run: {name: "\0"}',
}


@pytest.mark.parametrize(
    ("what", "flags"),
    [
        *((what, []) for what in STRANGE),
        *(
            (what, flags)
            for what in ("callback", "sweeper", "grid", "grid over secrets", "secret", "python tag")
            for flags in (["-m"], ["--cfg", "job", "--resolve"], ["--info"])
        ),
    ],
)
def test_a_recipe_from_a_stranger_runs_no_code_and_reads_no_secret(marker, trained, capsys, what, flags):
    recipe(STRANGE[what] + "\n")
    started = time.perf_counter()
    assert command.main([*flags, "+recipe=mine", "data.sources=[{path: x}]"]) == 2
    out, err = capsys.readouterr()
    assert time.perf_counter() - started < 4
    assert not marker.exists()
    assert "hunter2" not in out + err
    assert trained == []


def test_the_marker_does_appear_where_hydra_is_let_have_its_way(marker):
    """So that the tests above can fail: the same callback, unvetted."""
    script = (
        "import hydra\nfrom hydra.core.config_store import ConfigStore\n"
        "ConfigStore.instance().store('c', {'hydra': {'callbacks': {'x': {'_target_': 'strange.X'}}}})\n"
        "hydra.main(version_base='1.3', config_path=None, config_name='c')(lambda cfg: None)()\n"
    )
    Path("unvetted.py").write_text(script)
    subprocess.run([sys.executable, "unvetted.py"], check=True, timeout=60, capture_output=True)
    assert marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        "run.name=${oc.env:FXTUNE_TEST_SECRET}",
        "hydra.callbacks.x._target_=strange.X",
        "+hydra.callbacks.x._target_=strange.X",
        "hydra.searchpath=[file:///tmp]",
        "hydra.sweeper._target_=strange.X",
        "hydra.launcher={_target_: strange.X}",
        "hydra.job.env_set.A=b",
        "hydra/job_logging=stdout",
        "hydra/callbacks=x",
        "hydra.run.dir=x",
        "hydra.sweep.dir=x",
        "model.architecture.a._target_=strange.X",
        "model.architecture={a: '${oc.env:FXTUNE_TEST_SECRET}'}",
    ],
)
def test_nor_does_a_command_line_that_was_pasted(marker, trained, capsys, text):
    block = refused(capsys, QUICK, text)
    assert not marker.exists()
    assert "hunter2" not in block


def test_remote_code_and_where_to_write_are_the_users_own_words(cwd, trained):
    recipe("run: {dir: 'runs/${run.name}-${run.seed}'}\ndata: {cache_dir: ./tokens, sources: [{path: x}]}\n")
    assert (
        command.main([QUICK, "model.trust_remote_code=true", "run.dir=/elsewhere", "data.cache_dir='~/.cache/mine'"])
        == 0
    )
    assert trained[0].model.trust_remote_code
    assert (trained[0].run.dir, trained[0].data.cache_dir) == ("/elsewhere", "~/.cache/mine")
    assert command.main(["+recipe=mine"]) == 0
    assert (trained[1].run.dir, trained[1].data.cache_dir) == ("runs/mine-0", "./tokens")


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_what_is_called_a_recipe_and_is_no_file_is_not_waited_for(kind, cwd, trained, capsys):
    Path("recipes").mkdir()
    odd = Path("recipes/mine.yaml")
    {"pipe": lambda: os.mkfifo(odd), "endless": lambda: odd.symlink_to("/dev/zero"), "folder": odd.mkdir}[kind]()
    assert command.main(["recipes"]) == 0
    capsys.readouterr()
    for name in ("mine", "recipes/mine.yaml"):
        assert "there is no recipe" in refused(capsys, f"+recipe={name}")


# --- processes


def seconds_of(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and the processor seconds of the processes that it started: other tests may hold the cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_comes_at_once_because_nothing_heavy_is_imported(cwd):
    script = (
        "import sys; from fxtune.cli.main import main; main(['--help']); main(['recipes']); "
        "print({'torch', 'hydra', 'yaml'} & {*sys.modules})"
    )
    done, seconds = seconds_of(lambda: fxtune("-c", script, cwd=cwd))
    assert "+recipe=quickstart" in done.stdout
    assert done.stdout.endswith("set()\n")
    assert seconds < seconds_of(lambda: fxtune("-c", "import torch", cwd=cwd))[1] / 2


def test_a_mistake_ends_in_little_more_than_torch_takes_before_a_model_is_touched(cwd):
    script = (
        "import sys; from fxtune.cli.main import main; code = main(['+recipe=quickstart', 'optimizer.lrr=1']); "
        "print({'transformers', 'peft', 'datasets', 'wandb'} & {*sys.modules}); sys.exit(code)"
    )
    done, seconds = seconds_of(lambda: fxtune("-c", script, cwd=cwd))
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert done.stderr == "fxtune: on the command line: unknown key `optimizer.lrr`; did you mean `optimizer.lr`?\n"
    assert seconds < 2 * seconds_of(lambda: fxtune("-c", "import torch", cwd=cwd))[1]


def test_the_module_is_the_command(cwd):
    done = fxtune("-m", "fxtune", "+recipe=lama_lora", cwd=cwd)
    assert done.returncode == 2
    assert "did you mean `llama_lora`?" in done.stderr


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("", "train", "optimizer="),
        ("pre", "preview", "train"),
        ("+re", "+recipe=", "+optimizer="),
        ("+recipe=", "+recipe=llama_lora", "recipe=llama_lora"),
        ("+recipe=mi", "+recipe=mine", "+recipe=quickstart"),
        ("optimizer=", "optimizer=muon", "optimizer.lr="),
        ("preview +recipe=quickstart optimizer=m", "optimizer=muon", "optimizer=sgd"),
        ("+recipe=quickstart train.max", "train.max_steps=", "train.epochs="),
        ("preview recipe=quickstart data.sources.0.p", "data.sources.0.path=", "data.sources.0.format="),
        ("+recipe=mine op", "optimizer.", "model."),
        ("recipes ", "", "optimizer="),
    ],
)
def test_completion(cwd, monkeypatch, capsys, line, offered, not_offered):
    recipe("broken: [\n")
    monkeypatch.setenv("COMP_LINE", f"fxtune {line}")
    monkeypatch.setenv("COMP_POINT", str(len(line) + 7))
    assert command.main(["-sc", "query=bash"]) == 0
    words = capsys.readouterr().out.split()
    assert offered in words or offered == ""
    assert not_offered not in words


def test_completion_in_a_real_bash(cwd):
    script = (
        'eval "$(fxtune -sc install=bash)"; COMP_LINE="fxtune +recipe=llama_l"; COMP_POINT=${#COMP_LINE}; '
        'COMP_WORDS=(fxtune +recipe=llama_l); COMP_CWORD=1; hydra_bash_completion; echo "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if not (Path(sys.executable).parent / "fxtune").exists():
        pytest.skip("the console script is not installed beside this Python")
    done = subprocess.run(
        ["bash", "-c", script], cwd=cwd, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "+recipe=llama_lora"
