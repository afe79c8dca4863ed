"""The sizes of a decoder, and what its layers keep from their forward to their backward pass: what memory.py and pace.py count.

A layer keeps one of five levels, here from little to much, and with it the time that computing the rest again takes:

    input        its input alone: all of it is computed twice
    attention    and attention's output: norms and matrix products are computed twice
    narrow       and the products as wide as the hidden state (q, k, v, o): gate, up, norms and activations are computed twice
    wide         and gate and up: what is computed twice costs next to nothing
    everything   all that the backward pass reads

A model's layers need not be of one level. Those of the lower level come first: the last ones' memory is free again by the time
the first ones compute anew, which is when a layer holds most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEVELS = ("input", "attention", "narrow", "wide", "everything")


@dataclass(frozen=True)
class RecomputePlan:
    """What layers keep, and where."""

    level: str = "everything"
    """One of LEVELS, or `budget`: what the compiler picks."""
    every: int = 1
    """One layer in so many has this level, the others keep everything."""
    budget: float = 1.0
    mix: tuple[tuple[str, int], ...] = ()
    """Levels and how many layers have each, in place of `level` and `every`; layers that are not counted keep their input."""
    sent: str = ""
    """What goes to host memory: nothing; `inputs`: layers' inputs; `kept`: also what else they keep, but for gate and up."""
    senders: int | None = None
    """How many layers send, from the first; None: all but the last one, whose share is wanted at once."""
    tiles: int = 1

    def levels(self, layers: int) -> list[str]:
        """The level of each of so many layers, first to last."""
        if not self.mix:
            return [self.level if index % self.every == 0 else "everything" for index in range(layers)]
        counts = dict(self.mix)
        found = [level for level in LEVELS for _ in range(counts.get(level, 0))]
        return ["input"] * (layers - len(found)) + found

    def sending(self, layers: int) -> list[bool]:
        """Which of so many layers send. One that keeps everything does not, and neither does the last one that could."""
        able = [index for index, level in enumerate(self.levels(layers)) if self.sent and level != "everything"]
        chosen = set(able[:-1] if self.senders is None else able[: min(self.senders, max(len(able) - 1, 0))])
        return [index in chosen for index in range(layers)]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, from its Hugging Face config."""

    hidden: int
    inner: int
    """Width of the MLP, of all experts that a token visits."""
    experts: float
    """Experts a layer over experts that a token visits."""
    heads: int
    q: int
    k: int
    layers: int
    vocabulary: int
    tied: bool

    @staticmethod
    def of(text: dict[str, Any]) -> Shape:
        """`text`: the config as a dict. Sizes that it does not say are those of a Llama of its width."""
        hidden = text.get("hidden_size") or 0
        heads = text.get("num_attention_heads") or 1
        head = text.get("head_dim") or hidden // heads
        experts = text.get("num_local_experts") or text.get("num_experts") or 1
        visited = text.get("num_experts_per_tok") or 1
        inner = (
            (text.get("moe_intermediate_size") if experts > 1 else None) or text.get("intermediate_size") or 4 * hidden
        )
        return Shape(
            hidden,
            inner * (visited if experts > 1 else 1),
            experts / visited if experts > 1 else 1.0,
            heads,
            heads * head,
            (text.get("num_key_value_heads") or heads) * head,
            text.get("num_hidden_layers") or 1,
            text.get("vocab_size") or 0,
            bool(text.get("tie_word_embeddings")),
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a layer's linears under Llama's names."""
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
    def in_linears(self) -> int:
        """Parameters of all layers' linears."""
        each = {name: inward * outward for name, (inward, outward) in self.linears.items()}
        mlp = each["gate_proj"] + each["up_proj"] + each["down_proj"]
        return int(self.layers * (sum(each.values()) - mlp + mlp * self.experts))

    @property
    def around(self) -> int:
        """Parameters of the embedding, the head and the norms."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + (2 * self.layers + 1) * self.hidden
