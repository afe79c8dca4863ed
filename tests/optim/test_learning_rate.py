"""optimizer.lr=auto: the rate by the published rule, what it says, and what it has no rule for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.architectures import enable

from fxtune.facts.run import Facts
from fxtune.optim import config as optimizer_config
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.learning_rate import guess

LLAMA_8B = {"model_type": "llama", "hidden_size": 4096}
QWEN_8B = {"model_type": "qwen3", "hidden_size": 4096}
AUTO = OptimizerConfig(lr="auto")


def facts(model=LLAMA_8B, **lora):
    return Facts(model=model, techniques=enable(lora=lora) if lora else enable())


@pytest.mark.parametrize(
    ("facts", "documents", "rate"),
    [
        (facts(r=16), 16, 2.86e-4),
        (facts(r=16), 128, 2.86e-4),
        (facts(r=128), 16, 2.86e-4),  # with alpha fixed the rank has no influence
        (facts(r=64, alpha=128.0), 16, 7.14e-5),
        (facts(r=16, alpha=16.0, rslora=True), 16, 1.43e-4),  # the strength of alpha = 64
        (facts(), 16, 2.86e-5),
        (facts(r=16), 256, 4.04e-4),
        (facts(r=16), 10_000, 5.71e-4),
        (facts(QWEN_8B, r=16), 16, 4.73e-4),
        (facts({"model_type": "gemma3", "text_config": {**LLAMA_8B, "model_type": "gemma3_text"}}, r=16), 16, 2.86e-4),
    ],
)
def test_rate_follows_the_rule(facts, documents, rate):
    found, text = guess(AUTO, facts, documents)
    assert found == rate
    assert f"optimizer.lr: auto chose {rate:g} = 5e-05 x (2000 / hidden size 4096)^" in text
    assert f"{documents:.3g} documents in a step" in text


def test_line_names_the_adapters_and_the_family_that_is_borrowed_from():
    assert "x 10 for adapters x 32 / alpha 64 x 1 for 8 documents" in guess(AUTO, facts(r=4, alpha=64.0), 8)[1]
    assert "as of llama: phi3 has no fitted exponent" in guess(AUTO, facts({**LLAMA_8B, "model_type": "phi3"}), 8)[1]
    assert "adapters" not in guess(AUTO, facts(), 8)[1]


@pytest.mark.parametrize(
    ("options", "facts", "reason"),
    [
        (dict(name=OptimizerName.lion), facts(), "auto has a rule for AdamW and none for lion"),
        (dict(name=OptimizerName.sgd), facts(), "none for sgd"),
        (dict(), facts({"model_type": "odd"}), "its config has no hidden_size"),
        (dict(), replace(facts(), reads_groups=True), "this objective compares or scores documents"),
        (dict(), facts(init="pissa"), "techniques.lora.init=pissa starts elsewhere"),
    ],
)
def test_auto_without_a_rule_is_refused(options, facts, reason):
    (found,) = optimizer_config.refusals(OptimizerConfig(lr="auto", **options), facts)
    assert reason in found
    assert not list(optimizer_config.refusals(OptimizerConfig(lr=1e-3, **options), facts))
