"""techniques.float8 without its speed: what it refuses, replaces, computes and saves, on a CPU.

check() refuses a CPU, so these tests leave it out, and products run by the plain reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.architectures import CPU, enable, logits, random_model, tiny_model
from support.forecasts import LLAMA, card
from support.runs import losses

from fxtune.models.load import DType, ModelConfig, load_config
from fxtune.techniques.checkpointing.plan import RecomputePlan
from fxtune.techniques.estimate.memory import forecast
from fxtune.techniques.estimate.step_time import layer_time
from fxtune.techniques.float8 import Float8, Float8Linear
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.training import trainer

FULL = {"float8": {}, "compile": {}, "attention": {"backend": "flash4"}, "liger": {"fused_linear_cross_entropy": "on"}}


def made(model: ModelConfig, pipeline: Pipeline | None = None, **options: Any) -> Any:
    model.dtype = DType.bfloat16
    return (pipeline or enable(float8=options)).build(model, load_config(model), CPU, 0)


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"techniques": {**FULL, "lora": {}}}, "techniques.float8.enabled: this is for trained weights, and "),
        ({"device": "cpu"}, "the device is cpu. Set it to false."),
        ({"capability": (8, 0), "device_name": "A100"}, "compute capability 8.9 (Ada, Hopper or newer), and A100 has"),
        ({"dtype": "float32"}, "the others run in float32. Set techniques.precision.autocast=bfloat16 or model.dtype"),
        ({"techniques": {**FULL, "float8": {"skip": ["o_prj"]}}}, "layers have no linear o_prj. Theirs are down_proj"),
        (
            {"model": {**LLAMA, "hidden_size": 4104, "num_attention_heads": 36, "num_key_value_heads": 4}},
            "no linear with sizes of a multiple of 16",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_a_change(known, reason):
    facts = card(140, 4096, **{"techniques": FULL, **known})
    found = [f"techniques.float8.{one}" for one in facts.techniques.float8.check(facts)]
    assert len(found) == 1
    assert reason in found[0]
    fitting = card(140, 4096, techniques=FULL)
    assert not list(fitting.techniques.float8.check(fitting))


def test_the_linears_of_the_layers_train_in_fp8_and_evaluate_as_they_are():
    model = random_model("qwen3")
    mine, plain = made(model), made(model, Pipeline())
    replaced = {name for name, one in mine.named_modules() if isinstance(one, Float8Linear)}
    assert len(replaced) == 14
    assert "lm_head" not in replaced
    assert list(mine.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(mine.state_dict()[name], weight) for name, weight in plain.state_dict().items())
    assert torch.equal(logits(mine), logits(plain))
    gradients = []
    for one in (mine, plain):
        one.train()(**make_probe(one)).logits.float().logsumexp(-1).sum().backward()
        gradients.append({name: weight.grad.float() for name, weight in one.named_parameters()})
    for name, gradient in gradients[0].items():
        other = gradients[1][name]
        assert 0 < (gradient - other).norm() < 0.25 * other.norm() + 1e-3, name


def test_skipped_linears_routers_and_odd_sizes_stay():
    named = {name for name, one in made(random_model("llama"), skip=["down_proj"]).named_modules()
             if isinstance(one, Float8Linear)}  # fmt: skip
    assert len(named) == 12
    assert not any(name.endswith("down_proj") for name in named)
    for kind in ("mixtral", "deepseek_v3", "llama4_text"):
        mine = made(tiny_model(kind))
        found = {name for name, one in mine.named_modules() if isinstance(one, Float8Linear)}
        assert found
        assert not any("router" in name or name.endswith("gate") for name in found)
        for name in found:
            assert not any(size % 16 for size in mine.get_submodule(name).weight.shape)


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
def test_the_evidence_has_the_share_of_weights_and_the_errors_of_products(dtype):
    pipeline = enable(float8={"weight_gradient": dtype})
    mine = made(random_model("llama"), pipeline)
    inside, errors, products = pipeline.float8.verify(mine, make_probe(mine))
    assert inside.acted
    assert inside.observed == "14 linears with 99.6% of the layers' weights"
    assert errors.acted, errors.observed
    assert float(errors.observed.rpartition(" ")[2]) > (0.02 if dtype == "float8" else 0)
    assert not products.acted, "on a CPU no product is in fp8"
    assert all(one.training == mine.training for one in mine.modules()), "restored"


def test_the_forecast_has_less_time_and_memory():
    plan = RecomputePlan()
    fast, slow = (
        card(140, 8192, 2, techniques={**FULL, "float8": {"weight_gradient": dtype}})
        for dtype in ("float8", "bfloat16")
    )
    plain = card(140, 8192, 2, techniques={name: one for name, one in FULL.items() if name != "float8"})
    times = [layer_time(facts).wide for facts in (fast, slow, plain)]
    assert times == sorted(times)
    kept = [forecast(facts, plan).kept for facts in (fast, slow, plain)]
    # norms' outputs and the product of gate and up in a byte, and a copy of attention's output
    assert kept[2] - kept[0] == 2 * 8192 * 32 * (2 * 4096 + 14336 - 4096)
    assert kept[1] == kept[2]


@pytest.mark.slow
def test_a_full_run_learns_as_in_bfloat16_and_its_export_is_a_plain_model(narrow, cwd, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(Float8, "check", lambda self, facts: iter(()))
    verify = Float8.verify
    monkeypatch.setattr(Float8, "verify", lambda *given: list(verify(*given))[:2])  # without the count of fp8 kernels
    narrow.techniques.lora.enabled, narrow.model.dtype = False, DType.bfloat16
    narrow.train.max_steps, narrow.optimizer.lr = 6, 1e-3
    seen = []
    for enabled in (False, True):
        narrow.techniques.float8.enabled, narrow.run.dir = enabled, f"run-{enabled}"
        trainer.run(narrow)
        seen.append(losses(cwd / narrow.run.dir))
    assert seen[0] != seen[1]
    assert seen[1] == pytest.approx(seen[0], rel=0.02)
    folder = cwd / "run-True" / "model"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert next(theirs.parameters()).dtype is torch.bfloat16
