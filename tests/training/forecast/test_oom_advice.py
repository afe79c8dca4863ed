"""Advice where memory runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import image_models
from support.architectures import facts_of, random_model

from fxtune.errors import HardwareError
from fxtune.facts.run import Facts
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.config import OptimizerConfig
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.pipeline import Pipeline
from fxtune.training import trainer as train
from fxtune.training.forecast import oom_advice
from fxtune.training.forecast.oom_advice import MemoryPhase


def test_out_of_memory_error_gives_advice(small, cwd, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. See documentation for Memory Management"
        )

    monkeypatch.setattr(LanguageModel, "summed_loss", full)
    with pytest.raises(
        HardwareError, match=r"1 row at once: .*allocate 2\.00 GiB\nWhat would help most.*\n.* GiB less"
    ):
        train.run(small)


ROWS = dict(sequence_length=64, rows=(64,), micro_batch_size=64)


def advice(phase: MemoryPhase, **changes) -> tuple[int, dict[str, int]]:
    """The bytes that the phase needs, and the bytes that each setting saves, in the order of the advice."""
    facts = replace(facts_of(random_model("llama")), **changes)
    techniques, _ = Pipeline().resolved(facts)
    need, found = oom_advice.advice(facts, techniques, OptimizerConfig(), phase)
    return need, {change.setting: change.saved_bytes for change in found}


def test_advice_depends_on_what_the_phase_holds():
    assert "train.micro_batch_size=32" in advice(MemoryPhase.training, **ROWS)[1]
    need, of_weights = advice(MemoryPhase.weights, **ROWS)
    assert not any("micro_batch" in setting for setting in of_weights)
    assert "techniques.lora.enabled=true" in of_weights
    assert of_weights["model.dtype=bfloat16"] == need / 2, "of float32 weights"


def test_the_three_changes_that_save_most_are_named_with_what_each_saves():
    """Each saving is computed here from the forecast of the changed run. Recomputing layers saves less, so it is left
    out, although it is tried earlier than bfloat16."""
    facts = replace(facts_of(random_model("llama")), **ROWS)
    techniques, _ = Pipeline().resolved(facts)
    need = techniques.memory_need(facts).device
    changed = {
        "train.micro_batch_size=32": replace(facts, micro_batch_size=32),
        "data.sequence_length=32": replace(facts, sequence_length=32, rows=(32,)),
        "model.dtype=bfloat16": replace(facts, dtype="bfloat16"),
    }
    saved = {setting: need - techniques.memory_need(facts).device for setting, facts in changed.items()}
    assert advice(MemoryPhase.training, **ROWS)[1] == saved
    recomputing = replace(techniques, checkpointing=Checkpointing(enabled=True))
    assert 0 < need - recomputing.memory_need(facts).device < min(saved.values())


def test_a_trained_tower_can_be_frozen():
    """Where what its layers keep is most of the memory."""
    vision = image_models.config("qwen2_5_vl").to_dict()
    vision["vision_config"] |= dict(depth=40)
    known = dict(device="cpu", sequence_length=64, rows=(64,), micro_batch_size=64, image_features=64)
    for setting, facts, lora in (
        ("techniques.lora.vision=off", Facts(model=vision, **known), dict(enabled=True, vision=True)),
        ("optimizer.lr_vision=null", Facts(model=vision, trains_images=True, **known), dict(enabled=False)),
    ):
        techniques = Pipeline(lora=Lora(**lora)).decided(facts)[0]
        need, changes = oom_advice.advice(facts, techniques, OptimizerConfig(), MemoryPhase.training)
        saved = {change.setting: change.saved_bytes for change in changes}
        assert 0.5 * need < saved[setting] < need


def test_text_without_changes_names_general_remedies():
    assert "shorter rows" in oom_advice.to_text(1, [], MemoryPhase.training, 1, 8)
