"""What the data decides after settle(). What the built model decides: tests/techniques/test_withdrawal.py."""

from __future__ import annotations

from dataclasses import replace

from support import image_models

from fxtune.config.compose import load
from fxtune.estimate.machines import machine
from fxtune.settle.settled import settle
from fxtune.settle.stages import Stage


def test_images_that_do_not_fit_change_what_layers_keep():
    """Once the data is read. A resumed run keeps its decisions."""
    architecture = image_models.config("qwen2_5_vl", vocabulary=1024).to_dict()
    architecture["text_config"] |= dict(hidden_size=512, intermediate_size=2048, head_dim=128)
    architecture["vision_config"] |= dict(hidden_size=256, intermediate_size=1024, out_hidden_size=512)
    config = load(
        [
            "model.path=null",
            "model.init=random",
            "model.tokenizer=builtin:tiny",
            "techniques=[lora,fast]",
            "techniques.checkpointing.enabled=true",
            "techniques.checkpointing.policy=auto",
            "data.sequence_length=8192",
            "data.packing=true",
        ]
    )
    config.model.architecture = architecture
    text = settle(config, machine("H200", 128), 1)
    need = text.techniques.memory_need(text.facts).device
    card = replace(machine("H200", 128), free_memory=int(1.03 * need))
    before = settle(config, card, 1)
    after, kept = (Stage.first(before).with_images(8192, decides) for decides in (True, False))
    assert after.techniques.options()["checkpointing"] != before.techniques.options()["checkpointing"]
    assert after.techniques.memory_need(after.facts).device <= card.free_memory
    assert kept.techniques == before.techniques
    assert kept.facts.image_features == 8192
    lines = [[note for note in found.notes if note.startswith("checkpointing:")] for found in (before, after)]
    assert [len(line) for line in lines] == [1, 1]
    assert lines[0] != lines[1]
