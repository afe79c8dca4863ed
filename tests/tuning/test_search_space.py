"""The axes of `fxtune tune`, and what is known of a candidate before a trial. No GPU is needed or touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support.tuning import LLAMA, h200, tiny_config, tiny_context

from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.facts.options import Switch
from fxtune.facts.run import Facts
from fxtune.tuning import search_space
from fxtune.tuning.search import Search
from fxtune.tuning.search_space import AXES, Candidate, SearchContext, apply_deltas, candidate
from fxtune.tuning.trial import TrialCache

FAST = [*LLAMA, "techniques=[lora,fast]"]


def planned(config: Config, context: SearchContext, *axes: str) -> list[Candidate]:
    search = Search(config, [], context, list(axes or AXES), 60.0, 5, TrialCache(Path("none")), print)
    return [one for _, one in search.planned()]


@pytest.fixture
def with_compiler(monkeypatch):
    """The machine has a C++ compiler, and no layer is built to look at its modules."""
    from fxtune.techniques.compile import technique as compiling

    monkeypatch.setattr(compiling, "_missing_compiler", lambda facts: iter(()))
    monkeypatch.setattr("fxtune.techniques.checkpointing.technique.layer_of", lambda config: None)
    monkeypatch.setattr(search_space, "skeleton", lambda config: None)


@pytest.mark.slow
@pytest.mark.usefixtures("with_compiler")
def test_planning_for_a_gpu_does_not_touch_the_gpu(monkeypatch):
    import transformers.models.llama.modeling_llama  # noqa: F401  before, because torchao, which it imports, asks torch.cuda

    for name in ("is_available", "current_device", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("the GPU belongs to the trials"))
    titles = [candidate.title for candidate in planned(*h200(FAST))]
    for part in (
        *("attention.backend=sdpa", "compile.enabled=false", "compile.mode=max_autotune", "liger.enabled=false"),
        *("checkpointing.policy=selective", "checkpointing.policy=full", "micro_batch_size=8", "micro_batch_size=2"),
        *("num_workers=0", "num_workers=8"),
    ):
        assert any(part in title for title in titles), (part, titles)
    assert (
        len({json.dumps(candidate.identity, sort_keys=True, default=str) for candidate in planned(*h200(LLAMA))}) > 10
    )


@pytest.mark.slow
@pytest.mark.usefixtures("with_compiler")
def test_a_candidate_beyond_the_memory_forecast_is_left_out():
    verdicts = {candidate.title: candidate.verdict for candidate in planned(*h200(FAST, gib=24.0))}
    assert re.search(r"left out: forecast \d+\.\d GiB, 24\.0 GiB free", verdicts["micro_batch_size=32"])
    keep_all = [*FAST, "techniques.checkpointing.policy=none"]
    small, large = (planned(*h200(keep_all, gib=gib)) for gib in (48.0, 139.0))
    assert sum("left out" in candidate.verdict for candidate in small) > sum(
        "left out" in candidate.verdict for candidate in large
    )


@pytest.mark.usefixtures("with_compiler")
def test_a_setting_that_needs_more_memory_is_tried_with_fewer_rows():
    config, context = h200([*FAST, "techniques.checkpointing.policy=full"], gib=64.0)
    keep_all = {"techniques.checkpointing.enabled": True, "techniques.checkpointing.policy": "none"}
    assert not candidate(config, keep_all, context).fits
    smaller = search_space.shrink_to_fit(config, keep_all, context)
    assert 1 <= smaller["train.micro_batch_size"] < 4
    assert candidate(config, smaller, context).fits


def test_auto_and_what_it_resolves_to_are_the_same_setting(cwd):
    config, context = tiny_config(), tiny_context()
    resolved = {
        "techniques.attention.backend": "sdpa",
        "loader.num_workers": 0,
        "techniques.checkpointing.enabled": True,
        "techniques.checkpointing.policy": "none",
    }
    identity = candidate(config, {}, context).identity
    assert candidate(config, resolved, context).identity == identity
    assert candidate(config, {"train.micro_batch_size": 2}, context).identity != identity


def test_micro_batches_divide_the_global_batch_and_at_least_double():
    config = load(["+recipe=quickstart", "train.micro_batch_size=6", "train.global_batch_size=48"])
    steps = search_space.micro_batch(config, SearchContext(Facts(), "float32"))
    assert [step["train.micro_batch_size"] for step in steps] == [12, 24, 48, 3, 1]


def test_deltas_make_a_copy_with_typed_values():
    config = tiny_config()
    changed = apply_deltas(config, {"techniques.lora.fused": "off", "techniques.checkpointing.save": ["attention"]})
    assert changed.techniques.lora.fused is Switch.off
    assert changed.techniques.checkpointing.save == ["attention"]
    assert config.techniques.checkpointing.save != ["attention"]
    deltas = {"techniques.lora.fused": "off", "loader.num_workers": config.loader.num_workers}
    assert search_space.changed_keys(changed, deltas) == {}
    title = Candidate({"techniques.liger.rope": "off", "a.b": [1, True, None]}, {}).title
    assert title == "liger.rope='off', b=[1,true,null]"
