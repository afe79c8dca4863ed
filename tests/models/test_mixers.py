"""Parameters of recurrent layers keep the precision of their checkpoint."""

from __future__ import annotations

import os

import pytest
import torch
from support.harness import command, run, user_environment
from support.hybrids import hybrid, precise
from transformers import CONFIG_MAPPING

from fxtune.distributed.world import World
from fxtune.models import load as models
from fxtune.models.load import DType, Init, ModelConfig
from fxtune.models.mixers import mixers
from fxtune.techniques.attention import recurrent

FAMILIES = ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "nemotron_h", "falcon_h1"]
FAMILIES += ["granitemoehybrid", "bamba", "zamba2", "mamba2", "mamba", "falcon_mamba", "jamba"]
FAMILIES = [family for family in FAMILIES if family in CONFIG_MAPPING]  # transformers 5.17 has no bailing_hybrid


def load(folder, **options):
    model = ModelConfig(str(folder), tokenizer="builtin:tiny", dtype=DType.bfloat16, **options)
    return models.build(model, models.load_config(model), World(torch.device("cpu")), seed=0).module


@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_beside_bfloat16_stays_float32_and_layers_compute_in_bfloat16(kind, tmp_path):
    stored = precise(hybrid(kind, tmp_path / "base"))
    model = load(tmp_path / "base")
    model.save_pretrained(tmp_path / "copy")
    copied = precise(tmp_path / "copy")
    assert stored
    assert all(torch.equal(copied[name], wanted) for name, wanted in stored.items())
    held = {name: weight for name, weight in model.named_parameters() if weight.dtype is torch.float32}
    outputs = []
    for mixer in mixers(model):
        mixer.register_forward_hook(lambda *given: outputs.append(given[2]))
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(3, 20)[None], use_cache=False)
    recurrent.separate(model, packed=False)
    model.train()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits.float().sum().backward()
    found = [output[0] if isinstance(output, tuple) else output for output in outputs]
    assert {output.dtype for output in found} == {torch.bfloat16}
    learned = [name for name, weight in held.items() if weight.grad is not None]
    assert learned
    assert all(held[name].grad.dtype is torch.float32 for name in learned)


def test_drawn_states_are_float32(tmp_path):
    hybrid("qwen3_5_text", tmp_path)
    model = load(tmp_path, init=Init.random)
    dtypes = {name.rpartition("linear_attn.")[2]: weight.dtype for name, weight in model.named_parameters()}
    assert dtypes["A_log"] is dtypes["norm.weight"] is torch.float32
    assert dtypes["in_proj_qkv.weight"] is dtypes["conv1d.weight"] is torch.bfloat16


FLA = """
def chunk_gated_delta_rule(q, **given):
    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
"""


def test_a_model_on_a_cpu_runs_where_fla_core_is_installed(tmp_path):
    """transformers hands tensors of any device to the package."""
    package = tmp_path / "path" / "fla" / "ops" / "gated_delta_rule"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text(FLA if folder == package else "")
    hybrid("qwen3_5_text", tmp_path / "base")
    keys = ["model.path=base", "model.init=pretrained", "model.architecture={}", "model.tokenizer=builtin:tiny"]
    keys += ["train.max_steps=1", "train.epochs=null", "run.device=cpu"]
    path = os.pathsep.join([str(tmp_path / "path"), user_environment()["PYTHONPATH"]])
    for words in (command(tmp_path, *keys), ["merge", "run"]):
        done = run(words, tmp_path, PYTHONPATH=path)
        assert done.code == 0, done.text
