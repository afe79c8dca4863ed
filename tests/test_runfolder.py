import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fxtune.errors import ConfigError, StorageError
from fxtune.runfolder import claim, differences

CONFIG = {"optimizer": {"lr": 1e-4}, "run": {"name": "a", "resume": "auto"}, "data": {"sources": [{"path": "x.jsonl"}]}}
OTHER = {**CONFIG, "optimizer": {"lr": 2e-4}}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def start(resume="auto", config=CONFIG, folder=None):
    found = claim("a", folder, resume, config)
    found.release()
    return found


def test_a_run_records_its_config_and_is_gone_on_with_by_the_same_command():
    first = start()
    assert (first.path, first.resumed) == (Path("runs/a"), False)
    assert yaml.safe_load((first.path / "config.yaml").read_text()) == CONFIG
    again = start(config={**CONFIG, "run": {"name": "a", "resume": "must"}}, resume="must")
    assert (again.path, again.resumed) == (Path("runs/a"), True)


def test_another_config_a_finished_run_and_never_get_a_folder_of_their_own():
    first = start()
    assert start(config=OTHER).path == Path("runs/a-2")
    first.finish({"train/loss": 1.0})
    assert start(config=OTHER).path == Path("runs/a-2")  # its own unfinished run
    assert start().path == Path("runs/a-3")
    assert start(resume="never").path == Path("runs/a-4")


def test_two_unfinished_runs_are_each_gone_on_with_whichever_is_newer():
    assert [start().path, start(config=OTHER).path] == [Path("runs/a"), Path("runs/a-2")]
    for _ in range(2):
        again, other = start(), start(config=OTHER)
        assert (again.path, again.resumed, other.path, other.resumed) == (Path("runs/a"), True, Path("runs/a-2"), True)


def test_a_run_is_found_where_older_folders_were_deleted():
    start().finish({})
    assert start().path == Path("runs/a-2")
    shutil.rmtree("runs/a")
    assert (start().path, start().resumed) == (Path("runs/a-2"), True)
    Path("runs/a-2b").mkdir()  # another run's
    assert start(config=OTHER).path == Path("runs/a-3")


def test_a_given_folder_is_used_as_it_is_or_refused_with_the_differences():
    assert start(folder="here").path == Path("here")
    assert start(folder="here").resumed
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.0001 -> 0\.0002"):
        start(folder="here", config=OTHER)
    with pytest.raises(ConfigError, match="would write over it"):
        start(folder="here", resume="never")
    start(folder="here").finish({})
    assert start(folder="here").finished


def test_must_fails_where_there_is_nothing_to_go_on_with():
    with pytest.raises(ConfigError, match="no unfinished run"):
        start(resume="must")
    with pytest.raises(ConfigError, match="holds no run"):
        start(resume="must", folder="here")
    start(config=OTHER)
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        start(resume="must")


def test_a_run_that_is_alive_in_another_process_is_left_alone():
    program = ("import json, sys\nfrom fxtune.runfolder import claim\n"
               "held = claim('a', sys.argv[1] or None, 'auto', json.loads(sys.argv[2]))\n"
               "print('claimed', flush=True)\nsys.stdin.read()")
    for folder in ("", "here"):
        other = subprocess.Popen([sys.executable, "-c", program, folder, json.dumps(CONFIG)], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "claimed\n"
        if folder:
            with pytest.raises(StorageError, match="in use"):
                start(folder="here")
        else:
            assert start().path == Path("runs/a-2")
        other.kill()
        other.wait()
        assert start(folder=folder or "runs/a").resumed  # a killed process holds no lock


def test_only_what_is_learned_counts_as_a_difference():
    now = {**CONFIG, "run": {"name": "a", "resume": "never"}, "tracking": {"display": "none"}, "train": {"log_every": 5}}
    assert differences(CONFIG, now) == []
    assert differences(CONFIG, {**CONFIG, "data": {"sources": [{"path": "y.jsonl"}]}}) == [
        "  data.sources.0.path: x.jsonl -> y.jsonl"]
