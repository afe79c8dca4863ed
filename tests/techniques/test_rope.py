"""RoPE scaling: the built model against the papers' formulas, which this file writes again in float64."""

from __future__ import annotations

import hashlib
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.architectures import CPU, FAMILIES, built, facts_of, prepared_model, random_model, tiny_model
from support.cases import pairs

from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.options import RopeType
from fxtune.models.load import ModelConfig, load_config, load_tokenizer
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.rope import Rope

SCALABLE = [family for family in FAMILIES if family != "phi3"]


def scaled(**options) -> Pipeline:
    pipeline = Pipeline()
    pipeline.rope = Rope(enabled=True, **{"factor": 4.0, **options})
    return pipeline


def reasons(family: str = "llama", architecture: dict | None = None, sequence_length: int = 64, **options) -> str:
    facts = facts_of(random_model(family, **(architecture or {})), sequence_length=sequence_length)
    return "\n".join(Rope(enabled=True, **{"factor": 4.0, **options}).check(facts))


def yarn(dim: int, base: float, original: int, factor: float, fast: float = 32.0, slow: float = 1.0) -> list[float]:
    """arXiv 2309.00071, equations 17 to 23, with the rounding of its released code."""
    frequencies = []
    first = math.floor(dim * math.log(original / (fast * 2 * math.pi)) / (2 * math.log(base)))
    last = math.ceil(dim * math.log(original / (slow * 2 * math.pi)) / (2 * math.log(base)))
    first, last = max(first, 0), min(last, dim - 1)
    for pair in range(dim // 2):
        theta = base ** (-2 * pair / dim)
        ramp = min(max((pair - first) / (last - first if last != first else 0.001), 0.0), 1.0)
        frequencies.append((1 - ramp) * theta + ramp * theta / factor)
    return frequencies


def llama3(dim: int, base: float, original: int, factor: float, low: float = 1.0, high: float = 4.0) -> list[float]:
    """`apply_scaling` of Meta's released Llama 3.1 code."""
    frequencies = []
    for pair in range(dim // 2):
        theta = base ** (-2 * pair / dim)
        wavelength = 2 * math.pi / theta
        if wavelength < original / high:
            frequencies.append(theta)
        elif wavelength > original / low:
            frequencies.append(theta / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            frequencies.append((1 - smooth) * theta / factor + smooth * theta)
    return frequencies


def observed(model, prefix: str = "") -> tuple[torch.Tensor, float]:
    rotary = model.model.rotary_emb
    return getattr(rotary, f"{prefix}inv_freq").double(), getattr(rotary, f"{prefix}attention_scaling")


@pytest.mark.parametrize(("original", "factor"), [(64, 4.0), (4096, 16.0), (8192, 8.0)])
def test_yarn_of_the_built_model_equals_the_paper(original, factor):
    model = random_model(
        "llama",
        max_position_embeddings=original,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    yarned = built(scaled(factor=factor), model)
    inv_freq, attention = observed(yarned)
    expected = torch.tensor(yarn(64, 500000.0, original, factor), dtype=torch.float64)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-5, atol=0)
    assert attention == pytest.approx(0.1 * math.log(factor) + 1)
    parameters = yarned.config.rope_parameters
    assert parameters["rope_theta"] == 500000.0
    assert parameters["original_max_position_embeddings"] == original
    assert yarned.config.max_position_embeddings == factor * original


def test_each_yarn_option_changes_the_frequencies():
    model = random_model("llama", max_position_embeddings=4096, head_dim=64)
    inv_freq, attention = observed(
        built(scaled(parameters={"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5}), model)
    )
    expected = torch.tensor(yarn(64, 10000.0, 4096, 4.0, fast=16.0, slow=2.0), dtype=torch.float64)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-5, atol=0)
    assert attention == 1.5
    other, _ = observed(built(scaled(original_max_position_embeddings=2048), model))
    torch.testing.assert_close(
        other, torch.tensor(yarn(64, 10000.0, 2048, 4.0), dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_llama3_and_linear_of_the_built_model_equal_their_formulas():
    model = random_model("llama", max_position_embeddings=8192, head_dim=64)
    inv_freq, attention = observed(
        built(scaled(type=RopeType.llama3, factor=8.0, parameters={"low_freq_factor": 1.5}), model)
    )
    expected = torch.tensor(llama3(64, 10000.0, 8192, 8.0, low=1.5), dtype=torch.float64)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-5, atol=0)
    assert attention == 1.0
    inv_freq, attention = observed(built(scaled(type=RopeType.linear), model))
    expected = torch.tensor([10000.0 ** (-2 * pair / 64) / 4 for pair in range(32)], dtype=torch.float64)
    torch.testing.assert_close(inv_freq, expected, rtol=1e-5, atol=0)


@given(
    dim=st.sampled_from([16, 64, 128]),
    base=st.floats(1e3, 1e7),
    original=st.integers(32, 1 << 17),
    factor=st.floats(1.01, 64),
)
def test_frequencies_equal_the_formulas(dim, base, original, factor):
    rope = Rope(enabled=True, factor=factor)
    for kind, formula in ((RopeType.yarn, yarn), (RopeType.llama3, llama3)):
        rope.type = kind
        reference, _ = rope.frequencies(dim, base, original, original)
        torch.testing.assert_close(
            reference, torch.tensor(formula(dim, base, original, factor), dtype=torch.float64), rtol=1e-9, atol=0
        )
        plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        assert ((reference <= plain * (1 + 1e-12)) & (reference >= plain / factor * (1 - 1e-12))).all(), (
            "between kept and slowed"
        )


@pytest.mark.parametrize(("family", "kind"), pairs(SCALABLE, [RopeType.yarn, RopeType.linear, RopeType.llama3]))
def test_every_family_is_scaled_and_verified(family, kind):
    pipeline = scaled(type=kind)
    prepared = prepared_model(pipeline, random_model(family))
    model = prepared.module
    evidence = list(pipeline.rope.verify(prepared, make_probe(model)))
    assert evidence
    assert all(observation.acted for observation in evidence)


def test_gemma3_keeps_the_frequencies_of_its_sliding_layers():
    plain, long = (built(pipeline, random_model("gemma3")) for pipeline in (Pipeline(), scaled()))
    assert torch.equal(observed(plain, "sliding_attention_")[0], observed(long, "sliding_attention_")[0])
    assert not torch.equal(observed(plain, "full_attention_")[0], observed(long, "full_attention_")[0])


def test_verify_finds_a_scaling_set_after_the_model_was_built():
    """The config says yarn, but the frequencies are the old ones; transformers raises no error."""
    pipeline = scaled()
    prepared = prepared_model(Pipeline(), random_model("llama"))
    model = prepared.module
    pipeline.rope.configure(model.config)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    with pytest.raises(ConfigError, match="Asked for and not done"):
        pipeline.prove(prepared, make_probe(model))


def test_verify_finds_a_wrong_original_length():
    """With a raised max_position_embeddings transformers takes the raised length for the original one, without an error."""
    config = load_config(random_model("llama"))
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    config.max_position_embeddings = 256
    prepared = assemble(Pipeline(), random_model("llama"), config, CPU, 0)
    model = prepared.module
    assert not any(
        observation.acted
        for observation in scaled(original_max_position_embeddings=64).rope.verify(prepared, make_probe(model))
    )


def test_evidence_has_digests_of_the_expected_and_observed_frequencies():
    """The digests are equal exactly if the frequencies agree, however their last bits are rounded."""
    model = random_model("llama", max_position_embeddings=4096, head_dim=64)
    pipeline = scaled()
    long = built(pipeline, model)

    def names() -> tuple[str, str]:
        [seen] = pipeline.rope.verify(PreparedModel(long), make_probe(long))
        return tuple(re.search(r"inv_freq ([0-9a-f]{12})\b", text)[1] for text in (seen.asked, seen.observed))

    expected, seen_digest = names()
    assert expected == seen_digest
    formula = torch.tensor(yarn(64, 10000.0, 4096, 4.0), dtype=torch.float64)
    assert expected == hashlib.sha256(formula.float().numpy().tobytes()).hexdigest()[:12]
    long.model.rotary_emb.inv_freq *= 1 + 3e-7  # as another device might round
    assert names() == (expected, expected)
    long.model.rotary_emb.inv_freq[20] *= 1.001
    assert names()[0] == expected != names()[1]
    other = scaled(factor=8.0)
    [seen] = other.rope.verify(prepared_model(other, model), make_probe(long))
    assert expected not in seen.asked


def test_verify_finds_a_wrong_attention_factor():
    pipeline = scaled()
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    model.model.rotary_emb.attention_scaling = 1.0
    assert not any(observation.acted for observation in pipeline.rope.verify(prepared, make_probe(model)))


def test_dynamic_scaling_follows_the_row_length_and_is_reset():
    pipeline = scaled(type=RopeType.dynamic)
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    assert [observation.acted for observation in pipeline.rope.verify(prepared, make_probe(model))] == [True]
    assert model.config.max_position_embeddings == 64, "else scaling would start later"
    rotary, states = model.model.rotary_emb, torch.zeros(1)

    def frequencies(length: int) -> torch.Tensor:
        rotary(states, torch.arange(length).unsqueeze(0))
        return rotary.inv_freq.clone()

    short, long = frequencies(40), frequencies(200)
    expected = 10000.0 * (4 * 200 / 64 - 3) ** (16 / 14)
    torch.testing.assert_close(long, (expected ** -(torch.arange(0, 16, 2) / 16.0)), rtol=1e-5, atol=0)
    assert not torch.equal(frequencies(100), long), "a row must not depend on the longest earlier row"
    assert torch.equal(frequencies(40), short)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"factor": 1.0}, "factor: 1.0 does not extend the context"),
        ({"factor": 0.5}, "factor: 0.5"),
        (
            {"sequence_length": 257},
            "factor: 4.0 x 64 positions = 256, fewer than data.sequence_length=257. Set it to at least 4.02",
        ),
        ({"original_max_position_embeddings": -1}, "original_max_position_embeddings: -1"),
        ({"type": RopeType.linear, "parameters": {"beta_fast": 8.0}}, "parameters: type=linear has no parameters"),
        ({"parameters": {"low_freq_factor": 2.0}}, "parameters: type=yarn has beta_fast, beta_slow, attention_factor"),
        ({"parameters": {"beta_fast": 1.0}}, "parameters: beta_fast=1.0 must be above"),
        ({"type": RopeType.llama3, "parameters": {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"family": "phi3"}, "any RoPE type in a phi3 config as longrope"),
        ({"family": "gemma3", "type": RopeType.dynamic}, "type: dynamic is not defined"),
        (
            {
                "architecture": {
                    "rope_parameters": {
                        "rope_type": "llama3",
                        "rope_theta": 5e5,
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 32,
                    }
                }
            },
            "original_max_position_embeddings: llama already scales its RoPE (llama3, factor=8.0, original_max_position_embeddings=32)",
        ),
    ],
)
def test_check_refuses_with_what_to_change(options, reason):
    assert reason in reasons(**options)


def test_proportional_rope_is_not_scaled():
    pytest.importorskip("transformers.models.lfm3")
    facts = facts_of(tiny_model("lfm3"), packing=False)
    (reason,) = Rope(enabled=True, factor=4.0, original_max_position_embeddings=64).check(facts)
    assert "proportional" in reason


def test_a_model_without_rope_is_refused():
    model = ModelConfig(
        path=None,
        init=random_model("llama").init,
        architecture={"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    )
    assert "gpt2 has no rotary position embeddings" in "\n".join(Rope(enabled=True, factor=4.0).check(facts_of(model)))
    assert reasons() == ""


def test_a_scaled_model_is_scaled_again_from_the_given_original_length(tmp_path):
    """Llama 3.1 has its own scaling. With the original length given, another scaling replaces it."""
    theirs = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_model("llama", max_position_embeddings=65536, head_dim=64, rope_parameters=theirs)
    pipeline = scaled(factor=16.0, original_max_position_embeddings=8192)
    prepared = prepared_model(pipeline, model)
    again = prepared.module
    assert "low_freq_factor" not in again.config.rope_parameters
    expected = torch.tensor(yarn(64, 5e5, 8192, 16.0), dtype=torch.float64)
    torch.testing.assert_close(observed(again)[0], expected, rtol=1e-5, atol=0)
    pipeline.prove(prepared, make_probe(again))


def test_a_saved_model_carries_its_scaling(tmp_path):
    from support.architectures import on_disk
    from transformers import AutoModelForCausalLM

    model = ModelConfig(path=str(on_disk(tmp_path / "base")))
    prepared = prepared_model(scaled(), model)
    long = prepared.module
    save_model(prepared, load_tokenizer(model), tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(observed(again)[0], observed(long)[0])
    assert again.config.max_position_embeddings == 256
