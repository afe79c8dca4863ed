"""What nobody demanded steps aside, and a run with `techniques=[lora,fast]` goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.harness import write_chats

from fxtune.cli.main import main
from fxtune.errors import ConfigError
from fxtune.facts.options import Switch
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.withdrawal import Withdrawal, wish
from fxtune.upstream.transformers import with_rotation

TWO_STEPS = [
    "data.sources=[{path: chats.jsonl}]",
    "data.sequence_length=128",
    "data.cache_dir=cache",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "techniques=[lora,fast]",
    "techniques.compile.enabled=false",  # its compiler takes a minute
    "train.max_steps=2",
    "tracking.display=none",
    "run.dir=run",
]


@pytest.fixture(autouse=True)
def _chats_and_no_forward_of_an_earlier_test(cwd):
    write_chats(Path("chats.jsonl"), 16)
    with_rotation.cache_clear()


def as_on_a_gpu(monkeypatch, rope: bool = True, fused: bool = True) -> None:
    """`auto` chooses what it chooses on a GPU, of what a CPU can run."""

    def resolve_fused(self, facts):
        if self.fused is Switch.auto:
            self.fused, self._fused_by_auto = (Switch.on if fused else Switch.off), True

    monkeypatch.setattr(Liger, "_choose", lambda self, name, facts: (rope and name == "rope", ""))
    monkeypatch.setattr(Lora, "_resolve_fused", resolve_fused)


def evidence(cwd: Path) -> list[dict[str, object]]:
    return json.loads((cwd / "run" / "evidence.json").read_text())


def test_only_auto_is_a_wish():
    fast = Pipeline(
        liger=Liger(enabled="auto"), compile=Compile(enabled="auto"), checkpointing=Checkpointing(enabled=True)
    )
    assert wish(fast, "liger.rope") == "liger.rope"
    assert wish(fast, "liger") == "liger"
    assert wish(fast, "compile") == "compile"
    assert wish(fast, "lora.fused") == "lora.fused"
    for demanded in ("checkpointing", "lora", "objective", "optimizer.in_backward"):
        assert wish(fast, demanded) is None
    written = Pipeline(liger=Liger(enabled="auto", kernels=["rope"]), compile=Compile(enabled="auto", fullgraph=False))
    for demanded in ("liger.rope", "liger", "compile"):
        assert wish(written, demanded) is None
    chosen = Pipeline(liger=Liger(enabled=True, kernels=["rope"]))
    off = Withdrawal("liger.rope", "").applied_to(chosen)
    assert (off.liger.kernels, off.liger.enabled, chosen.liger.kernels) == ([], True, ["rope"])
    assert not Withdrawal("liger", "").applied_to(chosen).liger.enabled


def test_rope_that_cannot_be_replaced_is_off_and_the_run_goes_on(cwd, monkeypatch, capsys):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr("fxtune.upstream.transformers.ROPE", "renamed")
    monkeypatch.setattr("fxtune.techniques.liger.technique._unrotatable", lambda facts: None)  # found in apply() only
    assert main(TWO_STEPS) == 0, capsys.readouterr().err
    output = "".join(capsys.readouterr())
    assert output.count("liger: rope off, because ") == 1
    found = [observation for observation in evidence(cwd) if observation["key"] == "liger.rope"]
    assert len(found) == 1
    assert "off, because" in str(found[0]["observed"])
    assert json.loads((cwd / "run" / "setting.json").read_text())["techniques"]["liger"]["kernels"] == []


def test_what_has_no_effect_is_off_and_the_run_goes_on(cwd, monkeypatch, capsys):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(Liger, "apply", lambda self, model, world: model)
    assert main(["verify", *TWO_STEPS[:-1], "--json", "seen.json"]) == 0
    assert "liger: rope off, because asked for rope: " in capsys.readouterr().out
    assert any(line.startswith("liger: rope off") for line in json.loads(Path("seen.json").read_text())["decided"])


def test_compiler_that_fails_is_off_and_the_run_goes_on(cwd, monkeypatch, capsys):
    def fails(self, model, probe):
        raise ConfigError("the layer cannot be one graph")

    monkeypatch.setattr(Compile, "apply", lambda self, model, world: model)
    monkeypatch.setattr(Compile, "_observe", fails)
    words = [word for word in TWO_STEPS if not word.startswith("techniques.compile")]
    assert main(words) == 0, capsys.readouterr().err
    assert "compile: off, because the layer cannot be one graph" in capsys.readouterr().out
    assert not (cwd / "run" / "compile.json").exists(), "the loop knows that nothing is compiled"
    assert main([*words, "techniques.compile.enabled=true", "run.dir=demanded"]) == 2
    assert "techniques.compile.enabled: the layer cannot be one graph. Set it to false." in capsys.readouterr().err


def test_what_was_demanded_is_refused(cwd, monkeypatch, capsys):
    monkeypatch.setattr("fxtune.upstream.transformers.ROPE", "renamed")
    for command, code in (([], 2), (["plan"], 0)):  # a plan shows a refusal for each machine
        assert main([*command, *TWO_STEPS, "techniques.liger.kernels=[rope]"]) == code
        assert "techniques.liger.kernels: rope: LlamaAttention" in "".join(capsys.readouterr())
