"""Non-finite losses and gradients, and loss spikes: kept out of the weights, reported, and never exported."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.bad_steps import disturb, interrupt_at
from support.mixtures import mixture
from support.runs import history, losses, same_export

from fxtune.config.root import Spikes
from fxtune.errors import NumbersError
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.config import OptimizerName
from fxtune.tracking.tracker import DisplayKind
from fxtune.training import step as step_module
from fxtune.training import trainer as train


@pytest.mark.slow
def test_non_finite_steps_are_skipped_and_too_many_end_the_run(narrow, cwd, monkeypatch, capsys):
    """Two bad steps are skipped and counted; max_skipped_steps in a row end the run."""
    real, poisoned = LanguageModel.summed_loss, {2, 3}
    calls = []

    def loss(self, batch):
        calls.append(1)
        step = (len(calls) - 1) // 2
        return real(self, batch) * (float("nan") if step in poisoned else 1.0)

    monkeypatch.setattr(LanguageModel, "summed_loss", loss)
    narrow.run.dir, narrow.tracking.display = "skips", DisplayKind.plain
    result = train.run(narrow)
    assert result["train/skipped_steps"] == 2
    assert "2 of 6 steps were skipped" in capsys.readouterr().out
    assert [value is None for value in losses(Path("skips"))] == [False, False, True, True, False, False]
    assert all(torch.isfinite(t).all() for t in load_file("skips/adapter/adapter_model.safetensors").values())
    calls.clear()
    poisoned.update(range(100))
    narrow.run.dir, narrow.train.max_skipped_steps, narrow.train.max_steps = "stops", 3, 10
    with pytest.raises(NumbersError, match=r"3 steps in a row, up to step 3\. .*saved: stops/checkpoints"):
        train.run(narrow)


@pytest.mark.slow
@pytest.mark.parametrize("spikes", ["report", "skip", "off"])
def test_loss_spikes(narrow, build, monkeypatch, spikes):
    """One step of twelve has fifty times the loss and the gradient."""
    disturb(monkeypatch, {9: 50.0})
    monkeypatch.setattr(step_module, "WINDOW", 8)
    narrow.train.max_steps, narrow.train.spikes = 12, Spikes(spikes)
    narrow.train.max_grad_norm, narrow.schedule.warmup_steps, narrow.optimizer.name = 0.0, 0, OptimizerName.sgd
    notes, weights = [], []
    trainer = build(narrow, notes.append)
    optimizer = trainer.train_step.optimizer
    whole = optimizer.step

    def step(lr, finite, seed):
        before = [parameter.detach().clone() for parameter in optimizer.names]
        whole(lr, finite, seed)
        weights.append(any(not torch.equal(a, b) for a, b in zip(before, optimizer.names, strict=True)))

    monkeypatch.setattr(optimizer, "step", step)
    result = trainer.run()
    found = [note for note in notes if note.startswith("step 10: a loss spike")]
    assert len(found) == (spikes != "off")
    assert [at for at, moved in enumerate(weights) if not moved] == ([9] if spikes == "skip" else [])
    assert result["train/skipped_steps"] == (spikes == "skip")
    assert (trainer.folder.path / "spikes" / "step-00000010" / "batch-1.safetensors").exists() == (spikes != "off")
    if found:
        assert "documents" in found[0]
        assert any("1 loss spikes" in note for note in notes)


@pytest.mark.slow
def test_run_that_skips_spikes_resumes_bit_for_bit(narrow, cwd, monkeypatch):
    """The window of losses is part of the state: a run interrupted just before a spike must still detect it."""
    seen = disturb(monkeypatch, {9: 50.0})
    monkeypatch.setattr(step_module, "WINDOW", 8)
    narrow.train.max_steps, narrow.train.spikes, narrow.checkpoint.every = 12, Spikes.skip, 3
    narrow.run.dir = "whole"
    assert train.run(narrow)["train/skipped_steps"] == 1
    narrow.run.dir = "broken"
    interrupt_at(narrow, 9, monkeypatch)
    seen.clear()
    assert train.run(narrow)["train/skipped_steps"] == 1
    assert [step for step in seen if step >= 0] == [9, 10, 11]
    assert same_export("whole", "broken")


def test_good_weights_are_exported_after_bad_last_steps(narrow, cwd, monkeypatch, capsys):
    disturb(monkeypatch, {4: math.nan, 5: math.nan})
    narrow.run.dir, narrow.tracking.display = "run", DisplayKind.plain
    assert train.run(narrow)["train/skipped_steps"] == 2
    assert (
        "2 of 6 steps were skipped: their loss or gradient was not finite. The last 2 too, but"
        in capsys.readouterr().out
    )
    assert all(torch.isfinite(t).all() for t in load_file("run/adapter/adapter_model.safetensors").values())


def test_weights_without_finite_loss_are_not_exported(narrow, cwd):
    """The first step makes the weights huge; the next two are skipped, fewer than max_skipped_steps."""
    narrow.run.dir, narrow.train.max_steps, narrow.optimizer.lr, narrow.schedule.warmup_steps = "run", 3, 1e30, 0
    for _ in range(2):  # the same command again ends alike
        with pytest.raises(NumbersError, match=r"2 of 3 steps were skipped.*nothing was exported.*run/checkpoints"):
            train.run(narrow)
        assert not Path("run/adapter").exists()
        assert not Path("run/result.json").exists()
        assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-00000003"]


def test_consecutive_bad_steps_are_counted_across_a_resume(narrow, cwd, monkeypatch):
    disturb(monkeypatch, dict.fromkeys(range(2, 6), math.nan))
    narrow.run.dir, narrow.checkpoint.every, narrow.train.max_skipped_steps = "run", 4, 3
    interrupt_at(narrow, 4, monkeypatch)
    with pytest.raises(NumbersError, match="3 steps in a row, up to step 5"):
        train.run(narrow)


def test_a_router_that_yields_nan_is_named(narrow, cwd, build):
    narrow.model = mixture("qwen3_moe", vocab_size=1024, max_position_embeddings=256)
    narrow.model.tokenizer, narrow.train.max_skipped_steps = "builtin:tiny", 2
    trainer = build(narrow)

    def broken(_, __, output):
        return (output[0] * math.nan, output[1] * math.nan, output[2]) if trainer.state.step >= 2 else output

    trainer.language_model.routers.modules[1].register_forward_hook(broken)
    message = (
        r"The router \S*model\.layers\.1\.mlp\.gate gives NaN or infinite logits: .* 2 steps in a row, up to step 4\."
    )
    with pytest.raises(NumbersError, match=message):
        trainer.run()


@pytest.mark.parametrize("last", [4, 6])
def test_step_issued_before_bad_steps_are_read_is_saved(narrow, cwd, build, last):
    """As on a GPU, figures are read after the next step is issued. Steps 3 and 4 are bad; step 5 is good, or bad too."""
    narrow.train.log_every, narrow.train.max_skipped_steps, narrow.train.max_steps = 4, 2, 8
    narrow.checkpoint.every, narrow.train.micro_batch_size = 0, narrow.train.global_batch_size
    trainer = build(narrow)
    trainer.logs_late = True
    real, step, after, at = trainer.language_model.summed_loss, trainer.steps.take, {}, []

    def taken(given, lr):
        at.append(given.index + 1)
        outcome = step(given, lr)
        after[given.index + 1] = {name: value.clone() for name, value in trainer.run_state.weights().items()}
        return outcome

    trainer.steps.take = taken
    trainer.language_model.summed_loss = lambda batch: real(batch) * (math.nan if 3 <= at[-1] <= last else 1.0)
    if last == 4:
        assert trainer.run()["train/skipped_steps"] == 2
        return
    with pytest.raises(NumbersError, match="3 steps in a row, up to step 5"):
        trainer.run()
    saved = trainer.run_state.checkpoints.load_newest()
    assert saved.state.step == 5
    assert all(torch.equal(saved.weights[name], value) for name, value in after[5].items())
    assert saved.state.numbers["window"] == trainer.train_step.spikes.state()


def test_checkpoint_counts_skipped_steps_between_log_lines(narrow, cwd, monkeypatch):
    narrow.run.dir, narrow.train.log_every, narrow.checkpoint.every = "run", 6, 2
    real, whole_step, seen = LanguageModel.summed_loss, train.Steps.take, []
    monkeypatch.setattr(
        LanguageModel, "summed_loss", lambda *given: real(*given) * (float("nan") if seen == [0] else 1.0)
    )

    def dying(self, step, lr):
        seen.append(step.index)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return whole_step(self, step, lr)

    monkeypatch.setattr(train.Steps, "take", dying)
    with pytest.raises(KeyboardInterrupt):
        train.run(narrow)
    assert train.run(narrow)["train/skipped_steps"] == 1
    assert seen == [0, 1, 2, 3, 2, 3, 4, 5]


@pytest.mark.slow
def test_log_line_across_a_resume_covers_all_its_steps(narrow, cwd, monkeypatch):
    narrow.train.log_every, narrow.checkpoint.every, narrow.run.dir = 6, 2, "whole"
    train.run(narrow)
    narrow.run.dir = "broken"
    interrupt_at(narrow, 3, monkeypatch)
    train.run(narrow)
    assert [line["train/step"] for line in history(Path("broken")) if "train/loss" in line] == [6]
    assert losses(Path("broken")) == losses(Path("whole"))
