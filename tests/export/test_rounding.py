"""How much of an update survives a merge: measured on the written files. Below nine tenths the merge is in float32."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import lora, on_disk, prepared_model, trained
from torch import nn
from transformers import AutoModelForCausalLM

from fxtune.export.rounding import LEAST, LostUpdateError, Survival
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.models.proof import changed_since
from fxtune.outputs.merge import merge
from fxtune.techniques.quantized_modules import dequantized, quantized

SHAPE = (256, 256)


def share(start: torch.Tensor, update: torch.Tensor, merged: torch.Tensor) -> float:
    survival = Survival()
    survival.add("weight", start, start.float() + update, merged)
    try:
        return survival.shares().get("survives", 0.0)
    except LostUpdateError:
        return 0.0


def adapter_of(base, folder, strength: float):
    """An adapter over `base` whose update is `strength` times a trained adapter's update."""
    model = ModelConfig(path=str(base), dtype=DType.bfloat16)
    prepared = prepared_model(lora(), model, dtype="bfloat16")
    trained(prepared.module)
    with torch.no_grad():
        for name, parameter in prepared.module.named_parameters():
            if "lora_B" in name:
                parameter.mul_(strength)
    return save_model(prepared, load_tokenizer(model), folder)


def test_a_merge_that_would_lose_the_update_in_16_bits_is_in_float32(tmp_path, capsys):
    base = on_disk(tmp_path / "half", dtype=torch.bfloat16)
    strong = merge(adapter_of(base, tmp_path / "strong", 1.0), tmp_path / "merged")
    proof, _ = changed_since(strong)
    assert proof.survives == pytest.approx(1.0, abs=0.01)
    assert f"(least in {proof.weakest})" in (strong / "README.md").read_text()
    assert json.loads((strong / "config.json").read_text())["dtype"] == "bfloat16"
    assert "float32" not in capsys.readouterr().out

    weak = adapter_of(base, tmp_path / "weak", 0.001)
    kept = merge(weak, tmp_path / "kept")
    said = capsys.readouterr().out
    for way in ("float32", "--to vllm"):
        assert way in said, "the other way is named, too"
    proof, _ = changed_since(kept)
    assert proof.survives == pytest.approx(1.0, abs=1e-3)
    assert json.loads((kept / "config.json").read_text())["dtype"] == "float32"
    assert {tensor.dtype for tensor in load_file(kept / "model.safetensors").values()} == {torch.float32}
    assert "--dtype float32" in (kept / "README.md").read_text(), "vLLM would round it again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "kept", "merged", "strong", "weak"]

    tensors = {name: tensor * 0 for name, tensor in load_file(weak / "adapter_model.safetensors").items()}
    save_file(tensors, weak / "adapter_model.safetensors")
    (weak / "proof.json").unlink()
    proof, _ = changed_since(merge(weak, tmp_path / "nothing"))
    assert proof.survives is None, "an adapter that adds nothing loses nothing"


def test_the_same_small_update_survives_in_float32(tmp_path):
    base = on_disk(tmp_path / "whole", dtype=torch.float32)
    proof, _ = changed_since(merge(adapter_of(base, tmp_path / "weak", 0.001), tmp_path / "merged"))
    assert proof.survives == pytest.approx(1.0, abs=1e-4)


def test_the_share_is_the_projection_on_the_update():
    start, update = torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 1.0])
    assert share(start, update, update) == 1.0
    assert share(start, update, torch.tensor([2.0, 2.0, 0.0, 0.0])) == 1.0, "the mean counts"
    assert share(start, update, torch.tensor([1.0, 1.0, 1.0, 0.8])) == pytest.approx(0.95)
    assert share(start, update, torch.tensor([1.0, 1.0, 1.0, 0.5])) < LEAST
    assert share(start, update, torch.tensor([1.0, 1.0, 1.0, torch.nan]).bfloat16()) < LEAST
    assert not Survival().shares()


def test_a_large_update_of_one_weight_does_not_hide_the_others():
    start, small, large = torch.zeros(4).bfloat16(), torch.full((4,), 1e-3), torch.full((4,), 1e3)
    survival = Survival()
    survival.add("embedding", start, large, large.bfloat16())
    survival.add("linear", start, small, (small * 0.9001).bfloat16())
    assert survival.shares() == {"survives": pytest.approx(1.0, abs=4e-3), "weakest": "linear: 90.0%"}
    survival.add("other", start, small, (small * 0.3).bfloat16())
    with pytest.raises(LostUpdateError):
        survival.shares()
    whole = Survival()
    whole.add("linear", start, small, small * 0.3)
    assert whole.shares()["survives"] == pytest.approx(0.3), "float32 has no wider dtype to go to"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beside", [{"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [3, 46]}])
@pytest.mark.parametrize("strength", [1e-1, 1e-5])
def test_the_linears_are_measured_beside_an_embedding_that_is_trained(tmp_path, beside, strength):
    """A module that is trained in full is copied, so its exact share would hide that the linears lose theirs."""
    base = on_disk(tmp_path / "half", dtype=torch.bfloat16)
    described = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **beside)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), described)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.ones_like(parameter), alpha=strength if "lora_B" in name else 0.1)
    model.save_pretrained(tmp_path / "adapter")
    merged = merge(tmp_path / "adapter", tmp_path / "merged")
    proof, _ = changed_since(merged)
    assert proof.survives > LEAST
    assert "proj" in proof.weakest
    wide = strength < 1e-2
    assert json.loads((merged / "config.json").read_text())["dtype"] == ("float32" if wide else "bfloat16")
    left_out = "embed_tokens" in proof.left_out
    assert left_out == ("trainable_token_indices" in beside), "only the tensor with trained tokens is not compared"


def test_four_bits_lose_an_update_of_their_own_grid_and_keep_one_of_16_bits():
    """Adding to nf4 weights and rounding again loses it. Quantizing the merged 16-bit weights keeps it on average."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weight = torch.randn(SHAPE) * 0.02
    update = torch.randn(SHAPE[0], 8) @ torch.randn(8, SHAPE[1])
    update *= 0.01 * weight.std() / update.std()

    def nf4(values: torch.Tensor) -> torch.Tensor:
        linear = nn.Linear(*SHAPE[::-1], bias=False)
        linear.weight.data = values
        return dequantized(quantized(linear, "nf4", torch.float32, torch.device("cpu"))).float()

    stored = nf4(weight)
    assert share(stored, update, nf4(stored + update)) < LEAST
    both = nf4(weight + update) - stored
    kept = (both * update).sum() / update.square().sum()
    assert kept == pytest.approx(1.0, abs=0.1)
