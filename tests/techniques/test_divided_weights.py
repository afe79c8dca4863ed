"""What cannot be combined with weights that are divided over ranks."""

import pytest
from support.forecasts import LLAMA, card

from fxtune.distributed.parallel import Degrees
from fxtune.errors import ConfigError
from fxtune.techniques import divided_weights

LORA = {"lora": {}}


def sharded(techniques, model=None):
    return card(80, 4096, model=LLAMA | (model or {}), techniques=techniques, degrees=Degrees(shard=2))


@pytest.mark.parametrize(
    ("techniques", "reason"),
    [
        ({**LORA, "quantize": {}}, "Set techniques.quantize.enabled=false, or parallel.shard=1."),
        ({"lora": {"dora": True}}, "Set techniques.lora.dora=false"),
        ({"lora": {"init": "pissa"}}, "pissa computes adapters from whole weights"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "modules_to_save copies whole weights"),
        ({**LORA, "compile": {"scope": "model"}}, "Set techniques.compile.scope=layers"),
    ],
)
def test_techniques_that_need_whole_weights_are_refused_with_a_change(techniques, reason):
    facts = sharded(techniques)
    assert any(reason in found for found in divided_weights.refuses(facts)), list(divided_weights.refuses(facts))
    with pytest.raises(ConfigError, match=r"parallel\.shard=2: "):
        facts.techniques.check(facts)


def test_adapters_over_a_plain_base_are_not_refused():
    assert not list(divided_weights.refuses(sharded({**LORA, "compile": {}, "liger": {}, "checkpointing": {}})))


def test_recorded_passes_are_refused():
    facts = sharded({**LORA, "compile": {"cuda_graphs": "on"}})
    with pytest.raises(ConfigError, match=r"cuda_graphs: ranks gather weights inside a pass \(parallel\.shard\)"):
        facts.techniques.check(facts)
