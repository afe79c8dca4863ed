"""Adapters over an fp8 base of which each rank holds rows, beside one process with the whole base.

The command refuses fp8 on a CPU, so the ranks put the technique into a built recipe, and products run by the plain
reference.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.architectures import on_disk
from support.mixtures import mixture
from support.sharded import run_ranks
from torch import nn

from fxtune.distributed.chunks import is_divided, local
from fxtune.distributed.parallel import Degrees
from fxtune.distributed.world import World

pytestmark = pytest.mark.slow
DRAWN = (
    "model.init=random",
    "model.architecture={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 1}",
)
MIXTURE = (
    "{model_type: qwen3_moe, vocab_size: 1024, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, num_experts: 4, num_experts_per_tok: 2, "
    "moe_intermediate_size: 32}"
)
FUSED = ("techniques.lora.fused=on", "techniques.liger.enabled=true", "techniques.checkpointing.enabled=true")
COMPILED = ("techniques.compile.enabled=true", "data.buckets=[256]")
STEPS = 20


class OldParameter(nn.Parameter):
    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        return nn.Parameter(data).requires_grad_(requires_grad)


def old_torch() -> Any:
    """torch's FSDP2 with torch 2.11's order: a divided parameter asks for a gradient, and then takes that back."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return mock.patch.object(_fsdp_param, "nn", SimpleNamespace(**{**vars(nn), "Parameter": OldParameter}))


def learn(words: tuple[str, ...], options: dict[str, Any], old: bool, world: World) -> dict[str, Any]:
    """Train adapters for STEPS steps. Returns their weights, the losses, what was observed, and the bytes that this
    rank holds of the codes, beside those of all. `old`: as torch 2.11 divides."""
    from fxtune.config.compose import load
    from fxtune.facts.options import DType, WeightFormat
    from fxtune.objectives.causal_lm import CausalLM
    from fxtune.techniques.quantize.technique import Quantize
    from fxtune.training.builder import RunBuilder

    recipe = [
        "+recipe=quickstart",
        "data.sequence_length=256",
        "train.micro_batch_size=4",
        "train.global_batch_size=8",
    ]
    builder = RunBuilder(load([*recipe, "tracking.display=none", *words]))
    if world.size > 1:
        builder.world = world.divided(Degrees(shard=world.size))
        facts = replace(builder.facts, degrees=builder.world.degrees)
        builder.stage = replace(builder.stage, facts=facts)
    options = dict(options)
    transposes = options.pop("transposes", True)
    builder.techniques.quantize = Quantize(True, WeightFormat.fp8, compute_dtype=DType.float32, **options)
    builder.techniques.quantize.keeps_transposes = transposes
    plan = builder.read()[1].training
    with old_torch() if old else contextlib.nullcontext():
        prepared = builder.build()
        model = prepared.module.train()
    language_model = builder.language_model(prepared)
    evidence = [
        observation for observation in builder.observe(language_model) if observation.asked != "products in fp8"
    ]
    train_step = builder.train_step(language_model, CausalLM())
    own, losses = builder.own(plan), []
    for step in range(STEPS):
        batches = [own.batch(step, micro) for micro in range(own.micro_batches(step))]
        normalizer = train_step.objective.normalizer(plan, step)
        metrics = train_step.sum_over_ranks(train_step.backward(batches, normalizer))
        train_step.clip(metrics)
        train_step.update(metrics, 1e-2)
        losses.append(float(metrics["loss"]))
    if prepared.sharding is not None:
        prepared.sharding.free_gathered()
    codes = [parameter for parameter in model.parameters() if parameter.dtype is torch.uint8]
    return {
        "weights": {
            name: parameter.detach().numpy() for name, parameter in model.named_parameters() if parameter.requires_grad
        },
        "losses": losses,
        "evidence": [
            (observation.technique, observation.asked, observation.observed, observation.acted)
            for observation in evidence
        ],
        "held": sum(local(code).nbytes for code in codes if is_divided(code)),
        "whole": sum(code.nbytes for code in codes if not is_divided(code)),
        "codes": sum(code.nbytes for code in codes),
    }


@pytest.mark.parametrize(
    ("words", "options", "old"),
    [
        ((*DRAWN, *FUSED, *COMPILED), {}, False),
        (DRAWN, {"skip": ["down_proj"]}, False),
        (FUSED, {"head": True, "embeddings": True}, True),
        (FUSED, {"transposes": False}, False),
    ],
    ids=(
        "drawn, fused, recomputed, compiled",
        "drawn, by peft, some linears plain",
        "read, with head and embeddings, as torch 2.11 divides",
        "without transposes",
    ),
)
def test_rows_of_an_fp8_base_learn_what_the_whole_base_learns_bit_for_bit(words, options, old):
    (alone,) = run_ranks(1, learn, words, options, False)
    ranks = run_ranks(2, learn, words, options, old)
    assert len({*alone["losses"]}) == STEPS
    for rank in ranks:
        assert rank["losses"] == alone["losses"]
        assert rank["weights"].keys() == alone["weights"].keys()
        assert all(np.array_equal(weight, alone["weights"][name]) for name, weight in rank["weights"].items())
        assert all(acted for *_, acted in rank["evidence"]), rank["evidence"]
        assert rank["whole"] == 0
        assert rank["codes"] / 2 <= rank["held"] < 0.52 * rank["codes"]
    seen = [text for technique, _, text, _ in ranks[0]["evidence"] if technique == "quantize"]
    assert any("in the first rows of" in text for text in seen), seen


@pytest.mark.parametrize(
    ("options", "stored"),
    [({}, False), ({"transposes": False}, True)],
    ids=("drawn, compiled", "read, without transposes"),
)
def test_experts_in_fp8_are_divided_by_expert_and_learn_what_the_whole_base_learns(options, stored, tmp_path):
    """Tokens travel to the experts, so sums have another order. Read from files that store each expert apart."""
    from fxtune.facts.options import Switch

    words = ("techniques.checkpointing.enabled=true", "techniques.lora.target_modules=[all-linear]")
    if stored:
        base = on_disk(tmp_path, model=mixture("qwen3_moe", vocab_size=1024, max_position_embeddings=256))
        words = (*words, f"model.path={base}", "model.tokenizer=builtin:tiny", "model.init=pretrained")
    else:
        words = (*words, *COMPILED, "model.path=null", "model.init=random", f"model.architecture={MIXTURE}")
    options = {**options, "experts": Switch.on}
    (alone,) = run_ranks(1, learn, words, options, False)
    for rank in run_ranks(2, learn, words, options, False):
        # Where the last bit of a sum moves an activation to the next code of fp8, the runs drift apart.
        assert rank["losses"][:5] == pytest.approx(alone["losses"][:5], abs=1e-4, rel=0)
        assert rank["losses"] == pytest.approx(alone["losses"], rel=2e-3)
        assert all(acted for *_, acted in rank["evidence"]), rank["evidence"]
        assert rank["whole"] == 0
        assert rank["codes"] / 2 <= rank["held"] < 0.52 * rank["codes"]
    assert any("the experts of 2 layers in fp8" in text for _, _, text, _ in alone["evidence"]), alone["evidence"]


def test_a_base_that_is_not_finite_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    from fxtune.system.files.hub import locate

    folder = tmp_path / "base"
    shutil.copytree(locate("builtin:tiny").folder, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"][40, 3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="hold NaN or infinite numbers"):
        run_ranks(2, learn, (f"model.path={folder}",), {}, False)
