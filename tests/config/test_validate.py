"""Keys and values of a recipe, which may come from a stranger: a mistake is named, and nothing in it is executed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.cases import pairs
from support.recipes import QUICK, refusal, write_recipe

from fxtune.cli.main import main
from fxtune.config import validate
from fxtune.config.compose import load
from fxtune.config.introspection import all_keys
from fxtune.config.root import Config
from fxtune.config.validate import Validator

KEYS = sorted(all_keys(Config))


def test_a_key_with_the_same_letters_is_proposed_before_one_that_is_more_alike():
    validator = Validator(Config, lambda _: "here", from_file=False)
    assert validator.find(("run", "xeport")) is None
    assert "did you mean `run.export`?" in validator.problems[0]  # run.report has a longer part in common


@given(st.sampled_from([key for key in KEYS if "." in key]), st.data())
def test_two_swapped_letters_in_a_key_are_recognised(key, data):
    """The key is refused, and the right one is proposed."""
    above, _, last = key.rpartition(".")
    place = data.draw(st.integers(0, max(0, len(last) - 2)))
    slipped = last[:place] + last[place : place + 2][::-1] + last[place + 2 :]
    validator = Validator(Config, lambda _: "here", from_file=False)
    found = validator.find((*above.split("."), slipped))
    if slipped == last:
        assert found is not None
    else:
        assert found is None
        if len(last) > 3:
            assert f"did you mean `{key}`?" in validator.problems[0]


def test_names_of_other_trainers_lead_to_keys_that_exist():
    table = yaml.safe_load(Path(validate.__file__).with_name("other_names.yaml").read_text())
    assert table["other_trainers"].keys() <= set(KEYS)
    assert not table["earlier_versions"].keys() & set(KEYS)


def test_only_the_user_may_trust_code_or_write_elsewhere(cwd):
    write_recipe("run: {dir: 'runs/${run.name}-${run.seed}'}\ndata: {cache_dir: ./tokens, sources: [{path: x}]}\n")
    config = load([QUICK, "model.trust_remote_code=true", "run.dir=/elsewhere", "data.cache_dir='~/.cache/mine'"])
    assert config.model.trust_remote_code
    assert (config.run.dir, config.data.cache_dir) == ("/elsewhere", "~/.cache/mine")
    config = load(["+recipe=mine"])
    assert (config.run.dir, config.data.cache_dir) == ("runs/mine-0", "./tokens")


def test_switch_needs_no_quotes(cwd):
    write_recipe(
        "defaults: [quickstart]\ntechniques:\n  liger: {enabled: on}\n  lora: {fused: off}\n"
        "  quantize: {experts: 'off'}\n  compile: {cuda_graphs: on}\n"
    )
    found = load(["+recipe=mine"]).techniques
    switches = (found.lora.fused.value, found.quantize.experts.value, found.compile.cuda_graphs.value)
    assert (found.liger.enabled, *switches) == (True, "off", "off", "on")
    block = refusal("+recipe=mine", "techniques.lora.fused=true")
    assert "`techniques.lora.fused=true` is not one of auto, on, off; did you mean `on`?" in block


def test_a_list_of_kernels_or_auto(cwd):
    write_recipe("defaults: [quickstart]\ntechniques:\n  liger: {enabled: true, kernels: [rope, swiglu]}\n")
    assert load(["+recipe=mine"]).techniques.liger.kernels == ["rope", "swiglu"]
    assert load(["+recipe=mine", "techniques.liger.kernels=auto"]).techniques.liger.kernels == "auto"
    block = refusal("+recipe=mine", "techniques.liger.kernels=[rpoe]")
    assert "is not one of rms_norm, layer_norm, rope," in block
    assert "did you mean `rope`?" in block


@pytest.fixture
def marker(cwd, monkeypatch) -> Path:
    """A file that appears if a recipe's code runs."""
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
    "tasks with code": "eval: {tasks: [a], task_folder: tasks}",
    "tasks with code, pointed at": "eval: {tasks: [a], task_folder: '${run.name}'}",
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
        *pairs(
            ("callback", "sweeper", "grid", "grid over secrets", "secret", "python tag"),
            (["-m"], ["--cfg", "job", "--resolve"], ["--info"]),
        ),
    ],
)
def test_recipe_of_a_stranger_runs_no_code_and_reads_no_secret(marker, capsys, what, flags):
    write_recipe(STRANGE[what] + "\n")
    assert main([*flags, "+recipe=mine", "data.sources=[{path: x}]"]) == 2
    out, err = capsys.readouterr()
    assert not marker.exists()
    assert "hunter2" not in out + err


def test_marker_appears_if_hydra_reads_the_callback_unchecked(marker):
    """Shows that the tests above can fail."""
    script = (
        "import hydra\nfrom hydra.core.config_store import ConfigStore\n"
        "ConfigStore.instance().store('c', {'hydra': {'callbacks': {'x': {'_target_': 'strange.X'}}}})\n"
        "hydra.main(version_base='1.3', config_path=None, config_name='c')(lambda cfg: None)()\n"
    )
    Path("unchecked.py").write_text(script)
    subprocess.run([sys.executable, "unchecked.py"], check=True, timeout=600, capture_output=True)
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
def test_pasted_command_line_runs_no_code_and_reads_no_secret(marker, text):
    block = refusal(QUICK, text)
    assert not marker.exists()
    assert "hunter2" not in block
