"""The optimizer's step in the backward pass: the bits of an ordinary step, gradients that are gone, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.bad_steps import interrupt_at
from support.optimizers import CASES, YES, backward, make
from transformers import LlamaConfig

from fxtune.config.root import Config
from fxtune.errors import ConfigError, HardwareError, Stopped
from fxtune.facts.options import Policy, Switch
from fxtune.models.load import DType
from fxtune.objectives.causal_lm import CausalLM
from fxtune.optim.config import Moments
from fxtune.optim.optimizer import Optimizer
from fxtune.settle import freed_gradients
from fxtune.settle.freed_gradients import COUNTS_FOR_ALL
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder
from fxtune.training.in_backward import InBackward, observe
from fxtune.training.step import TrainStep


@pytest.fixture
def full(narrow, cwd) -> Config:
    """Full fine-tuning of which each step is one micro-batch, updated in the backward pass."""
    narrow.techniques.lora.enabled, narrow.optimizer.in_backward = False, Switch.on
    narrow.train.max_grad_norm, narrow.train.micro_batch_size = 0.0, 8
    narrow.run.dir = "run"
    return narrow


def weights(run: str) -> dict[str, torch.Tensor]:
    return load_file(next(Path(run, "model").glob("*.safetensors")))


@pytest.mark.parametrize("case", [case for case in CASES if case not in COUNTS_FOR_ALL])
def test_each_optimizer_has_the_bits_of_an_ordinary_step(case):
    (plain, ordinary), (model, optimizer) = make(case, weight_decay=0.1), make(case, True, weight_decay=0.1)
    pass_ = InBackward(optimizer)
    for seed in range(3):
        backward(plain, seed)
        norm = ordinary.clip(0)
        ordinary.step(1e-2, YES, seed)
        pass_.begin(1e-2, YES, seed)
        backward(model, seed)
        assert torch.equal(pass_.norm(), norm)
        assert all(weight.grad is None for weight in model.parameters())
        pass_.end()
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), model.parameters(), strict=True))
    (ours, ours_too), (theirs, theirs_too) = optimizer.state(), ordinary.state()
    assert ours.keys() == theirs.keys()
    assert ours_too == theirs_too
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_state_goes_from_one_kind_of_step_to_the_other():
    model, optimizer = make("adamw", one_by_one=True)
    pass_ = InBackward(optimizer)
    pass_.begin(1e-2, YES, 0)
    backward(model, 0)
    pass_.end()
    other, ordinary = make("adamw")
    other.load_state_dict(model.state_dict())
    ordinary.load(*copy.deepcopy(optimizer.state()))
    pass_.begin(1e-2, YES, 1)
    for network in (model, other):
        backward(network, 1)
    ordinary.step(1e-2, YES)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


def test_one_gradient_exists_at_a_time(full):
    builder = RunBuilder(full)
    plan = builder.read()[1].training
    prepared = builder.build()
    model = prepared.module.train()
    alive, hooked = [], [weight for weight in model.parameters() if weight.requires_grad]
    for weight in hooked:  # these hooks run before the optimizer's
        weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(parameter.grad is not None for parameter in hooked))
        )
    step = builder.train_step(builder.language_model(prepared), CausalLM())
    before = [weight.clone() for weight in hooked]
    step.backward([plan.batch(0, 0)], 1.0, lr=1e-2)
    assert alive == [1] * len(hooked)
    assert not any(torch.equal(*pair) for pair in zip(before, hooked, strict=True))
    step.optimizer.drop()
    step.in_backward.end()
    alive.clear()
    step.backward([plan.batch(0, 0)], 1.0)  # as `fxtune verify` does, to compare gradients
    assert alive == list(range(1, len(hooked) + 1))


def test_a_run_has_the_weights_of_ordinary_steps_also_if_it_is_interrupted_and_goes_on_with_them(full, monkeypatch):
    full.train.max_steps, full.checkpoint.every = 4, 2
    trainer.run(full)
    evidence = [row for row in json.loads(Path("run/evidence.json").read_text()) if "in_backward" in row["technique"]]
    assert [row["observed"].partition(" of ")[0] for row in evidence] == ["at most 1"]
    full.optimizer.in_backward, full.run.dir = Switch.off, "ordinary"
    trainer.run(full)
    full.optimizer.in_backward, full.run.dir = Switch.on, "interrupted"
    with monkeypatch.context() as patch:
        interrupt_at(full, 3, patch)
    full.optimizer.in_backward = Switch.off
    trainer.run(full)
    ours = weights("run")
    for run in ("ordinary", "interrupted"):
        other = weights(run)
        assert all(torch.equal(tensor, other[name]) for name, tensor in ours.items()), run


@pytest.mark.slow
def test_compiled_and_recomputed_layers_have_the_bits_of_ordinary_steps(full):
    """Rounded stochastically, with moments in bfloat16."""
    full.train.max_steps, full.data.packing, full.data.sequence_length, full.data.workers = 3, True, 64, 1
    full.model.dtype, full.optimizer.stochastic_rounding, full.optimizer.moments = (
        DType.bfloat16,
        True,
        Moments.bfloat16,
    )
    full.techniques.compile.enabled = full.techniques.liger.enabled = full.techniques.checkpointing.enabled = True
    full.techniques.checkpointing.policy = Policy.selective
    for on in (Switch.on, Switch.off):
        full.optimizer.in_backward, full.run.dir = on, on.value
        trainer.run(full)
    ours, other = weights("on"), weights("off")
    assert all(torch.equal(tensor, other[name]) for name, tensor in ours.items())


def test_memory_that_runs_out_in_the_middle_saves_nothing_and_the_run_resumes(full, monkeypatch):
    full.train.max_steps, full.checkpoint.every, full.run.dir = 4, 2, "undisturbed"
    trainer.run(full)
    full.run.dir = "run"
    update, calls = Optimizer.update, []

    def short(self, *given, **named):
        calls.append(given)
        if len(calls) == 3 * len(self.parts) + 4:  # in the fourth step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        update(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "update", short)
        with pytest.raises(HardwareError) as stopped:
            trainer.run(full)
    lines = str(stopped.value).splitlines()
    assert lines[1:3] == [
        "Some weights of this step were updated and others were not, so it is not saved.",
        "Saved after step 2: the same command resumes there, given more memory.",
    ]
    trainer.run(full)
    ours, other = weights("run"), weights("undisturbed")
    assert all(torch.equal(tensor, other[name]) for name, tensor in ours.items())


@pytest.mark.slow
def test_signal_in_the_middle_waits_for_the_end_of_the_step(full, monkeypatch):
    full.train.max_steps, full.run.dir = 4, "undisturbed"
    trainer.run(full)
    full.run.dir = "run"
    update, calls = Optimizer.update, []

    def signalled(self, *given, **named):
        calls.append(given)
        if len(calls) == len(self.parts) + 4:  # in the second step
            os.kill(os.getpid(), signal.SIGTERM)
        update(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "update", signalled)
        with pytest.raises(Stopped):
            trainer.run(full)
    assert [path.name for path in Path("run/checkpoints").glob("step-*")] == ["step-00000002"]
    trainer.run(full)
    ours, other = weights("run"), weights("undisturbed")
    assert all(torch.equal(tensor, other[name]) for name, tensor in ours.items())


def test_a_gradient_that_is_not_finite_leaves_its_own_weight_and_later_ones():
    model, optimizer = make("adamw", one_by_one=True)
    pass_ = InBackward(optimizer)
    model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    pass_.begin(1e-2, YES, 0)
    backward(model, 0)
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {"head.weight", "wide.weight"} | ({"norm.bias"} & moved), "those before it have their gradients"
    assert not torch.isfinite(pass_.norm())
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_a_loss_that_is_not_finite_updates_nothing(full, monkeypatch):
    builder = RunBuilder(full)
    plan = builder.read()[1].training
    model = builder.language_model(builder.build())
    model.model.train()
    step = builder.train_step(model, CausalLM())
    real, factor = CausalLM.loss, [float("nan")]
    monkeypatch.setattr(CausalLM, "loss", lambda *given: (real(*given)[0] * factor[0], {}))
    for value, moves in ((float("nan"), False), (1.0, True)):
        factor[0] = value
        before = [weight.clone() for weight in step.optimizer.names]
        metrics = step.backward([plan.batch(0, 0)], 1.0, lr=1e-2)
        step.clip(metrics)
        step.update(metrics, 1e-2)
        assert bool(metrics["finite"]) == moves
        assert set(metrics) == {"loss", "grad_norm", "finite", "loss_scale", "spike_limit"}
        assert moves == any(not torch.equal(*pair) for pair in zip(before, step.optimizer.names, strict=True))


def test_weight_whose_gradient_comes_in_parts_is_an_error():
    model, optimizer = make("adamw", one_by_one=True)
    pass_ = InBackward(optimizer)
    pass_.begin(1e-2, YES, 0)
    backward(model, 0)
    with pytest.raises(ConfigError, match=r"adds to the gradient of .* more than once.* Set it to off\."):
        backward(model, 0)


@pytest.mark.slow
def test_run_that_halved_its_micro_batches_keeps_all_gradients(full, monkeypatch):
    real, calls = TrainStep.backward, []

    def short(self, *given, **named):
        calls.append(given)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(self, *given, **named)

    monkeypatch.setattr(TrainStep, "backward", short)
    full.train.max_steps, full.optimizer.in_backward = 4, Switch.off
    for run, pause in (("whole", None), ("run", 2)):
        calls.clear()
        full.run.dir, full.train.pause_after = run, pause
        trainer.run(full)
    full.train.pause_after, full.optimizer.in_backward = None, Switch.on
    with pytest.raises(ConfigError, match=r"in_backward: the run halved its micro-batches to 4 rows .* Set it to off"):
        trainer.run(full)
    full.optimizer.in_backward = Switch.auto
    monkeypatch.setattr(freed_gradients, "decide", lambda _, facts: (replace(facts, in_backward=True), ""))
    trainer.run(full)
    ours, other = weights("run"), weights("whole")
    assert all(torch.equal(tensor, other[name]) for name, tensor in ours.items())


def test_only_the_weights_of_one_part_are_copied_to_undo_a_step():
    (_, whole), (_, single) = make("lion"), make("lion", one_by_one=True)
    assert len(whole._in_one_step(whole.parts[0])) == len(single.parts)
    assert [len(single._in_one_step(part)) for part in single.parts] == [1] * len(single.parts)


def test_proof_counts_the_gradients_that_exist_at_once():
    class Parts(torch.nn.Module):
        config = LlamaConfig()

        def __init__(self):
            super().__init__()
            self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            class Out:
                logits = self.other(self.one(x))

            return Out

    evidence = observe(Parts(), {"x": torch.ones(2, 4)})
    assert (evidence.observed, evidence.acted) == ("at most 1 of 4 gradients exist at once", True)
