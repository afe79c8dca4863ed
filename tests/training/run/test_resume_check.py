"""Resumed runs: what the recipe leaves open stays as it was decided, or the user gets a note or an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.mixtures import mixture
from support.rows import write_pairs
from support.runs import history, train_once

from fxtune.cli.main import main
from fxtune.config.root import Config
from fxtune.errors import ConfigError, StorageError
from fxtune.facts.options import Policy
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.pipeline import Pipeline
from fxtune.training import builder, trainer
from fxtune.training.builder import RunBuilder
from fxtune.training.run.resume_check import ResumeCheck

NARROW = "{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared") / "run"


@pytest.fixture
def unfinished_run(small, cwd, leave_unfinished, shared) -> Config:
    """An unfinished run in `run`, with both its steps saved, and decisions on packing and the learning rate."""
    small.run.dir, small.train.max_steps, small.data.packing, small.optimizer.lr = "run", 2, "auto", "auto"
    train_once(shared, lambda: leave_unfinished(small))
    return small


def changed(section: str, key: str, value: object) -> None:
    file = Path("run/setting.json")
    setting = json.loads(file.read_text())
    assert key in setting[section]
    setting[section][key] = value
    file.write_text(json.dumps(setting))


def test_unchanged_run_resumes_without_notes(unfinished_run, said):
    sections = {"techniques", "model", "machine", "data", "built", "products", "rows", "rate", "kernels"}
    assert set(json.loads(Path("run/setting.json").read_text())) == sections
    trainer.run(unfinished_run)
    assert not [text for text in said if "started this changed" in text]
    assert [text for text in said if "Resuming run after step 2" in text]


def test_an_option_that_the_version_of_the_start_did_not_know_has_its_default(unfinished_run, said):
    file = Path("run/setting.json")
    setting = json.loads(file.read_text())
    del setting["techniques"]["precision"]["cudnn_benchmark"]
    file.write_text(json.dumps(setting))
    trainer.run(unfinished_run)
    assert [text for text in said if "Resuming run after step 2" in text]


def test_another_torch_version_is_noted(unfinished_run, said):
    changed("machine", "torch", "1.0")
    trainer.run(unfinished_run)
    assert [text for text in said if "machine.torch: 1.0 -> " in text and "may differ in their last digits" in text]


def test_another_torch_version_is_refused_in_a_deterministic_run(narrow, cwd, leave_unfinished):
    narrow.run.dir, narrow.run.deterministic, narrow.train.max_steps = "run", True, 1
    leave_unfinished(narrow)
    changed("machine", "torch", "1.0")
    with pytest.raises(
        ConfigError, match=r"its machine changed.*run\.deterministic=true.*\n  machine\.torch: 1\.0 -> "
    ):
        trainer.run(narrow)


@pytest.mark.parametrize("asked", ["auto", True, False])
def test_a_resumed_run_keeps_its_kernels_and_refuses_others(unfinished_run, asked):
    changed("kernels", "deterministic", True)
    unfinished_run.run.deterministic = asked
    if asked is False:
        with pytest.raises(ConfigError, match=r"run\.deterministic=false: run was started with deterministic kernels"):
            trainer.run(unfinished_run)
        return
    trainer.run(unfinished_run)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)


def test_a_run_of_an_earlier_version_keeps_the_fastest_kernels(unfinished_run, monkeypatch):
    file = Path("run/setting.json")
    setting = json.loads(file.read_text())
    del setting["kernels"]
    file.write_text(json.dumps(setting))
    config = Path("run/config.yaml")
    config.write_text(config.read_text().replace("deterministic: auto", "deterministic: false"))
    decided = []
    monkeypatch.setattr(builder, "use_deterministic_kernels", decided.append)
    trainer.run(unfinished_run)
    assert decided == [False]


@pytest.mark.parametrize(("section", "key", "value"), [("model", "dtype", "bfloat16"), ("built", "revision", "main")])
def test_another_model_is_refused_with_each_difference(unfinished_run, section, key, value):
    changed(section, key, value)
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: {value} -> "):
        trainer.run(unfinished_run)


def test_another_number_of_experts_is_one_message(narrow, cwd, leave_unfinished):
    narrow.run.dir, narrow.train.max_steps = "run", 1
    for experts in (4, 8):
        narrow.model = mixture("qwen3_moe", vocab_size=1024, max_position_embeddings=256, num_experts=experts)
        narrow.model.tokenizer = "builtin:tiny"
        if experts == 4:
            leave_unfinished(narrow)
    with pytest.raises(
        ConfigError, match=r"model\.architecture\.num_experts: 4 -> 8\nPut these back, or set run\.dir"
    ):
        trainer.run(narrow)


def test_changed_base_weights_are_refused(small, cwd, leave_unfinished):
    import shutil

    own = cwd / "base"
    shutil.copytree(Path(trainer.__file__).parents[1] / "assets" / "tiny", own)
    small.model.path, small.run.dir, small.train.max_steps = str(own), "run", 1
    leave_unfinished(small)
    weights = next(own.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-2000:] = bytes(2000)
    weights.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"its model changed since it was started:\n  model\.{weights.name}: "):
        trainer.run(small)


def test_unreadable_setting_file_says_what_to_do(unfinished_run):
    Path("run/setting.json").write_text("{")
    with pytest.raises(StorageError, match=r"setting\.json is no JSON.*Restore it; or remove it"):
        trainer.run(unfinished_run)
    Path("run/setting.json").unlink()
    assert trainer.run(unfinished_run)["train/step"] == 2


def test_resumed_run_keeps_earlier_auto_decisions(tmp_path):
    """As on a card that had more free memory when the run started."""
    notes: list[str] = []
    (tmp_path / "setting.json").write_text(
        json.dumps({"techniques": {"checkpointing": {"policy": "none", "every": 1}}})
    )
    configured, today = Pipeline(), Pipeline()
    configured.checkpointing.enabled = today.checkpointing.enabled = True
    configured.checkpointing.policy, today.checkpointing.policy = Policy.auto, Policy.full
    was = ResumeCheck(tmp_path, resumes=True, strict=False, note=notes.append).earlier_decisions(configured, today)
    assert was.checkpointing.policy is Policy.none
    assert configured.checkpointing.policy is Policy.auto
    assert notes == ["checkpointing: as when the run was started, policy=none (today it would be full)"]
    today.checkpointing.policy = Policy.none
    assert (
        ResumeCheck(tmp_path, resumes=True, strict=False, note=notes.append).earlier_decisions(configured, today)
        is None
    )
    assert (
        ResumeCheck(tmp_path, resumes=False, strict=False, note=notes.append).earlier_decisions(configured, today)
        is None
    )


def test_unknown_recorded_value_is_refused(tmp_path):
    (tmp_path / "setting.json").write_text(json.dumps({"techniques": {"checkpointing": {"policy": "psychic"}}}))
    configured = Pipeline()
    configured.checkpointing.policy = Policy.auto
    with pytest.raises(StorageError, match=r"setting\.json: .*psychic.* is not one of .*Use the version of fxtune"):
        ResumeCheck(tmp_path, resumes=True, strict=False, note=print).earlier_decisions(configured, Pipeline())


@pytest.mark.parametrize(
    ("was", "message"),
    [
        (
            {"backend": "hub:evil/kernel@" + "a" * 40, "trust_remote_code": True},
            "trust_remote_code` runs code of a stranger",
        ),
        ({"backend": 7}, "`techniques.attention.backend` is text"),
    ],
)
def test_recorded_values_run_no_code(tmp_path, was, message):
    """A run folder may come from a stranger, and for an `auto` in the recipe its setting.json is read."""
    (tmp_path / "setting.json").write_text(json.dumps({"techniques": {"attention": was}}))
    configured, today = Pipeline(), Pipeline()
    today.attention.backend = "sdpa"
    with pytest.raises(StorageError, match=message):
        ResumeCheck(tmp_path, resumes=True, strict=False, note=print).earlier_decisions(configured, today)
    configured.attention.backend = "sdpa"  # set in the recipe itself, so nothing is read
    assert ResumeCheck(tmp_path, resumes=True, strict=False, note=print).earlier_decisions(configured, today) is None


def test_resumed_run_keeps_its_packing_and_its_learning_rate(unfinished_run, monkeypatch, said):
    setting = json.loads(Path("run/setting.json").read_text())
    assert (setting["rows"], setting["rate"]) == ({"packing": True, "buckets": []}, {"lr": 0.00249})
    monkeypatch.setattr(
        "fxtune.techniques.attention.isolation.why_not_isolated", lambda *_: "a newer transformers leaks"
    )
    changed("rate", "lr", 0.002)  # as another rule might have it
    assert trainer.run(unfinished_run)["train/peak_lr"] == 0.002
    assert [text for text in said if "0.002, as auto chose it when the run was started" in text]
    assert not [text for text in said if text.startswith("packing: ") or "auto chose 0.00249" in text]


def test_every_run_sets_its_threads_before_the_model_is_built(narrow, cwd, monkeypatch, leave_unfinished):
    """Setting the number, even to the number that torch has, changes the order of MKL's sums."""
    narrow.run.dir, narrow.train.max_steps, narrow.checkpoint.every = "run", 4, 2
    events: list[int | str] = []
    inner, build = torch.set_num_threads, RunBuilder.build
    monkeypatch.setattr(torch, "set_num_threads", lambda number: (events.append(number), inner(number)))
    monkeypatch.setattr(RunBuilder, "build", lambda self: (events.append("build"), build(self))[1])
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("fxtune.system.process.threads.cores", lambda: 4)
    inner(2)
    leave_unfinished(narrow)
    assert set(events[: events.index("build")]) == {2}
    assert events[-1] == "build"
    events.clear()
    inner(3)  # as on a machine with another number of cores
    trainer.run(narrow)
    before = events[: events.index("build")]
    assert before[-1] == 2
    assert events[-1] == "build"


@pytest.mark.parametrize("rate", ["fast", -1.0, float("nan")])
def test_recorded_rate_that_is_none_is_refused(tmp_path, rate):
    (tmp_path / "setting.json").write_text(json.dumps({"rate": {"lr": rate}}))
    check = ResumeCheck(tmp_path, True, False, print)
    with pytest.raises(StorageError, match="no learning rate"):
        check.earlier_rate(Config().optimizer)


def losses_of_pairs(run: str, *words: str) -> list[float]:
    """Of a run on pairs.jsonl, from its first step to its last, also if it was resumed."""
    options = [
        "objective=dpo",
        "data.sources=[{path: pairs.jsonl}]",
        "data.sequence_length=64",
        "data.cache_dir=cache",
    ]
    options += [f"model.architecture={NARROW}", "model.init=random", "techniques.lora.enabled=true", "run.device=cpu"]
    options += ["train.micro_batch_size=2", "train.global_batch_size=4", "train.max_steps=4", "run.report=false"]
    assert main([*options, f"run.dir={run}", "optimizer.lr=1e-2", "tracking.display=plain", *words]) == 0
    return [line["train/loss"] for line in history(Path(run)) if "train/loss" in line]


@pytest.mark.slow
def test_a_run_on_pairs_keeps_the_layout_of_its_rows(cwd, monkeypatch):
    """Prompts computed once; and whole documents if the run was started where prompts could not be shared, or by a
    version that could not."""
    write_pairs()
    once, whole = losses_of_pairs("once"), losses_of_pairs("whole", "data.share_prompts=false")
    assert len(once) == len(whole) == 4
    assert once[1:] != whole[1:], "a step has more pairs if their prompts are computed once"
    losses_of_pairs("paused", "train.pause_after=2")
    assert losses_of_pairs("paused") == once
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "why_not_shared", lambda *_: "of a test")
        losses_of_pairs("earlier", "train.pause_after=2")
    assert "share_prompts" not in json.loads(Path("earlier/setting.json").read_text())["rows"]
    assert losses_of_pairs("earlier") == whole
