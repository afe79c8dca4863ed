"""`fxtune push RUN org/name`, against a hub on loopback: what is uploaded, what never is, and each refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.architectures import lora, prepared_model, trained
from support.servers import send_uploads_to, upload_hub

from fxtune.cli.main import main
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer

SECRET = "hf_" + "abcdefghij0123456789"


@pytest.fixture(scope="module")
def model():
    return trained(prepared_model(lora(), ModelConfig(path="builtin:tiny", dtype=DType.float32), dtype="float32"))


@pytest.fixture
def run(model, cwd) -> Path:
    """A run folder with all that a run leaves behind."""
    folder = cwd / "runs" / "mine"
    tokenizer = load_tokenizer(ModelConfig(path="builtin:tiny"))
    save_model(model, tokenizer, folder / "adapter", card={"figures": {"eval/loss": 1.25}})
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    for file in ("checkpoints/step-1/model.safetensors", "metrics.jsonl", "quarantine.jsonl", ".lock", "adapter/.env"):
        (folder / file).write_text(SECRET)
    (folder / "adapter" / "optimizer.safetensors").write_text("x")
    (folder / "adapter" / "train.jsonl").write_text("{}")
    (folder / "result.json").write_text('{"eval/loss": 1.25, "best": {"step": 3}}')
    (folder / "config.yaml").write_text("run: {name: mine}\nmodel: {path: 'builtin:tiny'}\n")
    return folder


@pytest.fixture
def hub(monkeypatch):
    with upload_hub(monkeypatch) as server:
        yield server


def push(*words: str) -> int:
    return main(["push", *words])


def refused(capsys, code: int, *words: str) -> str:
    """The only message of a push that fails."""
    assert push(*words) == code
    out, err = capsys.readouterr()
    assert err.count("fxtune: ") == 1
    assert "Traceback" not in out + err
    return err


def test_adapter_is_uploaded_with_its_card_and_nothing_else(run, hub, capsys):
    assert push("mine", "me/lamps") == 0
    out = capsys.readouterr().out
    assert f"{hub.url}/me/lamps" in out
    assert "others can load it with --merged only" in out, "the base is a folder of this machine"
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}
    assert set(hub.stored["me/lamps"]) == {*names, "proof.json", "tokenizer.json", "tokenizer_config.json"}
    assert (
        hub.stored["me/lamps"]["adapter_model.safetensors"] == (run / "adapter/adapter_model.safetensors").read_bytes()
    )
    card = hub.stored["me/lamps"]["README.md"].decode()
    assert "\n# lamps\n" in card
    assert "eval/loss | 1.25" in card
    assert hub.private == {"me/lamps": True}
    assert SECRET.encode() not in b"".join(hub.stored["me/lamps"].values())
    assert push("mine", "me/lamps") == 0, "the same kind of model may be uploaded again"


def test_merged_model_is_uploaded_and_loads(run, hub, capsys, tmp_path):
    from transformers import AutoModelForCausalLM

    assert push("mine", "me/merged", "--merged", "--public") == 0
    stored = hub.stored["me/merged"]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(stored)
    assert "adapter_config.json" not in stored
    assert "eval/loss | 1.25" in stored["README.md"].decode()
    assert hub.private == {"me/merged": False}
    for name, content in stored.items():
        (tmp_path / name).write_bytes(content)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "llama"
    assert sorted(path.name for path in run.iterdir() if path.name == "merged") == [], "nothing is left in the run"


def test_missing_or_refused_token_is_one_message(run, hub, capsys, monkeypatch):
    hub.readers_only = True
    assert "The token may not write to me/lamps" in refused(capsys, 2, "mine", "me/lamps")
    monkeypatch.setenv("HF_TOKEN", "hf_another_token_of_nobody")
    assert "does not know this token" in refused(capsys, 2, "mine", "me/lamps")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "`hf auth login`, or set HF_TOKEN" in refused(capsys, 2, "mine", "me/lamps")
    assert hub.stored == {}


@pytest.mark.parametrize(
    ("kind", "stored", "words", "message"),
    [
        ("datasets", {}, [], "me/lamps is a dataset on the hub"),
        ("spaces", {}, [], "me/lamps is a space on the hub"),
        ("models", {"model.safetensors": b"x"}, [], "me/lamps holds a whole model on the hub"),
        ("models", {"adapter_config.json": b"x"}, ["--merged"], "me/lamps holds an adapter on the hub"),
    ],
)
def test_existing_repository_of_another_kind_is_refused(run, hub, capsys, kind, stored, words, message):
    hub.kinds["me/lamps"], hub.stored["me/lamps"] = kind, dict(stored)
    assert message in refused(capsys, 2, "mine", "me/lamps", *words)
    assert hub.stored["me/lamps"] == stored


def test_no_network_and_a_broken_hub_are_one_message(run, hub, capsys, monkeypatch):
    hub.mode = 500
    assert "answered 500" in refused(capsys, 6, "mine", "me/lamps")
    send_uploads_to(monkeypatch, "http://127.0.0.1:9")
    assert "The hub cannot be reached" in refused(capsys, 6, "mine", "me/lamps")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(capsys, 6, "mine", "me/lamps")


def test_secret_or_link_is_not_uploaded(run, hub, capsys):
    config = run / "adapter" / "adapter_config.json"
    content = config.read_text()
    config.write_text(json.dumps({**json.loads(content), "auto_mapping": {"x": SECRET}}))
    assert "holds what looks like a secret" in refused(capsys, 6, "mine", "me/lamps")
    config.write_text(content)
    (run.parent / "id_rsa").write_text("key")
    (run / "adapter" / "vocab.txt").symlink_to(run.parent / "id_rsa")
    assert "is a link out of its folder" in refused(capsys, 6, "mine", "me/lamps")
    assert hub.stored.get("me/lamps", {}) == {}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["mine", "lamps"], 2, "`lamps` is no name of the hub's: give ORGANISATION/NAME"),
        (["mine", "a/b/c"], 2, "is no name of the hub's"),
        (["nobody", "me/lamps"], 2, "there is no run `nobody`"),
        (["mine"], 2, "usage: fxtune push RUN NAME"),
        (["runs/mine/adapter/empty", "me/lamps"], 2, "there is no run"),
    ],
)
def test_wrong_words_are_one_message(run, hub, capsys, words, code, message):
    assert message in refused(capsys, code, *words)


def test_adapter_without_weights_is_refused(run, hub, capsys):
    (run / "adapter" / "adapter_model.safetensors").unlink()
    assert "holds no weights" in refused(capsys, 6, "mine", "me/lamps")
    assert hub.stored == {}
