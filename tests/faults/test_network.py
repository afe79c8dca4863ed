"""The network fails in every way it knows, on loopback: training goes on, and says what it did without."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from support.servers import COMMIT, Hub, refused, serving

# --- the hub

FILES = {"config.json": b"{}", "tokenizer.json": b"{}" * 500, "model.safetensors": bytes(range(256)) * 400}

CHILD = """
import sys, time
from fxtune.system import hub
from fxtune.errors import UserError
begun = time.monotonic()
try:
    origin = hub.locate(sys.argv[1], sys.argv[2] or None)
    hub.fetch(origin, ["model.safetensors"])
    hub.locate(sys.argv[1], None, "model.tokenizer")
    told = hub.resolve_commit("nobody/data", None, "dataset")[1]
    print(f"dataset: {told}", f"bytes: {(origin.folder / 'model.safetensors').stat().st_size}", sep="\\n")
except UserError as error:
    print(f"error {error.exit_code}: {error}")
print(f"seconds: {time.monotonic() - begun:.2f}")
"""


@pytest.fixture(scope="module")
def hub():
    with serving(Hub(FILES)) as server:
        yield server


@pytest.fixture(scope="module")
def cache(hub, tmp_path_factory):
    """A cache that an earlier run filled."""
    home = tmp_path_factory.mktemp("home")
    out, _ = ask(hub.url, home)
    assert "dataset: None" in out
    assert f"bytes: {len(FILES['model.safetensors'])}" in out
    return home


def ask(url, home, revision=""):
    """What a process prints that wants a model, its tokenizer and a dataset; and the seconds that it took."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "nobody/tiny", revision],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, float(done.stdout.rpartition("seconds: ")[2])


FAULTS = {
    "silent": "no answer in 4 s",
    "drips": "no answer in 4 s",
    "breaks": "peer closed",
    500: "500",
    429: "429",
    401: "401",
    "refused": "refused",
}


@pytest.mark.parametrize(("mode", "reason"), FAULTS.items())
def test_a_hub_that_fails_costs_four_seconds_at_most_and_what_was_fetched_is_used(hub, cache, mode, reason):
    hub.mode = mode
    url = refused() if mode == "refused" else hub.url
    out, seconds = ask(url, cache)
    assert seconds < 5
    assert out.count("so what an earlier run fetched is used: commit " + COMMIT) == 2, (
        out
    )  # the model's, the tokenizer's
    assert reason in out.splitlines()[0], out
    assert f"bytes: {len(FILES['model.safetensors'])}" in out


def test_a_commit_that_is_here_whole_is_not_asked_for(hub, cache):
    hub.mode = "works"
    hub.asked.clear()
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    code = (
        f"from fxtune.system import hub; origin = hub.locate('nobody/tiny', '{COMMIT}'); hub.fetch(origin, ['model.safetensors']);"
        "print(origin.revision)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == COMMIT, done.stderr
    assert hub.asked == []


@pytest.mark.parametrize("mode", ["silent", 500, "refused"])
def test_what_is_not_here_and_cannot_be_had_is_one_error_in_seconds(hub, tmp_path, mode):
    hub.mode = mode
    out, seconds = ask(refused() if mode == "refused" else hub.url, tmp_path)
    assert seconds < 5
    assert out.startswith(
        "error 6: model.path=nobody/tiny: no such folder here, and the hub cannot be reached for it ("
    ), out
    assert "`hf download nobody/tiny`" in out


def test_a_download_that_breaks_off_goes_on_where_it_stopped(hub, tmp_path):
    hub.mode = "works"
    hub.broken = ["model.safetensors"] * 30  # more often than the hub's library tries again
    begun = time.monotonic()
    out, _ = ask(hub.url, tmp_path)
    assert "error 6: model.path=nobody/tiny: fetching model.safetensors from the hub broke off (" in out, out
    assert time.monotonic() - begun < 60
    assert not list(tmp_path.glob("**/snapshots/*/model.safetensors")), "half a file is never taken for the file"
    hub.broken = []
    out, _ = ask(hub.url, tmp_path)
    assert f"bytes: {len(FILES['model.safetensors'])}" in out
    [fetched] = tmp_path.glob("**/snapshots/*/model.safetensors")
    assert fetched.read_bytes() == FILES["model.safetensors"]
