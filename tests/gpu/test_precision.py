"""Half precision on a GPU: the accuracy of float16 and bfloat16 matmuls, training with them, and no host syncs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import reference

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.facts.options import Autocast
from fxtune.models.load import DType
from fxtune.models.prepared import PreparedModel
from fxtune.system.terminal.units import GIB
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.precision import LossScale, Precision


def pipeline(**options) -> Pipeline:
    made = Pipeline()
    made.attention.backend = "sdpa"
    made.precision = Precision(True, **options)
    return made


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("shape", reference.SHAPES)
def test_float16_autocast_follows_float32(shape, lora):
    given = reference.batch(shape)
    seen = reference.ours(pipeline(autocast=Autocast.float16), shape, given, dtype="float32", lora=lora)
    apart = reference.relative_errors(seen, reference.plain(shape, given, lora=lora))
    assert max(apart.values()) < reference.LIMITS["float16"], apart
    (evidence,) = [one for one in seen.evidence if one.technique == "precision" and "autocast" in one.asked]
    assert "in float16" in evidence.observed


@pytest.mark.parametrize("shape", reference.SHAPES)
def test_bfloat16_autocast_is_as_accurate_as_bfloat16(shape):
    given = reference.batch(shape)
    exact = reference.plain(shape, given)
    ours = reference.relative_errors(
        reference.ours(pipeline(autocast=Autocast.bfloat16), shape, given, dtype="float32"), exact
    )
    plain = reference.relative_errors(reference.plain(shape, given, dtype="bfloat16"), exact)
    assert ours["logits"] < 1.2 * plain["logits"], (ours, plain)
    assert ours["grads"] < 1.2 * plain["grads"], (ours, plain)


@pytest.mark.parametrize("shape", reference.SHAPES)
def test_float32_without_tf32_is_float32(shape):
    given = reference.batch(shape)
    apart = reference.relative_errors(
        reference.ours(pipeline(tf32=False), shape, given, dtype="float32"), reference.plain(shape, given)
    )
    assert apart["logits"] < reference.LIMITS["float32"], apart
    assert apart["grads"] < 10 * reference.LIMITS["float32"], apart  # sums over 1,800 tokens in another order


def test_tf32_is_detected_by_its_rounding():
    given = reference.batch("llama")
    observed = {}
    for wanted in (True, False):
        model, made, evidence, _ = reference.build(pipeline(tf32=wanted), "llama", given, dtype="float32")
        observed[wanted] = next(one.observed for one in evidence if one.asked.startswith("TF32"))
    assert "rounds" in observed[True]
    assert "keeps" in observed[False]
    torch.set_float32_matmul_precision("high")  # behind the technique's back
    with pytest.raises(ConfigError, match="TF32 off; seen: a float32 matmul rounds"):
        made.prove(PreparedModel(model), make_probe(model))


def test_unused_cudnn_autotuner_is_refused():
    with pytest.raises(ConfigError, match=r"cudnn\.benchmark is True, for 0 convolutions"):
        reference.build(pipeline(cudnn_benchmark=True), "llama", reference.batch("llama"))


def test_loss_scaling_needs_no_host_sync():
    scale = LossScale(torch.device("cuda", 0), 2.0**16, 2, active=True)
    weight = torch.randn(1000, device="cuda", requires_grad=True)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            scale.scaled(weight.square().sum()).backward()
            scale.unscale([weight])
            scale.update(torch.isfinite(weight.grad).all())
            weight.grad = None
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert scale.scale.item() == 2.0**18


@pytest.mark.parametrize("lora", [True, False])
def test_fifty_steps_in_float16_fall_as_in_bfloat16(lora, small, cwd):
    from fxtune.training import trainer

    small.model.dtype = DType.float32
    small.techniques.lora.enabled = lora
    small.techniques.attention.backend = "sdpa"
    small.train.max_steps, found, skipped = 50, {}, {}
    for autocast in (Autocast.bfloat16, Autocast.float16):
        small.techniques.precision.autocast, small.run.dir = autocast, autocast.value
        skipped[autocast] = trainer.run(small)["train/skipped_steps"]
        lines = [json.loads(line) for line in (Path(autocast.value) / "metrics.jsonl").read_text().splitlines()]
        found[autocast] = [line["train/loss"] for line in lines if line.get("train/loss") is not None]
    half, brain = found[Autocast.float16], found[Autocast.bfloat16]
    assert half[-1] < 0.7 * half[0]
    assert sum(half[-10:]) == pytest.approx(sum(brain[-10:]), rel=0.03)
    assert skipped[Autocast.bfloat16] == 0
    assert skipped[Autocast.float16] < 10


def test_memory_limit_is_enforced_and_reported():
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        world = World.create(memory_gib=2.0)
        facts = world.facts()
        assert facts.memory == pytest.approx(2 * GIB, rel=1e-6)
        assert facts.free_memory <= facts.memory
        torch.empty(GIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * GIB, dtype=torch.uint8, device=device)
        with pytest.raises(ConfigError, match=r"run\.memory_gib=100000\.0, but"):
            World.create(memory_gib=100000.0)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
