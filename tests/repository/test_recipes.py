"""The shipped recipes, and `fxtune recipes`."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.decoder_sizes import decoder_sizes

from fxtune.config import discovery
from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.distributed.parallel import Degrees, decide
from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.models.load import DType
from fxtune.optim.optimizer import state_of
from fxtune.settle.degrees import fits
from fxtune.system.machine.facts import PACKAGES

SHIPPED = sorted(path.stem for path in discovery.shipped("recipes").glob("*.yaml"))
GROUPS = [[f"{group}={option}" for option in options] for group, options in discovery.groups().items()]
TOGETHER = [list(filter(None, options)) for options in itertools.zip_longest(*GROUPS)]
"""Each option of each group once, with one of every other group."""

LLAMA = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8
)
HUB = {  # the keys that techniques read from the configs of the recipes' hub models
    "meta-llama/Meta-Llama-3-8B": ("llama", dict(LLAMA, vocab_size=128256, max_position_embeddings=8192)),
    "meta-llama/Llama-3.1-70B-Instruct": (
        "llama",
        dict(
            **decoder_sizes(8192, 28672, layers=80, heads=64, key_heads=8, vocabulary=128256),
            max_position_embeddings=131072,
        ),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", dict(LLAMA, vocab_size=128256, max_position_embeddings=131072)),
    "Qwen/Qwen3-8B": (
        "qwen3",
        dict(LLAMA, intermediate_size=12288, num_hidden_layers=36, vocab_size=151936, max_position_embeddings=40960),
    ),
    "Qwen/Qwen3-0.6B": (
        "qwen3",
        dict(
            **decoder_sizes(1024, 3072, layers=28, heads=16, key_heads=8, head_dim=128, vocabulary=151936),
            max_position_embeddings=40960,
        ),
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        "qwen2_5_vl",
        dict(
            text_config=dict(
                LLAMA,
                **decoder_sizes(3584, 18944, layers=28, heads=28, key_heads=4, vocabulary=152064),
                max_position_embeddings=128000,
            ),
        ),
    ),
    "Qwen/Qwen3.5-35B-A3B": ("qwen3_5_moe", dict(vision_config=dict(out_hidden_size=2048))),
    "Qwen/Qwen3.5-9B": ("qwen3_5", dict(vision_config=dict(out_hidden_size=4096))),
    "google/gemma-3-1b-it": (
        "gemma3_text",
        dict(
            **decoder_sizes(1152, 6912, layers=26, heads=4, key_heads=1, head_dim=256, vocabulary=262144),
            max_position_embeddings=32768,
            sliding_window=512,
        ),
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        "mistral",
        dict(LLAMA, vocab_size=32768, max_position_embeddings=32768, sliding_window=None),
    ),
    "microsoft/phi-4": (
        "phi3",
        dict(
            **decoder_sizes(5120, 17920, layers=40, heads=40, key_heads=10, vocabulary=100352),
            max_position_embeddings=16384,
            pad_token_id=100349,
            bos_token_id=100257,
            eos_token_id=100257,
        ),
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        "smollm3",
        dict(
            **decoder_sizes(2048, 11008, layers=36, heads=16, key_heads=4, vocabulary=128256),
            max_position_embeddings=65536,
        ),
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        "llama",
        dict(
            **decoder_sizes(576, 1536, layers=30, heads=9, key_heads=3, vocabulary=49152),
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
    ),
    "openai/gpt-oss-20b": ("gpt_oss", dict(num_hidden_layers=24, num_local_experts=32)),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        dict(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            **decoder_sizes(layers=48, heads=32, key_heads=4, head_dim=128),
            num_experts=128,
            num_experts_per_tok=8,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (
        "deepseek_v2",
        dict(
            hidden_size=2048,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            **decoder_sizes(layers=27, heads=16, key_heads=16),
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            vocab_size=102400,
            max_position_embeddings=163840,
        ),
    ),
}


@functools.cache
def composed(name: str) -> Config:
    """The config of a shipped recipe. The tests share it, so do not change it."""
    return load([f"+recipe={name}"])


def header(name: str) -> str:
    lines = discovery.find(name).path.read_text().splitlines()
    return "\n".join(line for line in lines[: lines.index("# @package _global_")])


def hardware(name: str, config: Config) -> Facts:
    """The smallest machine that the recipe's header names, with the recipe's model."""
    from transformers import AutoConfig

    line = re.search(r"# Hardware: (.*)", header(name))
    assert line, f"{name} names no hardware"
    path = config.model.path
    if path.startswith("builtin:"):
        model = AutoConfig.from_pretrained(
            Path(sys.modules["fxtune"].__file__).parent / "assets" / path.removeprefix("builtin:")
        )
    else:
        kind, sizes = HUB[path]
        model = AutoConfig.for_model(kind, **sizes)
    common = dict(
        model=model.to_dict(),
        packing=config.data.packs,
        sequence_length=config.data.sequence_length,
        rows=config.data.row_lengths(),
        micro_batch_size=config.train.micro_batch_size,
        optimizer=state_of(config.optimizer),
        packages={**dict.fromkeys(PACKAGES, "1"), "flash-attn-4": "4.0.0b36"},
    )
    if re.search("GPUs? with", line[1]):
        ranks = 2 if line[1].startswith("two GPUs") else 1
        memory = int(re.search(r"(\d+) GB", line[1])[1]) * 10**9
        host = re.search(r"(\d+) GB of host", line[1])
        older = re.search(r"A100|A10\b|RTX 3090", line[1])
        return Facts(
            device="cuda",
            device_name="NVIDIA",
            capability=(8, 0) if older else (9, 0),
            memory=memory,
            free_memory=memory,
            host_memory=(int(host[1]) if host else 128 * ranks) * 10**9 // ranks,
            degrees=decide(config.parallel, ranks),
            dtype="bfloat16" if config.model.dtype is DType.auto else config.model.dtype.value,
            **common,
        )
    assert "no GPU" in line[1]
    return Facts(cores=2, **common)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_passes_its_checks_on_the_hardware_it_names(name, cwd):
    config = composed(name)
    assert config.run.name == name
    assert config.data.sources
    facts = hardware(name, config)
    techniques, _ = config.techniques.resolved(facts)
    if facts.degrees.ranks > 1:
        assert techniques.memory_need(facts).device <= facts.free_memory
    if facts.degrees.shard > 1:  # that is what several GPUs are for
        assert not fits(config.techniques, facts, Degrees())
    assert "auto" not in {
        str(getattr(value, "value", value))
        for name, technique in techniques.enabled()
        for key, value in vars(technique).items()
    }
    assert f"python -m fxtune +recipe={name}" in header(name)
    assert "# Measured: " in header(name)
    assert 20 < len(discovery.recipes()[name].title) < 110


def test_recipe_without_a_needed_technique_fails_its_checks(cwd):
    config = load(["+recipe=llama_yarn_64k", "techniques.rope.enabled=false"])
    with pytest.raises(ConfigError, match="beyond"):
        config.techniques.resolved(hardware("llama_yarn_64k", config))


@pytest.mark.parametrize("name", SHIPPED)
def test_recipe_sets_only_what_differs_from_its_defaults(name, cwd):
    """Each key of a shipped recipe has another value than without the recipe's own keys."""
    own = OmegaConf.load(discovery.find(name).path)
    (cwd / "recipes").mkdir()
    (cwd / "recipes" / "bare.yaml").write_text(OmegaConf.to_yaml({"defaults": own.get("defaults", [])}))
    bare, complete = load(["+recipe=bare"]), composed(name)
    for section, values in own.items():
        for key in values if section != "defaults" else ():
            before, after = (getattr(getattr(config, section), key) for config in (bare, complete))
            assert before != after, f"{section}.{key} changes nothing"


@pytest.mark.parametrize("options", TOGETHER, ids=" ".join)
def test_options_of_all_groups_compose_with_a_recipe(options, cwd):
    config = load(["+recipe=quickstart", *options, "data.questions.path=null"])  # a reward model answers none
    for group, _, option in (word.partition("=") for word in options):
        first = discovery.groups()[group][option].read_text().splitlines()
        assert any(line.startswith("# ") and "@package" not in line for line in first[:2]), (
            f"the first lines of {group}/{option} do not describe it"
        )
        if group in ("optimizer", "schedule"):
            assert getattr(config, group).name.value == option


def test_hub_models_are_pinned():
    for path in discovery.groups()["model"].values():
        values = OmegaConf.load(path)
        assert (
            values.path is None or values.path.startswith("builtin:") or re.fullmatch(r"[0-9a-f]{40}", values.revision)
        ), path


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_evaluates_on_the_users_own_data(name):
    """Not on rows of the data that the recipe came with."""
    data = load([f"+recipe={name}", "data.sources.0.path=mine.jsonl"]).data
    assert data.eval_sources == []
    assert data.applicable_questions().path is None
    if composed(name).train.eval_every:
        assert data.holds_out
