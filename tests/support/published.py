"""Small configs of model types in the shapes that are published, where a default config lacks what differs between their
layers: heads and windows a layer, dense and sparse MLPs, shared keys, tied heads. scripts/make/small_models.py shrinks the
defaults of all other types.
"""

from __future__ import annotations

from typing import Any

from support.decoder_sizes import decoder_sizes

_SIZES = dict(
    **decoder_sizes(vocabulary=1091, hidden=64, intermediate=112, heads=4, key_heads=2),
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
MLA = dict(kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    original_max_position_embeddings=64,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def _of(kind: str, **own: Any) -> dict[str, Any]:
    """None leaves one of the common sizes out."""
    sizes = {name: size for name, size in _SIZES.items() if own.get(name, 0) is not None}
    return {"model_type": kind, **sizes, **{name: value for name, value in own.items() if name not in _SIZES or value}}


def yarn(**more: Any) -> dict[str, Any]:
    given = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
    return {**given, "beta_fast": 32.0, "beta_slow": 1.0, **more}


GEMMA4 = dict(
    num_hidden_layers=6,
    head_dim=24,
    global_head_dim=48,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    sliding_window=32,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=30.0,
)
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": _of("llama", num_hidden_layers=2, head_dim=24, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "gemma4_e2b": _of(
        "gemma4_text",
        **decoder_sizes(key_heads=1, layers=10, head_dim=24),
        global_head_dim=48,
        sliding_window=32,
        vocab_size_per_layer_input=1091,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 2,
    ),
    "gemma4_31b": _of("gemma4_text", **GEMMA4),
    "gemma4_26b_moe": _of(
        "gemma4_text", **GEMMA4, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=40
    ),
    "gemma3n_text": _of(
        "gemma3n_text",
        intermediate_size=[112, 112, 112, 112, 112, 112, 112, 112, 112, 112],
        num_hidden_layers=10,
        head_dim=24,
        sliding_window=32,
        vocab_size_per_layer_input=1064,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=4,
        laurel_rank=8,
        activation_sparsity_pattern=[0.95, 0.95, 0.95, 0.95, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 2,
    ),
    "deepseek_v3": _of(
        "deepseek_v3",
        **MLA,
        num_hidden_layers=3,
        q_lora_rank=24,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        moe_intermediate_size=40,
        rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
    ),
    "llama4_text": _of(
        "llama4_text",
        num_hidden_layers=4,
        head_dim=24,
        intermediate_size_mlp=136,
        num_local_experts=6,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        attention_chunk_size=32,
        floor_scale=16,
    ),
    "nemotron_h": _of(
        "nemotron_h",
        layers_block_type=["mamba", "moe", "attention", "mlp", "mamba"],
        head_dim=24,
        ssm_state_size=20,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=48,
    ),
    "hunyuan_v1_moe": _of(
        "hunyuan_v1_moe", intermediate_size=40, num_hidden_layers=2, head_dim=24, num_experts=6, moe_topk=[2, 2]
    ),
    "mimo_v2_flash": _of(
        "mimo_v2_flash",
        num_hidden_layers=6,
        head_dim=24,
        v_head_dim=16,
        sliding_window=33,
        moe_intermediate_size=40,
        n_routed_experts=6,
        num_experts_per_tok=2,
    ),
    "inkling2_text": _of(
        "inkling2_text",
        num_hidden_layers=6,
        head_dim=24,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=32,
        d_rel=8,
        rel_extent=64,
        moe_intermediate_size=40,
        n_routed_experts=6,
        num_experts_per_tok=2,
        unpadded_vocab_size=1087,
        intermediate_size=None,
    ),
    "dots3_note": _of(
        "dots3_note_text",
        **decoder_sizes(layers=4, head_dim=32, key_heads=4),
        kv_lora_rank=20,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=40,
        shared_experts_intermediate_size=48,
        index_topk=64,
        index_head_dim=16,
        index_n_heads=2,
        sliding_window=32,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        layer_types=["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"],
        per_layer_config={
            index: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 40, "qk_nope_head_dim": 24}
            for index in (1, 2)
        },
    ),
}
"""Keys of a config by the name of a type, or of one of its shapes."""
