"""Tiny architectures of the tested model families, and functions that build or save their models, tokenizers and
adapters.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch

from fxtune.distributed.world import World
from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.techniques.facts import Facts
from fxtune.techniques.lora.technique import AdapterInit
from fxtune.techniques.pipeline import Pipeline, make_probe

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
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


def facts_of(model: ModelConfig, **known: Any) -> Facts:
    return Facts.of(CPU, **{"model": load_config(model).to_dict(), "packing": True, "sequence_length": 64, **known})


def built(pipeline: Pipeline, model: ModelConfig, seed: int = 0, **known: Any) -> Any:
    pipeline.check(facts_of(model, **known))
    return pipeline.build(model, load_config(model), CPU, seed)


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
    """The model after two large steps, so that every adapter has moved."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    for _ in range(2):
        model(**make_probe(model)).logits.float().logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def word_tokenizer(words: int = 128, **special: str) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{index}": index for index in range(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), **special)


def on_disk(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a base model and its tokenizer with plain transformers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(load_config(random_model(family, **changes)), dtype=dtype).save_pretrained(folder)
    word_tokenizer(eos_token="t1", unk_token="t0").save_pretrained(folder)
    return folder
