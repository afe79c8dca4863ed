"""Tiny architectures of the tested model families, and functions that build or save their models, tokenizers and
adapters.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from support.decoder_sizes import decoder_sizes

from fxtune.distributed.world import World
from fxtune.facts.options import AdapterInit
from fxtune.facts.run import Facts
from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline, make_probe

SIZES = {
    **decoder_sizes(64, 96, layers=2, heads=4, key_heads=2, vocabulary=128),
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": None},
    "mistral_sliding": {"model_type": "mistral", **SIZES, "sliding_window": 4},
    "gemma": {"model_type": "gemma", **SIZES, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **SIZES, "head_dim": 16, "sliding_window": 4},
    "gemma3": {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi": {"model_type": "phi", **SIZES},
    "phi3": {"model_type": "phi3", **SIZES},
}


def _sized(**changes: Any) -> dict[str, Any]:
    """SIZES as a decoder of Llama's kind names them. `changes`: other keys; None leaves one out."""
    sizes = {**SIZES, "bos_token_id": 1, "eos_token_id": 1, **changes}
    return {key: value for key, value in sizes.items() if value is not None}


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXED_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_VISION = {"hidden_size": 32, "image_size": 56, "patch_size": 14}
_MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16, "expand": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # dense decoders
    "cohere2": _sized(**_MIXED_WINDOW, tie_word_embeddings=True),
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
    "gemma2": _sized(head_dim=16, query_pre_attn_scalar=16, **_MIXED_WINDOW),
    "gemma3_text": _sized(head_dim=16, query_pre_attn_scalar=16, **_MIXED_WINDOW),
    "glm4": _sized(head_dim=16),
    "gemma3n_text": _sized(
        head_dim=16,
        intermediate_size=[96] * 2,
        activation_sparsity_pattern=[0.0] * 2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=0,
        laurel_rank=8,
        **_MIXED_WINDOW,
    ),
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128},
    "gpt_neox": _sized(num_key_value_heads=None),
    "granite": _sized(),
    "lfm3": _sized(
        head_dim=16, num_hidden_layers=3, sliding_window=8, layer_types=["conv", "full_attention", "sliding_attention"]
    ),
    "llama": _sized(),
    "mistral": _sized(sliding_window=None),
    "olmo2": _sized(),
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "vocab_size": 128,
        "word_embed_proj_dim": 64,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "phi3": _sized(),
    "qwen2": _sized(),
    "qwen3": _sized(head_dim=16),
    "smollm3": _sized(),
    # mixtures of experts
    "deepseek_v3": _sized(
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "gpt_oss": _sized(head_dim=16, num_local_experts=4, num_experts_per_tok=2, **_MIXED_WINDOW),
    "llama4_text": _sized(
        head_dim=16,
        intermediate_size_mlp=96,
        intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
    ),
    "mixtral": _sized(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _sized(head_dim=16, num_experts=4, **_EXPERTS),
    # text and images
    "gemma3": {
        "text_config": _sized(head_dim=16, query_pre_attn_scalar=16, **_MIXED_WINDOW),
        "vision_config": {**_VISION, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48},
        "mm_tokens_per_image": 4,
        "image_token_index": 126,
        "boi_token_index": 125,
        "eoi_token_index": 127,
    },
    # recurrent layers, alone or beside attention
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "vocab_size": 128},
    "mamba2": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, **_MAMBA2},
    "qwen3_next": _sized(
        num_hidden_layers=4,
        head_dim=16,
        num_experts=4,
        **_EXPERTS,
        shared_expert_intermediate_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    ),
}
"""Keys of a tiny config, random weights meant, for each model type."""


def architecture(kind: str, **changes: Any) -> dict[str, Any]:
    """The tiny config of this model type as model.architecture takes it, with `changes`."""
    return {"model_type": kind, **ARCHITECTURES[kind], **changes}


def written(value: Any) -> str:
    """A value as Hydra reads it on a command line: written({"a": [1, None]}) is "{a:[1,null]}"."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "gaussian": {"init": AdapterInit.gaussian},
    "pissa": {"init": AdapterInit.pissa},
    "olora": {"init": AdapterInit.olora},
    "dropout": {"dropout": 0.1},
    "head": {"modules_to_save": ["lm_head"]},
    "norm": {"modules_to_save": ["norm"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}
CPU = World(torch.device("cpu"))


def random_model(family: str, **changes: Any) -> ModelConfig:
    """The config of a model with random weights. `changes` are keys of its architecture."""
    return ModelConfig(path=None, init=Init.random, architecture={**FAMILIES[family], **changes})


def tiny_model(kind: str) -> ModelConfig:
    """The config of a model with random weights, of a model type in ARCHITECTURES."""
    return ModelConfig(path=None, init=Init.random, architecture=architecture(kind))


def facts_of(model: ModelConfig, **known: Any) -> Facts:
    return Facts.of(
        CPU.facts(), **{"model": load_config(model).to_dict(), "packing": True, "sequence_length": 64, **known}
    )


def prepared_model(pipeline: Pipeline, model: ModelConfig, seed: int = 0, **known: Any) -> PreparedModel:
    pipeline.check(facts_of(model, **known))
    return assemble(pipeline, model, load_config(model), CPU, seed)


def built(pipeline: Pipeline, model: ModelConfig, seed: int = 0, **known: Any) -> Any:
    """The module of prepared_model()."""
    return prepared_model(pipeline, model, seed, **known).module


def lora(r: int = 4, **options: Any) -> Pipeline:
    pipeline = Pipeline()
    pipeline.lora.enabled, pipeline.lora.r = True, r
    for name, value in options.items():
        setattr(pipeline.lora, name, value)
    return pipeline


def enable(**options: dict[str, Any]) -> Pipeline:
    """A pipeline with these techniques enabled and these options: enable(lora={"fused": "on"}, compile={})."""
    pipeline = Pipeline()
    for name, given in options.items():
        technique = getattr(pipeline, name)
        technique.enabled = True
        for key, value in given.items():
            kind = type(getattr(technique, key))
            setattr(technique, key, kind(value) if issubclass(kind, Enum) else value)
    return pipeline


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(**make_probe(model)).logits.float()


def trained(model: Any) -> Any:
    """The model, a module or a PreparedModel, after two large steps, so that every adapter has moved."""
    module = model.module if isinstance(model, PreparedModel) else model
    optimizer = torch.optim.AdamW([parameter for parameter in module.parameters() if parameter.requires_grad], lr=1e-2)
    for _ in range(2):
        module(**make_probe(module)).logits.float().logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def word_tokenizer(words: int = 128, **special: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{index}": index for index in range(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), **special)


def on_disk(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    model: ModelConfig | None = None,
    **changes: Any,
) -> Path:
    """Save a base model and its tokenizer with plain transformers. `model`: in place of a family and changes."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = load_config(model or random_model(family, **changes))
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    word_tokenizer(eos_token="t1", unk_token="t0").save_pretrained(folder)
    return folder
