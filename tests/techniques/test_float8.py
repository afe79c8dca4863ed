"""techniques.float8 without its speed: what it refuses, replaces, computes and saves, on a CPU.

check() refuses a CPU, so these tests leave it out, and products run by the plain reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import CPU, enable, logits, random_model, tiny_model
from support.forecasts import LLAMA, card
from support.runs import losses
from support.sharded import run_ranks

from fxtune.cli import evaluate
from fxtune.distributed.parallel import Degrees
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.estimate.memory import forecast
from fxtune.estimate.step_time import layer_time
from fxtune.facts.options import WeightGradient
from fxtune.facts.recomputation import RecomputePlan
from fxtune.models.load import DType, ModelConfig, load_config
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.assemble import assemble
from fxtune.techniques.float8 import Float8, Float8Linear
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.training import trainer

FULL = {
    "float8": {},
    "compile": {},
    "attention": {"backend": "flash4"},
    "liger": {"kernels": ["fused_linear_cross_entropy"]},
}


def made(model: ModelConfig, pipeline: Pipeline | None = None, **options: Any) -> Any:
    model.dtype = DType.bfloat16
    return assemble(pipeline or enable(float8=options), model, load_config(model), CPU, 0).module


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"techniques": {**FULL, "lora": {}}}, "techniques.float8.enabled: this is for trained weights, and "),
        ({"device": "cpu"}, "the device is cpu. Set it to false."),
        ({"capability": (8, 0), "device_name": "A100"}, "compute capability 8.9 (Ada, Hopper or newer), and A100 has"),
        ({"dtype": "float32"}, "the others run in float32. Set techniques.precision.autocast=bfloat16 or model.dtype"),
        (
            {"techniques": {**FULL, "float8": {"skip": ["o_prj"]}}},
            "layers have no linear o_prj. Their linears are down_proj",
        ),
        (
            {"model": {**LLAMA, "hidden_size": 4104, "num_attention_heads": 36, "num_key_value_heads": 4}},
            "no linear with sizes of a multiple of 16",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_a_change(known, reason):
    facts = card(140, 4096, **{"techniques": FULL, **known})
    found = [f"techniques.float8.{reason}" for reason in facts.techniques.float8.check(facts)]
    assert len(found) == 1
    assert reason in found[0]
    fitting = card(140, 4096, techniques=FULL)
    assert not list(fitting.techniques.float8.check(fitting))


def test_the_linears_of_the_layers_train_in_fp8_and_evaluate_as_they_are():
    model = random_model("qwen3")
    mine, plain = made(model), made(model, Pipeline())
    replaced = {name for name, module in mine.named_modules() if isinstance(module, Float8Linear)}
    assert len(replaced) == 14
    assert "lm_head" not in replaced
    assert list(mine.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(mine.state_dict()[name], weight) for name, weight in plain.state_dict().items())
    assert torch.equal(logits(mine), logits(plain))
    gradients = []
    for compared in (mine, plain):
        compared.train()(**make_probe(compared)).logits.float().logsumexp(-1).sum().backward()
        gradients.append({name: weight.grad.float() for name, weight in compared.named_parameters()})
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert 0 < (gradient - other).norm() < 0.25 * other.norm() + 1e-3, name


def test_skipped_linears_routers_and_odd_sizes_stay():
    named = {name for name, module in made(random_model("llama"), skip=["down_proj"]).named_modules()
             if isinstance(module, Float8Linear)}  # fmt: skip
    assert len(named) == 12
    assert not any(name.endswith("down_proj") for name in named)
    for kind in ("mixtral", "deepseek_v3", "llama4_text"):
        mine = made(tiny_model(kind))
        found = {name for name, module in mine.named_modules() if isinstance(module, Float8Linear)}
        assert found
        assert not any("router" in name or name.endswith("gate") for name in found)
        for name in found:
            assert not any(size % 16 for size in mine.get_submodule(name).weight.shape)


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
def test_the_evidence_has_the_share_of_weights_and_the_errors_of_products(dtype):
    pipeline = enable(float8={"weight_gradient": dtype})
    mine = made(random_model("llama"), pipeline)
    inside, errors, products = pipeline.float8.verify(PreparedModel(mine), make_probe(mine))
    assert inside.acted
    assert inside.observed == "14 linears with 99.6% of the layers' weights"
    assert errors.acted, errors.observed
    assert float(errors.observed.rpartition(" ")[2]) > (0.02 if dtype == "float8" else 0)
    assert not products.acted, "on a CPU no product is in fp8"
    assert all(module.training == mine.training for module in mine.modules()), "restored"


def test_the_forecast_has_less_time_and_memory():
    plan = RecomputePlan()
    fast, slow = (
        card(140, 8192, 2, techniques={**FULL, "float8": {"weight_gradient": dtype}})
        for dtype in ("float8", "bfloat16")
    )
    plain = card(140, 8192, 2, techniques={name: options for name, options in FULL.items() if name != "float8"})
    times = [layer_time(facts).wide for facts in (fast, slow, plain)]
    assert times == sorted(times)
    kept = [forecast(facts, plan).kept for facts in (fast, slow, plain)]
    # norms' outputs and the product of gate and up in a byte, and a copy of attention's output
    assert kept[2] - kept[0] == 2 * 8192 * 32 * (2 * 4096 + 14336 - 4096)
    assert kept[1] == kept[2]


@pytest.mark.slow
def test_a_full_run_learns_as_in_bfloat16_resumes_and_exports_a_plain_model(narrow, cwd, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(Float8, "check", lambda self, facts: iter(()))
    verify = Float8.verify
    monkeypatch.setattr(Float8, "verify", lambda *given: list(verify(*given))[:2])  # without the count of fp8 kernels
    narrow.techniques.lora.enabled, narrow.model.dtype = False, DType.bfloat16
    narrow.train.max_steps, narrow.optimizer.lr, narrow.checkpoint.every = 6, 1e-3, 3
    narrow.data.eval_fraction = 0.2
    seen = []
    for enabled in (False, True):
        narrow.techniques.float8.enabled, narrow.run.dir = enabled, f"run-{enabled}"
        trainer.run(narrow)
        seen.append(losses(cwd / narrow.run.dir))
    assert seen[0] != seen[1]
    assert seen[1] == pytest.approx(seen[0], rel=0.02)
    narrow.run.dir, narrow.train.pause_after = "paused", 3
    trainer.run(narrow)
    narrow.train.pause_after, narrow.techniques.float8.weight_gradient = None, WeightGradient.bfloat16
    with pytest.raises(ConfigError, match="weight_gradient"):
        trainer.run(narrow)
    narrow.techniques.float8.weight_gradient = WeightGradient.float8
    trainer.run(narrow)
    assert losses(cwd / "paused") == seen[1]
    weights = [load_file(cwd / name / "model" / "model.safetensors") for name in ("paused", "run-True")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    monkeypatch.undo()
    monkeypatch.chdir(cwd)
    checkpoint = max((cwd / "run-True" / "checkpoints").glob("step-*"))
    assert 0 < evaluate.of_output(str(checkpoint))["eval/loss"] < seen[1][0]  # on a CPU, without fp8
    folder = cwd / "run-True" / "model"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert next(theirs.parameters()).dtype is torch.bfloat16


def learn(world: World) -> dict[str, Any]:
    """Eight steps of a drawn model, its weights divided over the ranks: the losses and what is in fp8."""
    from fxtune.config.compose import load
    from fxtune.objectives.causal_lm import CausalLM
    from fxtune.training.builder import RunBuilder

    sizes = (
        "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1"
    )
    words = ("model.init=random", f"model.architecture={{{sizes}}}", "techniques.checkpointing.enabled=true")
    counts = (
        "data.sequence_length=256",
        "train.micro_batch_size=4",
        "train.global_batch_size=8",
        "train.max_grad_norm=0",
    )
    builder = RunBuilder(load(["+recipe=full_quickstart", "tracking.display=none", *counts, *words]))
    if world.size > 1:
        builder.world = world.divided(Degrees(shard=world.size))
        facts = replace(builder.facts, degrees=builder.world.degrees)
        builder.stage = replace(builder.stage, facts=facts)
    builder.techniques.float8 = Float8(True)
    plan = builder.read()[1].training
    prepared = builder.build()
    model = prepared.module.train()
    step, own, seen = builder.train_step(builder.language_model(prepared), CausalLM()), builder.own(plan), []
    for index in range(8):
        batches = [own.batch(index, micro) for micro in range(own.micro_batches(index))]
        metrics = step.sum_over_ranks(step.backward(batches, step.objective.normalizer(plan, index)))
        step.clip(metrics)
        step.update(metrics, 1e-2)
        seen.append(float(metrics["loss"]))
    if prepared.sharding is not None:
        prepared.sharding.free_gathered()
    linears = sum(isinstance(module, Float8Linear) for module in model.modules())
    return {"losses": seen, "linears": linears, "names": [name for name, _ in model.named_parameters()]}


@pytest.mark.slow
def test_ranks_that_share_the_weights_learn_what_one_process_learns():
    (alone,) = run_ranks(1, learn)
    assert alone["linears"] == 14
    assert alone["losses"][-1] < alone["losses"][0]
    for rank in run_ranks(2, learn):
        assert rank == alone
