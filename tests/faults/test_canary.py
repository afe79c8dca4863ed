"""Secrets in the environment, on command lines and in git must not occur in any file or output.

The test runs train with an offline W&B, then verify, bench, eval, merge, preview, --cfg, tune, doctor, sync, and
commands that fail. It searches each file below the home and the working directory, and all output of the processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import Wandb, serving

from fxtune.cli import doctor
from fxtune.cli import main as command
from fxtune.tracking import client
from fxtune.tracking import tracker as tracking
from fxtune.tracking.tracker import Tracker, TrackingConfig, WandbConfig, WandbMode
from fxtune.tuning import trial
from fxtune.tuning.trial import Outcome, TrialResult, failure

ENVIRONMENT = {
    "HF_TOKEN": "hf_" + "CanaryOne" * 4,
    "WANDB_API_KEY": "0123456789canary9876543210" + "ab" * 7,
    "MY_SERVICE_PASSWORD": 'canary "3" p@ss/word é',
    "AWS_SECRET_ACCESS_KEY": "Canary4/EXAMPLE+KEY/abcdefghijklmnopqrst",
}
"""Environment variables whose name marks a secret."""
TYPED = {
    "token": "hf_" + "CanaryFive" * 4,
    "key": "sk-proj-" + "CanarySix" * 4,
    "url": "CanarySevenPassword",
    "git": "ghp_" + "CanaryEight" * 4,
    "named": "canary-nine",
    "hex": "c0ffee" * 6 + "c0ff",
    "server": "CanaryTenPassword",
}
"""Secrets on command lines, in git and in W&B's address, recognizable by their format or position."""
SECRETS = {**ENVIRONMENT, **TYPED}
RUN = [
    *("+recipe=quickstart", "train.max_steps=2", "train.eval_every=0", "data.questions.path=null", "run.device=cpu"),
    *("tracking.display=plain", "data.sequence_length=64", "data.on_long=truncate", "train.micro_batch_size=2"),
    *("train.global_batch_size=2", "data.sources=[{path: rows.jsonl}]", "data.eval_sources=[{path: rows.jsonl}]"),
    *("data.on_overlap=keep", "data.cache_dir=tokens", "schedule.warmup_steps=0"),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Iterator[Path]:
    """A home and a working directory with secrets in them and in the environment."""
    home = tmp_path_factory.mktemp("home")
    work = home / "work"
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **ENVIRONMENT,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "HF_HOME": str(home / ".hf"),
        }.items():
            patch.setenv(name, value)
        patch.delenv("WANDB_MODE", raising=False)
        patch.chdir(work)
        for words in (
            ["init", "-q"],
            ["remote", "add", "origin", f"https://{TYPED['git']}@github.com/me/mine.git"],
            ["-c", "user.name=me", "-c", "user.email=me@x", "commit", "-q", "--allow-empty", "-m", "first"],
        ):
            subprocess.run(["git", *words], check=True, timeout=600)
        said = [
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"hello {number}"}]
            for number in range(8)
        ]
        (work / "rows.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in said))
        yield home


def in_process(capfd, *argv: str) -> tuple[int, str]:
    code = command.main(list(argv))
    out, err = capfd.readouterr()
    return code, out + err


def require_silent(text: str, where: str) -> None:
    """Assert that `text` contains no secret in any of the forms that programs write."""
    import base64
    from urllib.parse import quote

    for name, secret in SECRETS.items():
        for form in (
            secret,
            quote(secret, safe=""),
            quote(secret),
            json.dumps(secret)[1:-1],
            repr(secret)[1:-1],
            base64.b64encode(secret.encode()).decode()[:-3],
        ):
            assert form not in text, f"{name} stands in {where}"


def require_none_written(home: Path) -> int:
    git = home / "work" / ".git"  # the file that the test wrote
    files = [path for path in home.rglob("*") if path.is_file() and not path.is_relative_to(git)]
    for path in files:
        require_silent(path.read_bytes().decode("utf-8", "replace"), str(path.relative_to(home)))
    return len(files)


def test_planted_secret_is_found_by_the_search(planted):
    """The search works, so the tests below can fail."""
    for secret in SECRETS.values():
        found = planted / "found"
        found.write_text(f"x{secret}y")
        with pytest.raises(AssertionError, match="stands in found"):
            require_none_written(planted)
        found.unlink()


@pytest.mark.vital
def test_run_and_follow_up_commands_write_no_secret(planted, capfd, monkeypatch):
    argv = [
        *RUN,
        "run.dir=out",
        "tracking.wandb.mode=offline",
        f"tracking.wandb.group={TYPED['token']}",
        f"tracking.wandb.tags=[{TYPED['key']}]",
        f"run.name={TYPED['hex']}",
    ]
    monkeypatch.setattr(sys, "argv", ["fxtune", *argv])
    code, message = in_process(capfd, *argv)
    assert code == 0, message
    require_silent(message, "the output of train")
    for words in (
        ["verify", *RUN, "--json", "verify.json"],
        ["eval", *RUN, "model.adapter=out/adapter"],
        ["merge", "out/adapter", "merged"],
        ["preview", *RUN],
        ["bench", *argv, "--steps", "2", "--warm-up", "2", "--json", "bench.json"],
        [*argv, "--cfg", "job"],
        [*argv, "--cfg", "all", "--resolve"],
        [*argv, "--info", "config"],
        argv,
    ):
        code, message = in_process(capfd, *words)
        assert code == 0, message
        assert message
        require_silent(message, f"the output of {words[0]}")
    assert require_none_written(planted) > 20
    written = {path.name for path in (planted / "work").rglob("*")}
    assert {
        *("config.yaml", "README.md", "evidence.json", "metrics.jsonl", "verify.json", "bench.json", "process.log"),
    } <= written
    assert any(name.endswith(".wandb") for name in written)
    assert ".hydra" not in written


@pytest.mark.slow
def test_other_commands_write_no_secret(planted, capfd, monkeypatch):
    """tune with two trials, one of which prints secrets and fails, and its cache; doctor; sync, which fails."""
    argv = [
        *RUN,
        f"tracking.wandb.group={TYPED['token']}",
        f"tracking.wandb.tags=[{TYPED['key']}]",
        f"run.name={TYPED['hex']}",
    ]
    answers = [
        TrialResult(Outcome.measured, 1.0, 100.0, 1.0, (3.0, 2.0, 1.0, 1.0, 1.0), 0.0),
        failure(1, f"Traceback\nOSError: https://me:{TYPED['url']}@x {ENVIRONMENT['HF_TOKEN']}", 1.0),
    ]
    monkeypatch.setattr(trial, "measure", lambda *_: answers.pop(0) if len(answers) > 1 else answers[0])
    monkeypatch.setattr(tracking, "SYNC_PATIENCE", 0.5)
    monkeypatch.setattr(doctor, "run_check", lambda *_: {"state": "missing", "seen": ""})
    monkeypatch.setenv("WANDB_BASE_URL", f"http://me:{TYPED['server']}@127.0.0.1:9")  # no server listens
    run = planted / "work" / "sent"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"train/step": 1, "train/loss": 1.0}\n')
    (run / "config.yaml").write_text(
        "run: {name: a}\ntracking: {wandb: {project: p, entity: null, group: null, tags: []}}\n"
    )
    for words, code in (
        (["tune", *argv, "--axes", "micro_batch", "--steps", "2", "--json", "tune.json"], 0),
        (["doctor", *argv, "--json", "doctor.json"], 1),
        (["sync", "sent"], 6),
    ):
        monkeypatch.setattr(sys, "argv", ["fxtune", *words])
        ended, message = in_process(capfd, *words)
        assert ended == code, message
        assert message
        require_silent(message, f"the output of {words[0]}")
    assert (planted / ".cache" / "fxtune" / "trials.json").exists()
    written = {path.name for path in (planted / "work").rglob("*")}
    assert {"quickstart_tuned.yaml", "tune.json", "doctor.json"} <= written
    require_none_written(planted)


@pytest.mark.parametrize("mode", [WandbMode.online, WandbMode.offline])
def test_password_in_wandb_address_is_in_no_log_and_reported_once(mode, planted, monkeypatch):
    for name in ("END_TIMEOUT", "UPLOAD_TIMEOUT", "START_TIMEOUT", "SERVICE_TIMEOUT"):  # the machine may be busy
        monkeypatch.setattr(client, name, 300.0)
    notes: list[str] = []
    run = planted / "work" / mode.value
    with serving(Wandb()) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url.replace("://", f"://me:{TYPED['server']}@"))
        config = TrackingConfig(wandb=WandbConfig(mode=mode, init_timeout=300.0))
        with Tracker(config, run, "a run", {}, wandb_id="abcd1234", note=notes.append) as tracker:
            tracker.log(1, {"train/loss": 1.0})
        if mode is WandbMode.online:
            assert [row["train/step"] for row in server.history("abcd1234")] == [1], notes
    assert [note for note in notes if "the user and password in WANDB_BASE_URL are left out" in note] == notes[:1]
    require_silent("\n".join(notes), "the messages")
    assert (run / "wandb" / "process.log").exists()
    require_none_written(planted)


WRONG = [
    [f"tracking.wandb_api_key={TYPED['named']}"],
    [f"+hub_token={TYPED['named']}"],
    [f"model.hub_token='{TYPED['named']}'"],
    [f"model.path=https://me:{TYPED['url']}@huggingface.co/a/b"],
    [f"model.adapter={TYPED['token']}"],
    [f"data.sources=[{{path: 'https://me:{TYPED['url']}@x.org/y.jsonl'}}]"],
    [f"model.path='{TYPED['key']}'"],
    [f"optimizer.lr={TYPED['token']}"],
    [f"train.max_steps={TYPED['key']}"],
    [f"+recipe={TYPED['token']}"],
    [f"run.resume={TYPED['hex']}"],
    [f"optimizer={TYPED['key']}"],
    [f"data.chat_template=https://x.org/t?token={TYPED['url']}"],
    [f"model.architecture={{api_key: {TYPED['named']}}}", "model.init=random"],
]


@pytest.mark.vital
@pytest.mark.parametrize("words", WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_errors_of_wrong_commands_contain_no_secret(words, planted, capfd):
    code, message = in_process(capfd, *RUN, *words)
    assert code in (2, 3, 6), message
    assert re.search(r"^fxtune: ", message, re.MULTILINE)
    require_silent(message, "the message")


@pytest.mark.slow
def test_library_output_and_tracebacks_contain_no_secret(planted):
    """A bug raises an error with a token, after a print and a warning with a token and a proxy's password."""
    script = (
        "import os, sys, warnings, logging\nfrom fxtune.cli import main as command\n"
        "def broken(argv):\n    token = os.environ['HF_TOKEN']\n    print('got', token, os.environ['HTTPS_PROXY'])\n"
        "    warnings.warn(token)\n"
        "    logging.getLogger().error(token)\n    raise RuntimeError(f'url https://me:CanarySevenPassword@x/ {token}')\n"
        "command._run = broken\nsys.exit(command.main([]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(command.__file__).parents[2]),
            "HTTPS_PROXY": f"http://me:{TYPED['url']}@proxy:3128",
        },
    )
    assert done.returncode == 1
    assert "RuntimeError: url https://[redacted]@x/ [redacted]" in done.stderr
    assert "Traceback" in done.stderr
    assert done.stdout.startswith("got [redacted] http://me:[redacted]@proxy:3128")
    require_silent(done.stdout + done.stderr, "the traceback")
