"""The sizes of a decoder, from its Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALIASES = {
    "hidden_size": ("n_embd", "d_model", "dim_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "decoder_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"),
}
"""Names of sizes in the configs of older families (GPT-2, BART, MPT)."""


EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names of the number of experts in a layer, and of the number of experts that a token uses."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. `linears` has Llama's names for every family."""

    hidden: int
    inner: int
    """Width of the MLP: the sum over the experts that a token uses."""
    experts: float
    """Experts per layer, divided by the experts that a token uses."""
    heads: int
    q: int
    """Width of all query heads."""
    k: int
    """Width of all key heads, and of all value heads."""
    key_heads: int
    layers: int
    vocabulary: int
    tied: bool
    expert_count: int = 1
    """Experts of a layer, shared ones not counted; 1: a dense MLP."""
    expert_inner: int = 0
    """Width of one expert's MLP; the MLP's width without experts."""

    @staticmethod
    def of(text: dict[str, Any]) -> Shape:
        """`text`: the text model's config as a dict. Missing sizes are as in a Llama of the same width."""
        for name, others in ALIASES.items():
            if not text.get(name) and (size := next((text[other] for other in others if text.get(other)), None)):
                text = {**text, name: size}
        hidden = text.get("hidden_size") or 0
        heads = text.get("num_attention_heads") or 1
        head = text.get("head_dim") or hidden // heads
        experts = next((text[name] for name in EXPERTS if text.get(name)), 1)
        used = next((text[name] for name in EXPERTS_USED if text.get(name)), 1)
        key_heads = text.get("num_key_value_heads") or heads
        inner = (experts > 1 and text.get("moe_intermediate_size")) or text.get("intermediate_size") or 4 * hidden
        if isinstance(inner, (list, tuple)):  # a width for each layer (Gemma 3n)
            inner = sum(inner) // len(inner)
        return Shape(
            hidden,
            inner * (used if experts > 1 else 1),
            experts / used if experts > 1 else 1.0,
            heads,
            heads * head,
            key_heads * head,
            key_heads,
            text.get("num_hidden_layers") or 1,
            text.get("vocab_size") or 0,
            bool(text.get("tie_word_embeddings")),
            experts,
            inner,
        )

    @property
    def used(self) -> int:
        """Experts that a token uses; 1: a dense MLP."""
        return round(self.expert_count / self.experts)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Input and output width of each linear of a layer."""
        h, i = self.hidden, self.inner
        return {
            "q_proj": (h, self.q),
            "k_proj": (h, self.k),
            "v_proj": (h, self.k),
            "o_proj": (self.q, h),
            "gate_proj": (h, i),
            "up_proj": (h, i),
            "down_proj": (i, h),
        }

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linears of all layers."""
        attention, mlp = 2 * self.hidden * (self.q + self.k), 3 * self.hidden * self.inner
        return int(self.layers * (attention + mlp * self.experts))

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts' linears in all layers; 0 without experts."""
        return int(self.layers * 3 * self.hidden * self.inner * self.experts) if self.experts > 1 else 0

    @property
    def other_parameters(self) -> int:
        """Parameters of the embedding, the head and the norms."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + (2 * self.layers + 1) * self.hidden


def position_limit(text: dict[str, Any]) -> int | None:
    """The longest document that a model was trained on or has position embeddings for; None: its config names none."""
    return next((text[name] for name in ("max_position_embeddings", "n_positions") if text.get(name)), None)
