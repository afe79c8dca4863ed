import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.redact import HIDDEN, redact, redact_arguments


@pytest.mark.parametrize("key", ["hub_token", "token", "api_key", "WANDB_API_KEY", "aws.secret", "password", "auth"])
def test_a_secret_name_hides_its_value(key):
    assert redact({"a": [{key: "anything"}]}) == {"a": [{key: HIDDEN}]}


@pytest.mark.parametrize(("key", "value"), [
    ("pad_token", "<pad>"), ("max_new_tokens", "12"), ("tokenizer", "x"), ("hub_token", True), ("token", ""),
    ("revision", "0e9e39f249a16976918f6564b8830bc894c89659"), ("path", "https://hf.co/a/b?download=true"),
    ("keys", "abc"), ("target_modules", "all-linear"), ("path", "s3://bucket/data.jsonl")])
def test_what_is_no_secret_stays(key, value):
    assert redact({key: value}) == {key: value}


@pytest.mark.parametrize("secret", [
    "hf_" + "a" * 30, "ghp_" + "A1" * 18, "sk-proj-" + "x" * 30, "AKIA" + "A" * 16, "glpat-" + "x" * 20,
    "eyJhbGciOi.eyJzdWIi.c2lnbmF0dXJl", "0e9e39f249a16976918f6564b8830bc894c89659"])
def test_a_secret_shape_is_hidden_within_any_text(secret):
    assert redact({"note": f"use {secret} here"}) == {"note": f"use {HIDDEN} here"}


def test_urls_lose_users_and_signatures_only():
    assert redact({"path": "https://me:pw@host.org/x?sig=abc&size=3"}) == {
        "path": f"https://{HIDDEN}@host.org/x?sig={HIDDEN}&size=3"}


def test_command_lines_are_judged_by_their_keys():
    assert redact_arguments(["+recipe=x", "model.hub_token=abc", "optimizer.lr=1e-4", "-m", "hf_" + "a" * 20]) == [
        "+recipe=x", f"model.hub_token={HIDDEN}", "optimizer.lr=1e-4", "-m", HIDDEN]


@given(secret=st.text(string.ascii_letters + string.digits + "!$%&()*+,-.:;<=>?@[]^_{|}", min_size=8, max_size=40),
       before=st.text(max_size=20), after=st.text(max_size=20))
def test_the_value_of_a_secret_variable_never_comes_through(secret, before, after):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_SERVICE_TOKEN", secret)
        cleaned = redact({"text": before + secret + after, "nested": [secret]})
    assert cleaned["nested"] == [HIDDEN]
    assert secret not in cleaned["text"].replace(HIDDEN, "")
