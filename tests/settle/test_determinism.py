"""run.deterministic=auto: where kernels are deterministic, and the line that says which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.forecasts import LLAMA

from fxtune.config.compose import load
from fxtune.settle.settled import settle
from fxtune.techniques.estimate.machines import machine

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
