"""scripts/bench/first_step.py: each case composes, cold runs share no cache with this machine, a failure is a row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fxtune.config.compose import load

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))
import first_step  # noqa: E402

sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("name", first_step.CASES)
def test_every_case_composes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(first_step.bench_peers, "documents", lambda *_: tmp_path / "none.jsonl")
    config = load(first_step.words_of(name, tmp_path))
    assert config.techniques.lora.enabled


def test_the_second_measurement_of_a_case_finds_the_caches_of_the_first_and_a_failure_is_a_row(tmp_path, monkeypatch):
    caches, codes = [], iter([0, 0, 2, 2])
    figures = {
        "first_step_seconds": 10.0,
        "second_step_seconds": 11.0,
        "startup_seconds": {"imports": 8.0, "first steps": 3.0},
        "compile_seconds": None,
        "loss": 1.0,
        "device": "cpu",
        "packages": {},
        "losses": [1.0],
    }

    def run(command, env, **_):
        caches.append(env["XDG_CACHE_HOME"])
        assert all(env[name].startswith(env["XDG_CACHE_HOME"]) for name in set(env) - {"PATH"})
        code = next(codes)
        if code == 0:
            Path(command[command.index("--json") + 1]).write_text(json.dumps(figures))
        return SimpleNamespace(returncode=code, stdout="", stderr="fxtune: no\nGPU")

    monkeypatch.setattr(first_step.subprocess, "run", run)
    monkeypatch.setattr(first_step.os, "environ", {"PATH": "/bin", "XDG_CACHE_HOME": "/mine"})
    monkeypatch.setattr(
        sys, "argv", ["first_step.py", "--cases", "quickstart,tiny", "--json", str(tmp_path / "s.json")]
    )
    first_step.main()
    assert caches[0] == caches[1] != caches[2] == caches[3]
    rows = json.loads((tmp_path / "s.json").read_text())
    assert rows["quickstart warm"]["startup_seconds"] == {"imports": 8.0, "first steps": 3.0}
    assert rows["tiny cold"] == {"error": "fxtune: no\nGPU"}
    lines = first_step.table(rows).splitlines()
    assert len({line.count("|") for line in lines if line}) == 1, "each row has a cell for each column"
    assert "fxtune: no GPU" in lines[-1]


def test_a_peer_starts_by_the_same_rule_and_has_a_row_without_parts(tmp_path, monkeypatch, capsys):
    caches = []

    def run_peer(name, tool, given, seconds):
        assert (name, tool) == ("dpo_8b_8x1024", "trl")
        caches.append(first_step.os.environ["TRITON_CACHE_DIR"])
        return {"second_step_seconds": 31.0, "loss": 0.7, "device": "H200", "tokens_per_second": 1.0}

    monkeypatch.setattr(first_step.bench_peers, "run_peer", run_peer)
    monkeypatch.setattr(first_step, "has_bytecode", lambda: True)
    monkeypatch.setattr(first_step, "words_of", lambda *_: [])
    monkeypatch.setattr(first_step.os, "environ", {"PATH": "/bin"})
    monkeypatch.setattr(sys, "argv", ["first_step.py", "--cases", "dpo", "--tools", "trl"])
    first_step.main()
    assert caches[0] == caches[1]
    assert first_step.os.environ == {"PATH": "/bin"}
    assert "| dpo warm trl |  | 31.0 |" in capsys.readouterr().out
    assert first_step.measurement("dpo warm trl", {"second_step_seconds": 31.0}).seconds_to_second_step == 31.0
