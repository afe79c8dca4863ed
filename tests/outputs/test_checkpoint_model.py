"""Which weights a run exports, and the model of any of its checkpoints: merged, evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.cases import slow_but
from support.runs import history, train_once

from fxtune.cli import evaluate
from fxtune.cli.main import main
from fxtune.config.root import Config, Export
from fxtune.errors import ConfigError, StorageError
from fxtune.facts.options import Switch
from fxtune.models.load import ModelConfig
from fxtune.outputs.merge import merge
from fxtune.training import evaluation, trainer

ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture
def run_(narrow, monkeypatch) -> Config:
    """A run of six steps with an evaluation after each second one. The lowest held-out loss is that of step 4."""
    narrow.data.eval_fraction, narrow.data.general = 0.2, []  # general text would take losses, too
    narrow.train.eval_every, narrow.checkpoint.every, narrow.run.dir = 2, 2, "run"
    narrow.checkpoint.keep = 5
    real, losses = evaluation.evaluate, iter([3.0, 1.0, 2.0] * 9)
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *given: {**real(*given), "loss": next(losses), "perplexity": 9.0}
    )
    return narrow


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared") / "run"


@pytest.fixture
def finished(narrow, cwd, shared) -> Path:
    """A finished run of six steps, saved and evaluated after steps 3 and 6."""
    narrow.data.eval_fraction = 0.2
    narrow.train.eval_every, narrow.checkpoint.every, narrow.run.dir = 3, 3, "run"
    train_once(shared, lambda: trainer.run(narrow))
    return Path("run")


def saved(step: int) -> dict[str, torch.Tensor]:
    return load_file(f"run/checkpoints/step-{step:08d}/weights.safetensors")


def same(exported: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> bool:
    """Whether an adapter or a model has the trained weights of a checkpoint. peft leaves the adapter's name out."""
    trained = {name.replace(".default", ""): weight for name, weight in trained.items()}
    return all(torch.equal(weight, exported[name]) for name, weight in trained.items())


@pytest.mark.parametrize("lora", [True, False])
def test_best_weights_are_exported_and_named(run_, cwd, said, lora):
    run_.techniques.lora.enabled = lora
    result = trainer.run(run_)
    exported = load_file(Path("run") / (ADAPTER if lora else "model/model.safetensors"))
    assert same(exported, saved(4))
    assert not same(exported, saved(6))
    assert [result[f"eval/{name}"] for name in ("best_step", "best_loss", "loss")] == [4, 1.0, 2.0]
    assert result["export/step"] == 4
    assert json.loads(Path("run/result.json").read_text()) == result
    note = "weights of step 4, which have the lowest held-out loss, 1.0000"
    assert said[-2].endswith(f": the {note}")
    assert f"| weights | {note} |" in Path("run/adapter/README.md" if lora else "run/model/README.md").read_text()


@pytest.mark.parametrize("key", slow_but(["export", "keep_best"], "export"))
def test_last_weights_are_exported_where_the_config_says_so(run_, cwd, said, key):
    if key == "export":
        run_.run.export = Export.last
    else:
        run_.checkpoint.keep_best = False
    result = trainer.run(run_)
    assert same(load_file(f"run/{ADAPTER}"), saved(6))
    assert (result["export/step"], result["eval/best_step"]) == (6, 4)
    assert said[-2].endswith("weights of step 6, the last; the lowest held-out loss was 1.0000, at step 4")


def test_without_held_out_data_nothing_changes(narrow, cwd, said):
    narrow.run.dir = "run"
    result = trainer.run(narrow)
    assert same(load_file(f"run/{ADAPTER}"), saved(6))
    assert not {"eval/best_step", "eval/best_loss", "export/step"} & result.keys()
    assert "The adapter is in run/adapter" in said


def test_damaged_best_checkpoint_is_reported_and_the_last_weights_are_exported(run_, cwd, said, monkeypatch):
    evaluate_, count = trainer.Trainer._evaluate, []

    def harm(self):
        count.append(1)
        if len(count) == 3:
            self.run_state.checkpoints.wait()
            Path("run/checkpoints/step-00000004/weights.safetensors").unlink()
        return evaluate_(self)

    monkeypatch.setattr(trainer.Trainer, "_evaluate", harm)
    assert trainer.run(run_)["export/step"] == 6
    assert same(load_file(f"run/{ADAPTER}"), saved(6))
    assert any("of step 4, cannot be read" in text for text in said)


def test_run_interrupted_during_the_export_of_the_best_weights_resumes_with_the_same_result(run_, cwd, monkeypatch):
    """The model then holds the best weights, so the state is not saved again. The second process exports the same."""
    with monkeypatch.context() as patch:

        def interrupted(*_, **__):
            raise KeyboardInterrupt

        patch.setattr("fxtune.training.run.export.save_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(run_)
    last = saved(6)
    result = trainer.run(run_)
    assert all(torch.equal(saved(6)[name], weight) for name, weight in last.items())
    assert result["export/step"] == 4
    assert same(load_file(f"run/{ADAPTER}"), saved(4))


def test_losses_that_are_not_finite_are_never_the_best(run_, cwd, monkeypatch):
    losses = iter([float("nan"), 2.0, float("nan")])
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: {"loss": next(losses), "perplexity": 1.0})
    assert trainer.run(run_)["export/step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("fused", [Switch.off, Switch.on])
def test_any_checkpoint_is_merged_and_evaluated(run_, cwd, capsys, fused):
    run_.model = ModelConfig()  # an adapter on random weights has no base to merge it into
    run_.techniques.lora.fused = fused
    trainer.run(run_)
    best = merge("run/adapter", "best")
    assert main(["merge", "run/checkpoints/step-4"]) == 0
    assert "The merged model is in run/merged-step-4" in capsys.readouterr().out
    merged, wanted = (load_file(folder / "model.safetensors") for folder in (Path("run/merged-step-4"), best))
    assert all(torch.equal(merged[name], weight) for name, weight in wanted.items())
    assert same(load_file(merge("run/checkpoints/step-6", unmerged=True) / "adapter_model.safetensors"), saved(6))
    card = Path("run/merged-step-4/README.md").read_text()
    assert "weights of step 4" in card
    assert "| merged from | run/checkpoints/step-00000004 |" in card
    assert main(["eval", "run/checkpoints/step-4"]) == 0
    assert "Evaluation of run/checkpoints/step-00000004" in " ".join(capsys.readouterr().out.split())


def test_evaluation_of_a_checkpoint_gives_the_figures_of_its_run(finished):
    ran = {line["train/step"]: line["eval/loss"] for line in history(finished) if "eval/loss" in line}
    for step, loss in ran.items():
        assert evaluate.of_output(f"run/checkpoints/step-{step}")["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert ran[3] != ran[6]


def test_checkpoint_of_full_fine_tuning_is_written_as_a_model(narrow, cwd):
    narrow.techniques.lora.enabled = False
    narrow.checkpoint.every, narrow.run.dir = 3, "run"
    trainer.run(narrow)
    out = merge("run/checkpoints/step-6")
    assert out == Path("run/merged-step-6")
    own, written = load_file("run/model/model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(written[name], weight) for name, weight in own.items())
    assert same(load_file(merge("run/checkpoints/step-3", "three") / "model.safetensors"), saved(3))


def test_checkpoints_that_are_not_there_or_damaged_are_refused_with_the_steps_there_are(finished):
    with pytest.raises(ConfigError, match=r"run/checkpoints: 3, 6"):
        merge("run/checkpoints/step-5", "out")
    with pytest.raises(ConfigError, match=r"lies in no run"):
        evaluate.of_output(str(shutil.copytree("run/adapter", "elsewhere")))
    (Path("run/checkpoints/step-00000003") / "weights.safetensors").unlink()
    with pytest.raises(StorageError, match=r"step-00000003: weights\.safetensors cannot be read"):
        merge("run/checkpoints/step-3", "out")
    Path("run/checkpoints").rename("moved")
    with pytest.raises(ConfigError, match="lies in no run folder"):
        merge("moved/step-6", "out")


def test_run_folder_of_a_stranger_runs_no_code(finished):
    written = (finished / "config.yaml").read_text()
    for group in ("model", "attention"):
        config = yaml.safe_load(written)
        (config["model"] if group == "model" else config["techniques"]["attention"])["trust_remote_code"] = True
        (finished / "config.yaml").write_text(yaml.safe_dump(config))
        for command in (merge, evaluate.of_output):
            with pytest.raises(ConfigError, match=r"trust_remote_code runs code"):
                command("run/checkpoints/step-6")


def test_run_of_an_earlier_version_resumes_without_the_new_key(narrow, cwd, leave_unfinished):
    """Its config.yaml lacks the keys that this version added, and its checkpoints have the digest of that config."""
    narrow.checkpoint.every, narrow.run.dir = 2, "run"
    leave_unfinished(narrow)
    file = Path("run/config.yaml")
    config = yaml.safe_load(file.read_text())
    del config["run"]["export"], config["train"]["max_grad_norm"], config["data"]["sources"][0]["weight"]
    file.write_text(yaml.safe_dump(config))
    from fxtune.checkpoint.run_folder import config_digest

    for manifest in Path("run/checkpoints").glob("*/manifest.json"):
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "recipe": config_digest(config)}))
    assert trainer.run(narrow)["train/step"] == 6
    narrow.train.max_grad_norm = 2.0
    Path("run/result.json").unlink()
    with pytest.raises(ConfigError, match=r"train\.max_grad_norm: 1\.0 -> 2\.0"):
        trainer.run(narrow)
