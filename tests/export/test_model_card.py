"""The model card: what made the model, and code and commands that work."""

from __future__ import annotations

import torch
from support.architectures import (
    SIZES,
    built,
    facts_of,
    logits,
    lora,
    prepared_model,
    trained,
)

from fxtune.export.save import save_model
from fxtune.models.load import ModelConfig, load_tokenizer


def test_card_names_origin_and_its_loading_code_runs(base, tmp_path):
    model = ModelConfig(path=str(base))
    pipeline = lora()
    pipeline.rope.enabled, pipeline.rope.factor = True, 2.0
    adapter = save_model(
        trained(prepared_model(pipeline, model)),
        load_tokenizer(model),
        tmp_path / "adapter",
        card={
            "config": {
                "run": {"name": "mine", "seed": 7},
                "data": {"chat_template_kwargs": {"enable_thinking": False}},
            },
            "data": "abc123",
            "figures": {"eval/loss": 0.5},
            "machine": facts_of(model),
        },
    )
    card = (adapter / "README.md").read_text()
    for part in (
        "library_name: peft",
        str(base),
        "| run | mine |",
        "apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)",
        "| seed | 7 |",
        "abc123",
        "| eval/loss | 0.5 |",
        "| transformers |",
    ):
        assert part in card
    assert "base_model:" not in card, "a local path is not a hub id"
    code = card.split("```python\n")[1].split("```")[0].replace('folder = "."', f"folder = {str(adapter)!r}")
    names: dict = {}
    exec(code, names)  # the card's own lines, as a reader would run them
    assert torch.equal(
        logits(names["model"]), logits(built(pipeline, ModelConfig(path=str(base), adapter=str(adapter))))
    )
    assert names["model"].config.max_position_embeddings == 2 * SIZES["max_position_embeddings"]
