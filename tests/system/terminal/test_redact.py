import io
import os
import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.system.terminal.redact import HIDDEN, redact, redact_arguments, redact_text, redacted_output


@pytest.mark.parametrize("key", ["hub_token", "token", "api_key", "WANDB_API_KEY", "aws.secret", "password", "auth"])
def test_secret_name_hides_its_value(key):
    assert redact({"a": [{key: "anything"}]}) == {"a": [{key: HIDDEN}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pad_token", "<pad>"),
        ("max_new_tokens", "12"),
        ("tokenizer", "x"),
        ("hub_token", True),
        ("token", ""),
        ("revision", "0e9e39f249a16976918f6564b8830bc894c89659"),
        ("path", "https://hf.co/a/b?download=true"),
        ("keys", "abc"),
        ("target_modules", "all-linear"),
        ("path", "s3://bucket/data.jsonl"),
    ],
)
def test_harmless_values_stay(key, value):
    assert redact({key: value}) == {key: value}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a" * 30,
        "ghp_" + "A1" * 18,
        "sk-proj-" + "x" * 30,
        "AKIA" + "A" * 16,
        "glpat-" + "x" * 20,
        "eyJhbGciOi.eyJzdWIi.c2lnbmF0dXJl",
        "0e9e39f249a16976918f6564b8830bc894c89659",
    ],
)
def test_secret_shape_is_hidden_in_any_text(secret):
    assert redact({"note": f"use {secret} here"}) == {"note": f"use {HIDDEN} here"}


COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.mark.parametrize(
    "text",
    [
        f"model.path=a/b has no revision '{COMMIT}'. Its branches: https://huggingface.co/a/b/commits",
        f"revision={COMMIT} has no meaning",
        f"in model.revision (here {COMMIT}).",
        f"cannot be told to be revision {COMMIT}",
        f"/root/.cache/hub/models--a--b/snapshots/{COMMIT}/config.json is missing",
        f"https://huggingface.co/a/b/resolve/{COMMIT}/x.json",
        f"backend: hub:kernels-community/flash-attn3@{COMMIT} cannot be loaded",
        f"pip install git+https://github.com/a/b@{COMMIT}",
    ],
)
def test_commit_in_a_message_stays(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        f"wandb login {COMMIT}",
        f"the commit was made with WANDB_API_KEY={COMMIT}",
        f"key {COMMIT} of revision main",
        f"api_key: '{COMMIT}'",
        f"revision main, key={COMMIT}",
        COMMIT,
        f"my_revision_key={COMMIT}",
        f"user@{COMMIT}",
    ],
)
def test_key_is_hidden_if_a_commit_is_only_mentioned_elsewhere(text):
    assert COMMIT not in redact(text)


def test_key_of_the_environment_is_hidden_in_place_of_a_commit(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", COMMIT)
    assert redact(f"revision={COMMIT}") == f"revision={HIDDEN}"
    assert redact({"revision": COMMIT}) == {"revision": HIDDEN}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("unknown key `hub_token=abc`; did you mean", f"unknown key `hub_token={HIDDEN}`; did you mean"),
        ("model:\n  api_key: abc\n  path: x", f"model:\n  api_key: {HIDDEN}\n  path: x"),
        ("+tracking.wandb_api_key='a b'", f"+tracking.wandb_api_key='{HIDDEN} b'"),
        ("https://me:pa/ss@host/x", f"https://{HIDDEN}@host/x"),
        ("in /work/https:/me:pw@host/x", f"in /work/https:/{HIDDEN}@host/x"),
        *((same, same) for same in ("optimizer.lr=1e-4 and data.path=a@b", "pad_token=<pad>",
         "the next token: is learned", "http://localhost:8080/x/y@main", "pip install git+https://github.com/a/b@v1",
         "train.max_steps=10", "two tokens=2", "keys: a, b")),
    ],
)  # fmt: skip
def test_message_loses_values_after_a_secret_name(text, kept):
    assert redact_text(text) == kept


def test_output_loses_only_the_secrets_of_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("MY_SERVICE_TOKEN", 'tell "no" one/ü')
    with redacted_output():
        print("a", 'tell "no" one/ü', "sk-this-is-a-row-of-data-shown")
        print('{"a": "tell \\"no\\" one/\\u00fc"}', file=sys.stderr)
        sys.stdout.writelines(["x=tell%20%22no%22%20one%2F%C3%BC", "\n"])
        assert not sys.stdout.isatty(), "what else a stream can do, it does"
    print('tell "no" one/ü')
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"a {HIDDEN} sk-this-is-a-row-of-data-shown", f"x={HIDDEN}", 'tell "no" one/ü']
    assert err == f'{{"a": "{HIDDEN}"}}\n'


@pytest.mark.parametrize("ending", ["KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS", "AUTH"])
def test_each_secret_ending_of_a_variable_hides_its_value(ending, monkeypatch):
    monkeypatch.setenv(f"MY_SERVICE_{ending}", "eight or more")
    monkeypatch.setenv(f"MY_{ending}_FILE", "a path of the user")
    assert redact({"note": "eight or more, a path of the user"}) == {"note": f"{HIDDEN}, a path of the user"}


def test_urls_lose_only_users_and_signatures():
    assert redact({"path": "https://me:pw@host.org/x?sig=abc&size=3"}) == {
        "path": f"https://{HIDDEN}@host.org/x?sig={HIDDEN}&size=3"
    }


def test_command_lines_are_redacted_by_key():
    assert redact_arguments(["+recipe=x", "model.hub_token=abc", "optimizer.lr=1e-4", "-m", "hf_" + "a" * 20]) == [
        "+recipe=x",
        f"model.hub_token={HIDDEN}",
        "optimizer.lr=1e-4",
        "-m",
        HIDDEN,
    ]


@given(
    secret=st.text(string.ascii_letters + string.digits + "!$%&()*+,-.:;<=>?@[]^_{|}", min_size=8, max_size=40),
    before=st.text(max_size=20),
    after=st.text(max_size=20),
)
def test_values_of_secret_variables_are_always_hidden(secret, before, after):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_SERVICE_TOKEN", secret)
        cleaned = redact({"text": before + secret + after, "nested": [secret]})
    assert cleaned["nested"] == [HIDDEN]
    assert secret not in cleaned["text"].replace(HIDDEN, "")


def test_output_shows_question_marks_for_what_its_encoding_lacks(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    with redacted_output():
        print("5 € für 你")
    assert out.buffer.getvalue() == b"5 ? f?r ?\n"


def test_a_reader_who_leaves_stops_nothing(monkeypatch):
    ours, theirs = os.pipe()
    monkeypatch.setattr("sys.stdout", os.fdopen(theirs, "w"))
    os.close(ours)
    with redacted_output():
        for _ in range(3):
            print("to nobody", flush=True)
    sys.stdout.close()
