"""The sizes of a decoder, by short names."""

from __future__ import annotations


def decoder_sizes(
    hidden: int | None = None,
    intermediate: int | None = None,
    *,
    layers: int | None = None,
    heads: int | None = None,
    key_heads: int | None = None,
    head_dim: int | None = None,
    vocabulary: int | None = None,
) -> dict[str, int]:
    """The given sizes, under the keys of transformers' configs."""
    named = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
    }
    return {name: size for name, size in named.items() if size is not None}
