"""How much of an update survives a merge: measured on the written files, and refused below nine tenths."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import lora, on_disk, prepared_model, trained
from torch import nn

from fxtune.errors import StorageError
from fxtune.export.rounding import LEAST, LostUpdateError, Survival
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.models.proof import changed_since
from fxtune.outputs.merge import merge
from fxtune.techniques.quantized_modules import dequantized, quantized

SHAPE = (256, 256)


def share(start: torch.Tensor, update: torch.Tensor, merged: torch.Tensor) -> float:
    survival = Survival()
    survival.add(start, start.float() + update, merged)
    try:
        return survival.share() or 0.0
    except LostUpdateError:
        return 0.0


def adapter_of(base, folder, strength: float):
    """An adapter over `base` whose update is `strength` times that of a trained one."""
    model = ModelConfig(path=str(base), dtype=DType.bfloat16)
    prepared = prepared_model(lora(), model, dtype="bfloat16")
    trained(prepared.module)
    with torch.no_grad():
        for name, parameter in prepared.module.named_parameters():
            if "lora_B" in name:
                parameter.mul_(strength)
    return save_model(prepared, load_tokenizer(model), folder)


def test_a_merge_that_would_lose_the_update_is_refused_and_writes_nothing(tmp_path):
    base = on_disk(tmp_path / "half", dtype=torch.bfloat16)
    strong = merge(adapter_of(base, tmp_path / "strong", 1.0), tmp_path / "merged")
    proof, _ = changed_since(strong)
    assert proof.survives == pytest.approx(1.0, abs=0.01)
    assert "survive the rounding" in (strong / "README.md").read_text()

    weak = adapter_of(base, tmp_path / "weak", 0.001)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StorageError, match=r"bfloat16.*beside its base"):
        merge(weak, tmp_path / "lost")
    assert sorted(tmp_path.iterdir()) == before, "no folder, and no part of one"

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
    assert Survival().share() is None


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
