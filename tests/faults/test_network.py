"""A hub on loopback that fails in many ways: local files are used, and the message says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.servers import COMMIT, Hub, refused, serving

FILES = {"config.json": b"{}", "tokenizer.json": b"{}" * 500, "model.safetensors": bytes(range(256)) * 400}

CHILD = """
import sys
from fxtune.system.files import hub
from fxtune.errors import UserError
hub.REQUEST_SECONDS = float(sys.argv[3])
hub.PAUSE_SECONDS = 600.0
try:
    origin = hub.locate(sys.argv[1], sys.argv[2] or None)
    hub.fetch(origin, ["model.safetensors"])
    hub.locate(sys.argv[1], None, "model.tokenizer")
    reason = hub.resolve_commit("nobody/data", None, "dataset")[1]
    print(f"dataset: {reason}", f"bytes: {(origin.folder / 'model.safetensors').stat().st_size}", sep="\\n")
except UserError as error:
    print(f"error {error.exit_code}: {error}")
"""


@pytest.fixture(scope="module")
def hub():
    with serving(Hub(FILES)) as server:
        yield server


@pytest.fixture(scope="module")
def cache(hub, tmp_path_factory):
    """A cache that an earlier run filled."""
    home = tmp_path_factory.mktemp("home")
    out = locate_in_process(hub.url, home)
    assert "dataset: None" in out
    assert f"bytes: {len(FILES['model.safetensors'])}" in out
    return home


def locate_in_process(url, home, patience=300.0):
    """The output of a process that needs a model, its tokenizer and a dataset.

    `patience`: seconds for the hub's answer.
    """
    environment = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    words = [sys.executable, "-c", CHILD, "nobody/tiny", "", str(patience)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def questions(hub):
    """The requests about a repository. The hub's library asks for a list of agents first, once a day."""
    return [request for request in hub.requests if "/nobody/" in request]


FAULTS = {
    "silent": "no answer in 2 s",
    "drips": "no answer in 2 s",
    "breaks": "peer closed",
    500: "500",
    429: "429",
    401: "401",
    "refused": "refused",
}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "reason"), FAULTS.items())
def test_failing_hub_is_asked_once_and_the_cache_is_used(hub, cache, mode, reason):
    """One request with a timeout limits the wait.

    A refusal (401) concerns one repository, so each is requested once.
    """
    hub.mode = mode
    hub.requests.clear()
    url = refused() if mode == "refused" else hub.url
    out = locate_in_process(url, cache, 2.0 if mode in ("silent", "drips") else 300.0)
    assert len(questions(hub)) <= (3 if mode == 401 else 1), hub.requests
    used = "The files of an earlier run are used: commit " + COMMIT
    assert out.count(used) == 2, out  # for the model and the tokenizer
    assert reason in out.splitlines()[0], out
    assert f"bytes: {len(FILES['model.safetensors'])}" in out


def test_complete_commit_in_the_cache_is_not_asked_for(hub, cache):
    hub.mode = "works"
    hub.requests.clear()
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    code = (
        f"from fxtune.system.files import hub; origin = hub.locate('nobody/tiny', '{COMMIT}');"
        "hub.fetch(origin, ['model.safetensors']); print(origin.revision)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == COMMIT, done.stderr
    assert questions(hub) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["silent", 500, "refused"])
def test_missing_model_without_a_hub_fails_after_one_question(hub, tmp_path, mode):
    hub.mode = mode
    hub.requests.clear()
    url = refused() if mode == "refused" else hub.url
    out = locate_in_process(url, tmp_path, 2.0 if mode == "silent" else 300.0)
    assert len(questions(hub)) <= 1, hub.requests
    assert out.startswith("error 6: model.path=nobody/tiny: no such folder here, and the hub cannot be reached ("), out
    assert "`hf download nobody/tiny`" in out


@pytest.mark.slow
def test_interrupted_download_continues_where_it_stopped(hub, tmp_path):
    hub.mode = "works"
    hub.broken = ["model.safetensors"] * 30  # more than the retries of the hub's library
    out = locate_in_process(hub.url, tmp_path)
    assert "error 6: model.path=nobody/tiny: fetching model.safetensors from the hub broke off (" in out, out
    assert not list(tmp_path.glob("**/snapshots/*/model.safetensors")), "an incomplete file has another name"
    hub.broken = []
    out = locate_in_process(hub.url, tmp_path)
    assert f"bytes: {len(FILES['model.safetensors'])}" in out
    [fetched] = tmp_path.glob("**/snapshots/*/model.safetensors")
    assert fetched.read_bytes() == FILES["model.safetensors"]


@pytest.mark.slow
def test_download_says_how_many_bytes_have_come(hub, tmp_path):
    hub.mode = "works"
    code = """
import huggingface_hub
from fxtune.system.files import hub
from fxtune.system.terminal import progress
download = huggingface_hub.snapshot_download
def fetched(*arguments, **options):
    folder = download(*arguments, **options)
    work = progress.current()
    print(round(work.done * 1e9), round(work.total * 1e9), work)
    return folder
origin = hub.locate("nobody/tiny")
huggingface_hub.snapshot_download = fetched
hub.fetch(origin, ["model.safetensors"])
"""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    size = len(FILES["model.safetensors"])
    assert done.stdout.startswith(f"{size} {size} Downloading model.safetensors of nobody/tiny: 100%"), done.stderr
