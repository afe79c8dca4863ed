"""run.deterministic=auto: where kernels are deterministic, and the line that says which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.forecasts import LLAMA, TECHNIQUES
from support.forecasts import card as forecast_card

from fxtune.config.compose import load
from fxtune.estimate.machines import machine
from fxtune.settle.determinism import cost
from fxtune.settle.settled import settle

SIZES = ", ".join(f"{key}: {size}" for key, size in LLAMA.items())
WORDS = (
    "model.path=null",
    "model.init=random",
    "model.tokenizer=builtin:tiny",
    "model.dtype=bfloat16",
    f"model.architecture={{{SIZES}, max_position_embeddings: 65536}}",
    "data.sequence_length=4096",
    "techniques=[lora,fast]",
)


def settled(*words: str, card: str = "H100", **known):
    found = settle(load([*WORDS, *words]), machine(card, 128), 1, **known)
    return found, [note for note in found.notes if note.startswith("deterministic:")]


def test_cheap_deterministic_kernels_are_on_by_default():
    found, (line,) = settled()
    assert found.facts.deterministic
    assert "deterministic: on" in line


@pytest.mark.parametrize(
    ("words", "card", "why"),
    [
        (["data.sequence_length=65536"], "H100", "of a step"),
        ([], "A100-80GB", "not measured"),
        (["techniques.attention.backend=cudnn", "data.packing=false", "data.buckets=[4096]"], "H100", "cudnn"),
        (["techniques.compile.mode=max_autotune"], "H100", "max_autotune"),
        (["techniques.precision.cudnn_benchmark=true"], "H100", "algorithms by time"),
    ],
)
def test_what_keeps_them_off_is_said_and_nothing_is_refused(words, card, why):
    found, (line,) = settled(*words, card=card)
    assert not found.facts.deterministic
    assert "deterministic: off" in line
    assert why in line
    with_fastest = settled(*words, "run.deterministic=false", card=card)[0]
    assert found.techniques == with_fastest.techniques


def test_auto_takes_the_next_kernel_that_has_an_order():
    given = replace(machine("H100", 128), packages={"torch": "2.13.0"})
    words = ["model.path=builtin:tiny", "data.packing=false", "data.buckets=[128]", "data.sequence_length=128"]
    words += ["model.dtype=bfloat16", "techniques=[lora,fast]"]
    fast, found = (settle(load([*words, f"run.deterministic={value}"]), given, 1) for value in ("false", "auto"))
    assert fast.techniques.attention.backend == "cudnn"
    assert found.techniques.attention.backend == "sdpa"
    assert found.facts.deterministic


@pytest.mark.parametrize("value", ["true", "false"])
def test_an_explicit_value_is_followed_without_a_line(value):
    found, lines = settled(f"run.deterministic={value}")
    assert found.facts.deterministic == (value == "true")
    assert lines == []


def test_a_cpu_needs_no_decision():
    found, lines = settled("techniques=[lora]", card="cpu")
    assert (found.facts.deterministic, lines) == (False, [])


@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_keeps_the_first_decision(first):
    words = ["data.sequence_length=65536"] if first else []
    found, lines = settled(*words, deterministic=first)
    assert (found.facts.deterministic, lines) == (first, [])


def test_clocks_are_allowed_with_auto():
    settled("train.max_minutes=10")


def of(length: int = 4096, backend: str = "flash4", dtype: str = "bfloat16", **known) -> float | None:
    precision = {"autocast": "none"} if dtype == "float32" else TECHNIQUES["precision"]
    techniques = {**TECHNIQUES, "attention": {"backend": backend}, "precision": precision}
    return cost(forecast_card(139, length, dtype=dtype, techniques=techniques, **known))


def test_longer_rows_cost_more_of_a_step():
    short, long = of(4096), of(65536)
    assert 0 < short < 0.02 < long


def test_kernels_with_one_order_cost_nothing():
    assert of(backend="eager") == of(backend="flex") == 0


def test_a_slower_kernel_in_place_of_cudnn_counts():
    assert of(backend="cudnn") > 3 * of(backend="flash4")


@pytest.mark.parametrize(
    "known",
    [
        {"device_name": "NVIDIA A100-SXM4-80GB"},
        {"length": 131072},
        {"backend": "flash3"},
        {"model": {**LLAMA, "num_attention_heads": 8, "head_dim": 512}},
        {"backend": "sdpa", "dtype": "float32", "length": 65536},
    ],
    ids=["card", "length", "backend", "heads", "dtype"],
)
def test_what_is_not_measured_has_no_cost(known):
    assert of(**known) is None


def test_disabled_attention_runs_sdpa():
    facts = forecast_card(139, 4096)
    off = replace(facts.techniques, attention=replace(facts.techniques.attention, enabled=False))
    assert cost(replace(facts, techniques=off)) == pytest.approx(of(backend="sdpa"))
