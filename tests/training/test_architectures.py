"""Architectures that cannot do all that a recipe asks for: what is off, with one line, and what is refused.

tests/models/test_types.py trains and verifies many types.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.architectures import architecture

from fxtune.cli import verify
from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.models.load import Init
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder

VOCABULARY = 1024
"""Tokens of the built-in tokenizer."""


@pytest.fixture
def config(chats, cwd):
    """The config of a tiny model of this kind with everything else as it comes."""

    def made(kind: str, *overrides: str, **changes: Any) -> Config:
        made = load(
            [
                f"data.sources=[{{path: {chats}}}]",
                "data.sequence_length=64",
                "data.cache_dir=cache",
                "train.max_steps=5",
                "train.micro_batch_size=2",
                "train.global_batch_size=4",
                "tracking.display=none",
                "run.dir=run",
                *overrides,
            ]
        )
        values = architecture(kind, **changes)
        values.get("text_config", values)["vocab_size"] = VOCABULARY
        made.model.init, made.model.architecture = Init.random, values
        return made

    return made


def notes(said: list[str], topic: str) -> list[str]:
    return [line for line in said if line.startswith(f"{topic}: ")]


def test_a_model_that_does_not_keep_documents_apart_is_padded_with_one_line(config, said):
    trainer.run(config("opt"))
    (told,) = notes(said, "packing")
    assert told.startswith("packing: off, because in opt of transformers, documents in one row see each other")
    asked = [row["asked"] for row in json.loads(Path("run/evidence.json").read_text())]
    assert "packed documents do not see each other" not in asked


def test_packing_that_is_demanded_is_refused_with_its_key(config):
    with pytest.raises(ConfigError, match=r"packed documents do not see each other.*\nSet data\.packing=false"):
        trainer.run(config("opt", "data.packing=true"))


def test_a_hybrid_is_packed_on_demand_and_observed_where_it_has_attention(config):
    trainer.run(config("qwen3_next", "data.packing=true", "train.max_steps=1"))
    evidence = json.loads(Path("run/evidence.json").read_text())
    observed = [entry["observed"] for entry in evidence]
    assert any(text.startswith("changing 3 of 3 documents") and text.endswith("at most 0") for text in observed)
    attention = [entry["observed"] for entry in evidence if entry["technique"] == "attention"]
    assert "1 calls of scaled_dot_product_attention of torch in 1 layers" in attention


def test_a_model_without_attention_trains_with_the_technique_off(config, said):
    trainer.run(config("mamba2"))
    assert notes(said, "attention") == ["attention: proves that documents are kept apart; mamba2 has no attention"]
    with pytest.raises(ConfigError, match=r"attention\.backend: mamba2 has no attention that eager could run"):
        trainer.run(config("mamba2", "techniques.attention.backend=eager", "run.dir=other"))


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_rows_beyond_learned_positions_are_refused_before_weights(config, monkeypatch, kind):
    monkeypatch.setattr("fxtune.models.load.build", lambda *_, **__: pytest.fail("a weight was drawn"))
    with pytest.raises(ConfigError) as refused:
        trainer.run(config(kind, "data.sequence_length=128"))
    (reason,) = str(refused.value).splitlines()[1:]
    assert reason == (
        f"  data.sequence_length: 128 is beyond the 64 positions that {kind} has embeddings for. Set it to 64 or less."
    )


def test_buckets_ask_for_padding(config):
    builder = RunBuilder(config("llama", "data.buckets=[16,64]"))
    assert builder.facts.rows == (16, 64)
    assert not builder.facts.packing
    assert builder.notes[0].startswith("packing: off, because data.buckets has lengths to pad to")
    assert RunBuilder(config("llama")).facts.packing


def test_a_model_that_fxtune_does_not_know_says_so_in_one_line(config):
    made = config("llama")
    made.model.architecture = {"model_type": "blip-2"}
    with pytest.raises(
        ConfigError, match=r"^[^\n]*blip-2 model, which fxtune has not compared with plain transformers[^\n]*$"
    ):
        trainer.run(made)


@pytest.mark.slow
def test_a_model_with_vision_trains_its_text_part(config):
    made = config("gemma3")
    made.model.architecture |= {
        "image_token_index": VOCABULARY - 3,
        "boi_token_index": VOCABULARY - 2,
        "eoi_token_index": VOCABULARY - 1,
    }
    assert trainer.run(made)["train/step"] == 5
    verify.run(made, loss=True)


@pytest.mark.slow
def test_fast_settings_are_off_where_they_cannot_act(config, capsys, monkeypatch):
    """The compiler finds a graph break in this layer; Liger has no kernels for this model; the run resumes."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer as Layer

    own = Layer.forward

    def with_a_break(self, hidden_states, **kwargs):
        torch._dynamo.graph_break()
        return own(self, hidden_states, **kwargs)

    monkeypatch.setattr(Layer, "forward", with_a_break)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    fast = ("techniques=[lora,fast]", "techniques.precision.autocast=none", "checkpoint.every=1")
    trainer.run(config("qwen3_moe", *fast, "train.max_steps=2"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compile: off, because ")]
    assert "the layer cannot be one graph" in line
    recorded = json.loads(Path("run/setting.json").read_text())["techniques"]
    assert "compile" not in recorded
    assert "checkpointing" in recorded
    for path in ("result.json", "checkpoints/step-2"):
        shutil.rmtree(f"run/{path}", ignore_errors=True)
        Path("run", path).unlink(missing_ok=True)
    assert trainer.run(config("qwen3_moe", *fast, "train.max_steps=2"))["train/step"] == 2
    assert "compile: off" not in capsys.readouterr().out  # as it was decided when the run started
    with pytest.raises(ConfigError, match=r"techniques\.compile\.fullgraph: the layer cannot be one graph"):
        trainer.run(config("qwen3_moe", *fast, "techniques.compile.enabled=true", "run.dir=other"))


def test_an_encoder_is_refused_before_weights(config, monkeypatch):
    monkeypatch.setattr("fxtune.models.load.build", lambda *_, **__: pytest.fail("a weight was drawn"))
    made = config("llama")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    made.model.architecture = {"model_type": "bert", "vocab_size": VOCABULARY, **sizes}
    with pytest.raises(ConfigError, match=r"^model\.path[^\n]* bert [^\n]* depend on later tokens"):
        trainer.run(made)
    made.model.architecture["is_decoder"] = True
    assert RunBuilder(made).settled.hf_config.is_decoder
