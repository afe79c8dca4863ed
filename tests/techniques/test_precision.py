"""Autocast, loss scaling and TF32: the dtype of a forward pass, the card's features, and steps that overflow."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.architectures import CPU, built, facts_of, lora, prepared_model, random_model
from support.runs import history, losses, same_export

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, NumbersError
from fxtune.facts.options import Autocast
from fxtune.facts.run import Facts
from fxtune.models.load import DType
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques import precision
from fxtune.techniques.pipeline import make_probe
from fxtune.techniques.precision import LossScale, Precision
from fxtune.training import trainer

PASCAL = Facts(device="cuda", device_name="Tesla P100", capability=(6, 0))
TURING = dataclasses.replace(PASCAL, device_name="Tesla T4", capability=(7, 5))
AMPERE = dataclasses.replace(PASCAL, device_name="A100", capability=(8, 0))


@pytest.mark.parametrize(
    ("autocast", "expected"),
    [(Autocast.none, torch.float32), (Autocast.bfloat16, torch.bfloat16), (Autocast.float16, torch.float16)],
)
def test_a_forward_pass_computes_in_the_autocast_dtype(autocast, expected):
    precision = Precision(enabled=True, autocast=autocast)
    prepared = prepared_model(lora(), random_model("llama"))
    model = prepared.module
    seen = []
    linear = model.get_base_model().model.layers[0].mlp.down_proj
    linear.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    with precision.context(CPU.device):
        model(**make_probe(model))
    assert seen == [expected]
    (evidence,) = precision.verify(prepared, make_probe(model))
    assert evidence.acted
    # seven linears in two layers with two adapter matrices each, and the head
    assert evidence.observed == f"matmuls of a forward pass: 43 in {str(expected).removeprefix('torch.')}"


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16])
def test_16_bit_weights_compute_in_16_bits_and_their_adapters_in_float32(dtype):
    pipeline, model = lora(), random_model("llama")
    model.dtype = dtype
    prepared = prepared_model(pipeline, model, dtype=dtype.value)
    adapted = prepared.module
    (evidence,) = pipeline.precision.verify(prepared, make_probe(adapted))
    assert evidence.observed == f"matmuls of a forward pass: 28 in float32, 15 in {dtype.value}"
    assert evidence.acted


def test_disabled_precision_has_a_null_context():
    with Precision(enabled=False, autocast=Autocast.bfloat16).context(CPU.device):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize("autocast", [Autocast.bfloat16, Autocast.float16])
def test_verify_finds_an_autocast_that_does_not_act(monkeypatch, autocast):
    pipeline = lora()
    pipeline.precision.autocast = autocast
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    monkeypatch.setattr(Precision, "context", lambda self, device: torch.autocast(device.type, enabled=False))
    with pytest.raises(ConfigError, match="seen: matmuls of a forward pass: 43 in float32"):
        pipeline.prove(prepared, make_probe(model))


@pytest.mark.parametrize(
    ("facts", "options", "expected"),
    [
        (
            TURING,
            {"autocast": Autocast.bfloat16},
            "Tesla T4 (compute capability 7.5) has no bfloat16 units. Use float16",
        ),
        (PASCAL, {"autocast": Autocast.float16}, "no fast float16 units"),
        (TURING, {"tf32": True}, "tf32: Tesla T4 (compute capability 7.5) has no TF32 units"),
        (Facts(), {"tf32": True}, "tf32: a feature of NVIDIA cards"),
        (Facts(), {"cudnn_benchmark": True}, "cudnn_benchmark: cuDNN needs a GPU"),
        (
            dataclasses.replace(AMPERE, deterministic=True),
            {"cudnn_benchmark": True},
            "run.deterministic to false",
        ),
        (dataclasses.replace(TURING, dtype="bfloat16"), {}, "Set model.dtype=float32"),
        (
            dataclasses.replace(AMPERE, dtype="float16"),
            {"autocast": Autocast.bfloat16},
            "bfloat16 over float16 weights",
        ),
        (
            dataclasses.replace(AMPERE, dtype="bfloat16"),
            {"autocast": Autocast.float16},
            "float16 over bfloat16 weights",
        ),
        (AMPERE, {"autocast": Autocast.bfloat16, "tf32": True, "cudnn_benchmark": True}, None),
        (TURING, {"tf32": False}, None),
        (Facts(), {"autocast": Autocast.bfloat16}, None),
        (Facts(), {"autocast": Autocast.float16}, None),
    ],
)
def test_check_names_the_missing_feature_of_the_card(facts, options, expected):
    reasons = list(Precision(enabled=True, **options).check(facts))
    assert (expected is None) == (not reasons)
    assert expected is None or expected in reasons[0]


@pytest.mark.parametrize(("facts", "chosen"), [(AMPERE, True), (TURING, False), (Facts(), False)])
def test_tf32_is_on_by_default_if_the_card_has_it(facts, chosen):
    pipeline, notes = lora().resolved(dataclasses.replace(facts, model=facts_of(random_model("llama")).model))
    assert pipeline.precision.tf32 is chosen
    assert [note for note in notes if "tf32" in note] == (["precision: tf32 on, this card has it"] if chosen else [])


def test_the_matmul_precision_of_a_cpu_is_not_changed():
    before = torch.get_float32_matmul_precision()
    Precision(enabled=True, tf32=True).apply(built(lora(), random_model("llama")), CPU)
    assert torch.get_float32_matmul_precision() == before


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_loss_scale_follows_torch_gradscaler(finite, interval):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    ours = LossScale(torch.device("cpu"), 2.0**16, interval, active=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for good in finite:
        scaler.scale(weight.sum() * (1.0 if good else math.inf)).backward()
        ours.update(torch.tensor(good))
        scaler.step(optimizer)
        scaler.update()
        weight.grad = None
        assert ours.scale.item() == scaler.get_scale()
    again = LossScale(torch.device("cpu"), 1.0, interval, active=True)
    again.load(ours.state())
    assert again.state() == ours.state()


def test_scaling_changes_no_bit_of_a_gradient_and_does_not_sync():
    ours = LossScale(torch.device("cpu"), 2.0**13, active=True)
    torch.manual_seed(0)
    weight = torch.randn(50, requires_grad=True)
    weight.exp().sum().backward()
    plain, weight.grad = weight.grad, None
    ours.scaled(weight.exp().sum()).backward()
    ours.unscale([weight, torch.zeros(1)])
    assert torch.equal(weight.grad, plain)
    off = LossScale(torch.device("cpu"))
    loss = weight.sum()
    assert off.scaled(loss) is loss
    off.update(torch.tensor(False))
    assert (off.scale.item(), off.state()) == (1.0, {})


def test_the_loss_scale_never_overflows_or_underflows():
    ours = LossScale(torch.device("cpu"), 2.0**99, 1, active=True)
    for _ in range(5):
        ours.update(torch.tensor(True))
    assert math.isfinite(ours.scale.item() * 2)
    ours.update(torch.tensor(False))
    assert ours.scale.item() == 2.0**99


@pytest.mark.slow
def test_a_resumed_run_continues_with_its_loss_scale(narrow, cwd, monkeypatch):
    """float16 matmuls over float32 weights, from a scale that is far too large. They are slow on a CPU, so the model is small."""
    narrow.techniques.precision = Precision(True, Autocast.float16)
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**34)
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 3)
    narrow.train.max_steps, narrow.train.global_batch_size, narrow.checkpoint.every = 22, 4, 2
    real, untouched, seen = trainer.Steps.take, [], []

    def watched(self, step, lr):
        if self.builder.config.run.dir == "broken":
            seen.append(step.index)
            if len(seen) in (8, 20):  # before the scale has settled, and between two doublings
                raise KeyboardInterrupt
        before = [parameter.clone() for parameter in self.train_step.optimizer.names]
        done = real(self, step, lr)
        same = all(torch.equal(a, b) for a, b in zip(before, self.train_step.optimizer.names, strict=True))
        untouched.append(same != bool(done["finite"]))
        return done

    monkeypatch.setattr(trainer.Steps, "take", watched)
    narrow.run.dir = "whole"
    result = trainer.run(narrow)
    assert result["train/skipped_steps"] > narrow.train.max_skipped_steps, (
        "more in a row than a run of bad numbers may have"
    )
    assert all(untouched), "exactly the skipped steps leave every weight unchanged"
    lines = history(Path("whole"))
    scales = [line["train/loss_scale"] for line in lines if "train/loss_scale" in line]
    assert scales[0] == 2.0**34
    assert {after / before for before, after in itertools.pairwise(scales)} == {0.5, 1.0, 2.0}

    narrow.run.dir = "broken"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trainer.run(narrow)
    trainer.run(narrow)
    assert same_export("whole", "broken")
    for column in ("train/loss", "train/loss_scale", "train/skipped_steps"):
        assert [line.get(column) for line in history(Path("broken"))] == [line.get(column) for line in lines]


@pytest.mark.slow
def test_float16_training_matches_float32(narrow, cwd):
    narrow.train.max_steps, narrow.train.global_batch_size, ends = 10, 4, {}
    for autocast in (Autocast.none, Autocast.float16):
        narrow.techniques.precision.autocast, narrow.run.dir = autocast, autocast.value
        trainer.run(narrow)
        ends[autocast] = losses(Path(autocast.value))
    assert "train/loss_scale" not in history(Path("none"))[0]
    assert ends[Autocast.float16] == pytest.approx(ends[Autocast.none], rel=2e-3)
    assert ends[Autocast.float16] != ends[Autocast.none]


def test_nonfinite_numbers_end_a_float16_run(narrow, cwd, monkeypatch):
    """A loss that is not finite is not an overflow of the scale."""
    real = LanguageModel.summed_loss
    monkeypatch.setattr(LanguageModel, "summed_loss", lambda *arguments: real(*arguments) * math.nan)
    narrow.techniques.precision.autocast = Autocast.float16
    with pytest.raises(
        NumbersError, match=r"not finite in 5 steps in a row, up to step 5.*use bfloat16 in place of float16"
    ):
        trainer.run(narrow)


def test_a_memory_limit_needs_a_gpu_of_that_size(small, cwd, monkeypatch):
    small.run.memory_gib = 24.0
    with pytest.raises(ConfigError, match=r"run\.memory_gib=24\.0 limits a GPU's memory, and this run is on a CPU"):
        trainer.run(small)
    card = type("Card", (), {"total_memory": 80 * 2**30})()
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    World.create(memory_gib=24.0)
    assert limits == [0.3]
    with pytest.raises(ConfigError, match=r"run\.memory_gib=96\.0, but NVIDIA A100 has 80\.0 GiB"):
        World.create(memory_gib=96.0)
