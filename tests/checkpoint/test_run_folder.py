import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fxtune.checkpoint.run_folder import claim, config_digest, differences, sweep_folder
from fxtune.errors import ConfigError, StorageError

CONFIG = {
    "optimizer": {"lr": 1e-4},
    "run": {"name": "a", "resume": "auto"},
    "data": {"sources": [{"path": "x.jsonl"}]},
}
OTHER = {**CONFIG, "optimizer": {"lr": 2e-4}}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def start(resume="auto", config=CONFIG, folder=None):
    found = claim("a", folder, resume, config)
    found.release()
    return found


def test_run_records_its_config_and_the_same_command_resumes_it():
    first = start()
    assert (first.path, first.resumed) == (Path("runs/a"), False)
    assert yaml.safe_load((first.path / "config.yaml").read_text()) == CONFIG
    again = start(config={**CONFIG, "run": {"name": "a", "resume": "must"}}, resume="must")
    assert (again.path, again.resumed) == (Path("runs/a"), True)


def test_other_configs_finished_runs_and_never_get_new_folders():
    first = start()
    assert start(config=OTHER).path == Path("runs/a-2")
    first.finish({"train/loss": 1.0})
    assert start(config=OTHER).path == Path("runs/a-2")  # its own unfinished run
    assert start().path == Path("runs/a-3")
    assert start(resume="never").path == Path("runs/a-4")


def test_run_that_is_refused_leaves_no_folder_and_other_runs_stay():
    start().abandon()
    assert not Path("runs").exists()
    first = start()
    start(config=OTHER).abandon()
    assert [*Path("runs").iterdir()] == [first.path]


def test_checkpoints_without_a_config_are_not_trained_over():
    step = start(folder="mine").path / "checkpoints" / "step-00000008"
    step.mkdir(parents=True)
    Path("mine/config.yaml").unlink()
    with pytest.raises(StorageError, match=r"mine has checkpoints and no config\.yaml"):
        start(folder="mine")
    assert step.is_dir()
    shutil.rmtree("mine/checkpoints")
    assert not start(folder="mine").resumed


def test_a_locale_without_utf_8_reads_the_config_of_a_run_that_has_other_characters():
    start(folder="mine", config={**CONFIG, "data": {"sources": [{"path": "störung.jsonl"}]}})
    code = "from fxtune.checkpoint.run_folder import *; print(ascii(read_config(Path('mine'))))"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True, text=True)
    assert r"st\xf6rung.jsonl" in done.stdout, done.stderr


def test_two_unfinished_runs_are_each_resumed():
    assert [start().path, start(config=OTHER).path] == [Path("runs/a"), Path("runs/a-2")]
    for _ in range(2):
        again, other = start(), start(config=OTHER)
        assert (again.path, again.resumed, other.path, other.resumed) == (Path("runs/a"), True, Path("runs/a-2"), True)


def test_run_is_found_after_older_folders_were_deleted():
    start().finish({})
    assert start().path == Path("runs/a-2")
    shutil.rmtree("runs/a")
    assert (start().path, start().resumed) == (Path("runs/a-2"), True)
    Path("runs/a-2b").mkdir()  # another run's
    assert start(config=OTHER).path == Path("runs/a-3")


def test_given_folder_is_used_or_refused_with_the_differences():
    assert start(folder="here").path == Path("here")
    assert start(folder="here").resumed
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.0001 -> 0\.0002"):
        start(folder="here", config=OTHER)
    with pytest.raises(ConfigError, match="would write over it"):
        start(folder="here", resume="never")
    start(folder="here").finish({})
    assert start(folder="here").finished


def test_must_fails_without_a_run_to_resume():
    with pytest.raises(ConfigError, match="no unfinished run"):
        start(resume="must")
    with pytest.raises(ConfigError, match="holds no run"):
        start(resume="must", folder="here")
    start(config=OTHER)
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        start(resume="must")


@pytest.mark.slow
def test_run_of_a_live_process_is_not_resumed():
    program = (
        "import json, sys\nfrom fxtune.checkpoint.run_folder import claim\n"
        "held = claim('a', sys.argv[1] or None, 'auto', json.loads(sys.argv[2]))\n"
        "print('claimed', flush=True)\nsys.stdin.read()"
    )
    for folder in ("", "here"):
        other = subprocess.Popen(
            [sys.executable, "-c", program, folder, json.dumps(CONFIG)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(StorageError, match="in use"):
            start(folder=folder or None)
        if not folder:
            assert start(resume="never").path == Path("runs/a-2")
            shutil.rmtree("runs/a-2")
        other.kill()
        other.wait()
        assert start(folder=folder or "runs/a").resumed  # a killed process holds no lock


def test_only_keys_that_change_learning_are_differences():
    now = {
        **CONFIG,
        "run": {"name": "a", "resume": "never"},
        "tracking": {"display": "none"},
        "train": {"log_every": 5},
    }
    assert differences(CONFIG, now) == []
    assert differences(CONFIG, {**CONFIG, "data": {"sources": [{"path": "y.jsonl"}]}}) == [
        "  data.sources.0.path: x.jsonl -> y.jsonl"
    ]


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_command_that_runs_already_is_refused(resume):
    held = claim("a", None, "auto", CONFIG)
    with pytest.raises(StorageError, match=r"runs/a has a run of this config and is in use by a run"):
        start(resume)
    other = start(config=OTHER)
    assert other.path == Path("runs/a-2")
    held.release()


def test_a_new_run_names_the_unfinished_run_that_it_does_not_resume():
    assert start().passed_over == []
    assert start(config=OTHER).passed_over == ["runs/a:", "  optimizer.lr: 0.0001 -> 0.0002"]
    assert start(config=OTHER).passed_over == []  # it resumes
    start(config=OTHER).finish({})
    start().finish({})
    assert start().passed_over == []
    assert start("must").resumed


def test_a_new_run_names_the_run_whose_config_is_gone():
    folder = start().path
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "config.yaml").unlink()
    new = start()
    assert new.path == Path("runs/a-2")
    assert new.passed_over == ["runs/a has checkpoints, but its config.yaml is missing."]


def test_a_new_run_names_the_finished_run_that_a_longer_one_could_go_on_with():
    epochs = {number: {**CONFIG, "train": {"max_steps": None, "epochs": number}} for number in (3, 5, 7)}
    start(config=epochs[5]).finish({})
    assert start(config=OTHER).finished_before is None
    assert start(config=epochs[3]).finished_before is None
    assert start(config=epochs[7]).finished_before == Path("runs/a")
    assert start("never", config=epochs[7]).finished_before is None
    Path("runs/a/config.yaml").write_text("train: 5\n")
    assert start(config={**epochs[7], "train": {"max_steps": 9, "epochs": 7}}).finished_before is None


def test_all_paths_to_a_folder_share_its_lock():
    held = claim("a", "here", "auto", CONFIG)
    Path("there").symlink_to("here")
    Path("below").mkdir()
    for path in ("there", "below/../here", str(Path("here").resolve())):
        with pytest.raises(StorageError, match="in use by a run that is alive"):
            start(folder=path)
    held.release()
    assert start(folder="there").resumed


def test_unreadable_config_is_an_error_or_another_run():
    start()
    for text in ("a: [", "- 1\n", "", "\x00"):
        Path("runs/a/config.yaml").write_text(text)
        with pytest.raises(StorageError, match=r"runs/a/config\.yaml, the config of the run there"):
            start(folder="runs/a")
        with pytest.raises(ConfigError, match=r"the config of the run there"):
            start("must")
    assert start().path == Path("runs/a-2")  # what cannot be read is left alone


def test_unreadable_result_is_an_error_that_says_what_to_do():
    found = start()
    found.finish({"train/loss": 1.0})
    assert found.result() == {"train/loss": 1.0}
    (found.path / "result.json").write_text("{")
    with pytest.raises(StorageError, match=r"result\.json.*Remove it to finish the run again"):
        found.result()


def test_failed_result_write_is_an_error_and_keeps_the_old_one():
    found = start()
    found.finish({"first": 1})
    (found.path / ".result.json").mkdir()  # where the new one would be written first
    with pytest.raises(StorageError, match=r"result\.json cannot be written.*goes on from the last checkpoint"):
        found.finish({"second": 2})
    assert found.result() == {"first": 1}


def test_sweep_resumes_in_its_folders_and_other_settings_get_new_ones():
    root = Path("runs/a/optimizer.lr=0.1")
    assert sweep_folder(root, "auto", CONFIG) == root
    start(folder=str(root))
    assert sweep_folder(root, "auto", CONFIG) == root
    second = sweep_folder(root, "auto", OTHER)
    assert second == Path("runs/a/optimizer.lr=0.1-2")
    start(folder=str(second), config=OTHER).finish({})
    assert [sweep_folder(root, "auto", config) for config in (CONFIG, OTHER)] == [
        root,
        second,
    ]  # also one that is finished
    assert sweep_folder(root, "never", CONFIG) == Path("runs/a/optimizer.lr=0.1-3")
    assert sweep_folder(root, "must", {**CONFIG, "optimizer": {"lr": 3.0}}) == root  # where claim() says what differs


@given(
    st.dictionaries(
        st.sampled_from(["optimizer.lr", "run.dir", "loader.num_workers", "model.path"]), st.integers(0, 2)
    )
)
def test_config_digests_are_equal_exactly_without_differences(changes):
    config = {"optimizer": {"lr": 0}, "run": {"dir": 0}, "loader": {"num_workers": 0}, "model": {"path": 0}}
    other = {group: dict(keys) for group, keys in config.items()}
    for key, value in changes.items():
        group, name = key.split(".")
        other[group][name] = value
    assert (config_digest(config) == config_digest(other)) == (not differences(config, other))
