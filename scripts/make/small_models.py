"""Small models of any causal type of transformers, for scripts/make/model_table.py: shrunk from the type's own default
config, so that what differs between its layers still differs.

    layers      as many as show each kind of layer: the decoder of the default config is built on the meta device, and
                its layers are compared by their modules, the dimensions of their tensors and their flags. Where layers
                can share keys and values, two layers of each kind are kept, and the last ones share
    sizes       by the names of keys (SIZES), no two alike where the model's code allows it; lists stay lists, and the
                vocabulary is no multiple of 64
    weights     random, with noise on what starts as a constant (norms, biases, a padding row), and saved by
                save_pretrained, so that tensors which a family's files name otherwise are renamed
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, first_line
from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.models.structure import decoder_layers, skeleton
from fxtune.models.weights import draw

VOCABULARY = 1091
"""Tokens: more than the 1,024 of the built-in tokenizer."""
MOST_LAYERS = 12
WIDTHS = re.compile(
    r"(hidden_size|hidden_size_global|hidden_dim|d_model|n_embd|dim|emb_dim|embedding_dim|embedding_size|attention_hidden_size|lru_width|"
    r"(in|out)put_embedding_size|word_embed_proj_dim|backbone_hidden_size|adapter_in_dim|adapter_input_size|dim_model_base)$"
)
SIZES: dict[str, int] = {
    r"_?(num_)?(hidden_|encoder_|decoder_)?(layers|blocks)$|n_layers?$|num_layers_per_stack$": 2,
    r"shared_expert_intermediate_size$|shared_intermediate_size$": 48,
    r"moe_intermediate_size$|expert_(intermediate|ffn_hidden)_size$": 40,
    r"intermediate_size_mlp$|dense_intermediate_size$": 136,
    r"intermediate_size$|ffn_dim$|n_inner$|(ffn_hidden|feed_forward|intermediate_multiple)_size$|d?ff$|d_inner$": 112,
    r"(num_key_value_heads|num_kv_heads|linear_num_key_heads|num_query_groups|num_global_key_value_heads)$": 2,
    r"((num|n|attention|conf|mamba|linear|index)_(attention_|value_|kv_)?heads?|num_heads|_heads|n_head)$": 4,
    r"qk_rope_head_dim$": 8,
    r"global_head_dim$": 48,
    r"linear_value_head_dim$|v_head_dim$": 12,
    r"qk_nope_head_dim$|linear_key_head_dim$|index_head_dim$": 16,
    r"(head_dim|d_head|kv_channels|head_size|dim_head|headdim|_head_dim|hidden_size_per_head)$": 24,
    r"index_topk$": 64,
    r"(n_group|num_expert_group)$": 4,
    r"topk_group$": 2,
    r"(experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts)$": 2,
    r"num_(local_|routed_)?experts$|n_routed_experts$|moe_num_experts$": 6,
    r"kv_lora_rank$": 20,
    r"lora_rank$": 24,
    r"state_size$|d_state$": 20,
    r"rotary_dim$": 12,
    r"(mamba_)?n_?groups$|o_groups$": 2,
    r"hidden_size_per_layer_input$": 16,
    r"laurel_rank$": 8,
}
"""A size by the name of its key in a config; the first pattern counts. Zero stays zero."""
PLAIN = {
    **{
        pattern: 16
        for pattern in SIZES
        if "head_dim" in pattern and pattern not in (r"qk_rope_head_dim$", r"global_head_dim$")
    },
    r"num_(local_|routed_)?experts$|n_routed_experts$|moe_num_experts$": 4,
    r"state_size$|d_state$": 16,
    r"lora_rank$": 16,
    r"kv_lora_rank$": 16,
    r"intermediate_size$|ffn_dim$|n_inner$|(ffn_hidden|feed_forward|intermediate_multiple)_size$|d?ff$|d_inner$": 96,
    r"rotary_dim$": 8,
}
"""The same sizes for models whose code wants heads that add up to the hidden size, or powers of two."""
LIMITS = {
    r"original_max_position_embeddings$": 64,
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length)$": 512,
    r"(sliding_window|sliding_window_size|window_size|attention_chunk_size)$": 32,
}
"""The largest allowed size, by the name of its key. Rows have 64 tokens."""
M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}, "head_dim": 16}
E2B = {
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "num_key_value_heads": 1,
}
PERIODS = (["sliding_attention"] * 4 + ["full_attention"]) * 2
OWN: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": M_ROPE,
    "qwen2_5_vl_text": M_ROPE,
    "qwen3_vl_text": M_ROPE,
    "qwen3_vl_moe_text": M_ROPE,
    "gemma3": {"mm_tokens_per_image": 4},
    "idefics3_vision": {"patch_size": 28},
    "smolvlm_vision": {"patch_size": 28},
    "qwen2_5_vl_vision": {"out_hidden_size": 64},
    "qwen3_vl_vision": {"out_hidden_size": 64},
    "qwen3_vl_moe_vision": {"out_hidden_size": 64},
    "qwen3_5_vision": {"out_hidden_size": 64},
    "qwen3_5_moe_vision": {"out_hidden_size": 64},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1], "num_hidden_layers": 3},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "cohere2_moe": {"num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3], "num_shared_experts": 1},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "dory": {"num_hidden_layers": 12, "n_input_layers": 4, "n_recurrent_layers": 4, "n_output_layers": 4,
             "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 3},
    "deepseek_v4": {"num_hidden_layers": 5, "head_dim": 32, "num_key_value_heads": 1, "o_lora_rank": 20, "index_topk": 64,
                    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}},
    "dots1": {"num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 6, "n_shared_experts": 2,
              "num_experts_per_tok": 2},
    "dots3_note": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 1, "lm_head_multiplier": 0.04,
                  "embedding_multiplier": 5.6, "key_multiplier": 0.39, "ssm_in_multiplier": 1.25},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4, "layer_types": PERIODS, "intermediate_size": [112] * 10,
                     "vocab_size_per_layer_input": 1064, "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6},
    "gemma4_text": {**E2B, "num_hidden_layers": 10, "layer_types": PERIODS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_oss": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 4.0, "original_max_position_embeddings": 64,
                                    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
                         "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 24},
    "hunyuan_v1_moe": {"head_dim": 24, "num_experts": 6, "moe_topk": [2, 2], "num_hidden_layers": 2},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [2], "block_multiple_of": 16},
    "lfm2_moe": {"num_hidden_layers": 4, "num_dense_layers": 2, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4_text": {"head_dim": 24, "num_experts_per_tok": 1, "floor_scale": 16},
    "longcat_flash": {"zero_expert_num": 2, "qk_head_dim": 24, "head_dim": 8},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2,
                           "index_block_size": 16, "index_topk_blocks": 2},
    "ministral": {"head_dim": 24, "num_hidden_layers": 4, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
    "mimo_v2_flash": {"v_head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 24},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 16},
    "phimoe": {"router_jitter_noise": 0.01, "input_jitter_noise": 0.01, "lm_head_bias": True},
    "qwen2": {"num_hidden_layers": 3, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 32},
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"n_mamba_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""Keys that are not sizes, that depend on several, or that defaults have otherwise than the models of the family."""


def small(kind: str) -> dict[str, Any]:
    """A small `model.architecture` of this model type. Raises ConfigError if its config class refuses its own defaults,
    or the small ones."""
    try:
        config = transformers.CONFIG_MAPPING[kind]()
    except (ValueError, StrictDataclassError) as error:
        raise ConfigError(f"its config class refuses its own defaults: {first_line(error)}") from error
    values, depth = config.to_dict(), _depth(config)
    tried = [{"model_type": kind, **_small(values, kind, sizes, depth)} for sizes in (SIZES, {**SIZES, **PLAIN})]
    return next((one for one in tried if _runs(one)), tried[-1])


def kinds_of_layers(config: Any) -> list[Any]:
    """For each layer of a decoder, what it is, without its sizes: its modules, their flags, which tensors they have, and
    what lists of the config say of it. Equal for layers that are alike."""
    text = config.get_text_config()
    model: Any = skeleton(config.to_dict())
    layers = decoder_layers(model) if model is not None else []
    lists = [value for value in text.to_dict().values() if isinstance(value, list) and len(value) == len(layers)]
    lists = [value for value in lists if len(set(map(str, value))) < len(value)]  # not the numbers of layers
    return [(_kind(layer), *(str(value[index]) for value in lists)) for index, layer in enumerate(layers)]


def _kind(layer: torch.nn.Module) -> tuple[Any, ...]:
    shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    flags = [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (str, bool, type(None))) and not name.startswith("_") and name != "training"
    ]
    kinds = tuple((path, type(module).__name__) for path, module in layer.named_modules())
    return kinds, tuple(sorted(shapes.items())), tuple(map(str, flags))


def _depth(config: Any) -> int:
    """The number of first layers among which is each kind of layer of this config."""
    try:
        kinds = kinds_of_layers(config)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, ConfigError):
        return 2  # its default sizes do not fit each other
    return min(max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]), MOST_LAYERS)


def _small(values: dict[str, Any], kind: str, sizes: dict[str, int], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own = OWN.get(kind, {})
    count = next((values[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if values.get(key)), 0)
    for key, value in values.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "per_layer_config":
            inner = str(value.get("model_type") or "")
            given = {"model_type": inner} if inner else {}
            of_text = key in ("text_config", "decoder_config", "thinker_config")
            found[key] = {**given, **_small(value, inner, sizes, depth if of_text else 2)}
        elif key == "per_layer_config":
            kept = {int(layer): own for layer, own in (value or {}).items() if int(layer) < depth}
            found[key] = {
                layer: {name: _size(name, one, values, sizes) for name, one in own.items()}
                for layer, own in kept.items()
            }
        elif isinstance(value, list) and len(value) == count > 2:
            found[key] = [_size(key, one, values, sizes) for one in value[:depth]]
        else:
            size = _size(key, value, values, sizes)
            if re.search(next(iter(SIZES)), key) and value == count:
                size = depth
            if size != value:
                found[key] = size
    if "per_layer_config" in found and "global_head_dim" not in values:
        found["per_layer_config"] = {
            layer: {**own, **({"head_dim": 48} if "head_dim" in own else {})}
            for layer, own in found["per_layer_config"].items()
        }
    if "num_hidden_layers" in own:  # what differs between layers follows from these keys
        lists = [key for key, value in values.items() if isinstance(value, list) and len(value) == count > 2]
        found = {key: value for key, value in found.items() if key not in (*lists, "per_layer_config")}
        found |= {"global_head_dim": 48} if "per_layer_config" in values else {}
    return {**found, **own}


def _size(key: str, value: Any, values: dict[str, Any], sizes: dict[str, int]) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key.endswith("vocab_size"):
        return VOCABULARY if key == "vocab_size" else min(value, VOCABULARY)
    if key == "vocab_size_per_layer_input":
        return min(value, VOCABULARY)
    if key.endswith(("_token_id", "_token_index")):
        return value if value < 1000 else 3
    if WIDTHS.match(key):
        return 64
    if values.get("kv_lora_rank") and key == "num_key_value_heads":
        return 4
    if key == "head_dim" and value == values.get("qk_rope_head_dim"):
        return _size("qk_rope_head_dim", value, {}, sizes)
    for pattern, limit in LIMITS.items():
        if re.search(pattern, key):
            return min(value, limit)
    size = next((size for pattern, size in sizes.items() if value > 0 and re.search(pattern, key)), value)
    if re.search("experts$", key) and max(values.get("n_group") or 1, values.get("num_expert_group") or 1) > 1:
        return max(size, 8)  # two for each group
    # One key's head for all query heads, one group and one expert a token stay so.
    return min(size, value) if re.search("experts_per|topk|top_k|_k$|key_value_heads|kv_heads|group", key) else size


def _runs(architecture: dict[str, Any]) -> bool:
    """Whether a model of this config gives finite gradients for a row of tokens in plain transformers."""
    try:
        model = random_model(architecture).train()
        ids = torch.arange(3, 67)[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except Exception:  # noqa: BLE001  sizes that do not fit each other fail anywhere
        return False
    return all(weight.grad is None or bool(weight.grad.isfinite().all()) for weight in model.parameters())


def random_model(architecture: dict[str, Any]) -> Any:
    """The model of this config with random float32 weights, none of them a constant."""
    config = load_config(ModelConfig(path=None, init=Init.random, architecture=architecture))
    model: Any = draw(config, torch.float32, World(torch.device("cpu")), seed=0, code=False)
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_floating_point() or tensor.numel() < 2:
                continue
            rows = tensor if tensor.dim() == 2 else tensor.reshape(1, -1)
            constant = (rows == rows[:, :1]).all(-1, keepdim=True)
            rows.add_(torch.randn_like(rows) * 0.05 * constant)
        for module in model.modules():
            if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
                # Gemma's attention has no scale but this norm's. As drawn, each layer would amplify roundings.
                module.q_norm.weight.mul_(module.head_dim**-0.5)
    return model


def write(architecture: dict[str, Any], folder: Path) -> None:
    """Save a random model of this config to `folder`."""
    random_model(architecture).save_pretrained(folder)
    # A model whose text alone is trained keeps its own type.
    load_config(ModelConfig(path=None, init=Init.random, architecture=architecture)).save_pretrained(folder)
