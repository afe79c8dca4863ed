"""How much memory a training step will need: arithmetic on the model's shape, before a weight is loaded.

Bytes a token and layer, for hidden size h, heads x head size q, key-value heads x head size k, intermediate size i (of all
experts that a token visits), e bytes a number in matmuls:

    compiled, everything kept     e (4h + 2q + 2k' + 3i)   x and both norms' output, the middle of the residual; q, attention's
                                                           output; k', v'; gate, up and their product (they feed matmuls)
    compiled, selective           e (2h + 2q + 2k + 2i)    products and attention's output; norms and SwiGLU are repeated
      narrow: less gate, up       e (2h + 2q + 2k)
      attention alone             e (h + q)
    eager, everything kept        8h + e (5h + 3q + 2k' + 4i)   norms keep float32 copies, each adapter its own of its input
    ... with Liger's kernels      e (7h + 3q + 2k' + 3i)
    eager, selective              e (3h + 2q + 2k + 2i)    as compiled, and the MLP's output, which eager cannot tell is unused
    checkpointed whole            e h                      its input; offloaded: two layers' on the device

k' is q where the attention backend wants keys and values repeated for each query head (on a GPU only eager does). To these
come 4 bytes a head of attention's log-sum-exp (where attention's output is kept) and e r for each adapter of rank r. One layer
in `every` is treated so, the others keep everything; a compiler's budget b keeps e h + b (everything - e h).

In its backward pass a compiled layer also holds, a token, the larger of what its MLP and its attention need at their fullest.
The MLP's part, in numbers of e bytes (what the code has alive that Inductor generates; without adapters in brackets):

    everything kept     5i + 2h (3i + 2h)    gradients of the product, of gate and of up; peft adds each adapter's share of them
                                             and, for its `* scaling`, keeps a scaled copy of each
    selective           9i + 2h (4i + 2h)    the product again, and what adapters add to gate and up
      narrow            11i + 3h (6i + 2h)   gate and up again
    the rest            11i + 6h + 2q + 2k (6i + 5h + 2q + 2k)   all of the layer again, which waits for attention's turn
    in t tiles          11i/t + 9h + 2q + 2k (6i/t + 8h + 2q + 2k)   a tile's, and parts of the input's gradient

attention's part: e (3h + 4q + 4k) + 4q + 8k, with float32 sums. A layer that runs operator by operator holds, besides
e (3i + 4h), all that it keeps without checkpointing.

Around the layers: weights; for each trained parameter its gradient and the optimizer's moments in its own dtype; with
autocast, copies of float32 weights; the loss, which has all logits, or those of some rows at a time where Liger's is on, and is
done before the layers' backward pass begins.

Checked on an H200 by tests/gpu/test_checkpointing.py to 15 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxtune.kernels.linear_cross_entropy import BUFFER, PART
from fxtune.kernels.quantized import bytes_per_weight
from fxtune.world import Facts

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS = {"adamw": 2.0, "sgd": 1.0, "lion": 1.0, "muon": 1.0, "adafactor": 0.01, "adamw8bit": 0.5}
"""Numbers of the parameter's dtype that an optimizer keeps for each one (8-bit ones: of float32)."""
SPARE = 0.04
"""Share of the need that goes to fragments between blocks."""
CONTEXT = 3 << 28
"""Bytes for libraries' workspaces."""


@dataclass(frozen=True)
class Keeping:
    """What layers keep from their forward to their backward pass."""

    policy: str = "none"
    """none, selective, narrow (selective, but for the products that are wider than the hidden size: gate, up), attention
    (selective, of attention alone), full or budget."""
    every: int = 1
    budget: float = 1.0
    offload: bool = False
    tiles: int = 1


@dataclass(frozen=True)
class Need:
    """Bytes, by what they are for."""

    weights: int
    trained: int
    """Gradients and the optimizer's moments."""
    kept: int
    """What all layers keep for the backward pass, on the device."""
    layer: int
    """What one layer holds besides, while it computes."""
    loss: int
    host: int = 0
    """Pinned host memory."""

    @property
    def device(self) -> int:
        """The peak, fragments and workspaces included."""
        return int((self.weights + self.trained + self.kept + max(self.layer, self.loss)) * (1 + SPARE)) + CONTEXT


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
        inner = (text.get("moe_intermediate_size") if experts > 1 else None) or text.get("intermediate_size") or 4 * hidden
        return Shape(hidden, inner * (visited if experts > 1 else 1), experts / visited if experts > 1 else 1.0, heads,
                     heads * head, (text.get("num_key_value_heads") or heads) * head, text.get("num_hidden_layers") or 1,
                     text.get("vocab_size") or 0, bool(text.get("tie_word_embeddings")))

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a layer's linears under Llama's names."""
        h, i = self.hidden, self.inner
        return {"q_proj": (h, self.q), "k_proj": (h, self.k), "v_proj": (h, self.k), "o_proj": (self.q, h),
                "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}

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


def forecast(facts: Facts, keeping: Keeping) -> Need:
    """The bytes that a step needs under `facts` if its layers keep what `keeping` says. See the module's docstring."""
    shape = Shape.of(facts.text)
    number = BYTES.get(facts.compute_dtype, 4)
    tokens = facts.micro_batch_size * (max(facts.rows, default=0) or facts.sequence_length)
    kept = _kept(facts, shape, keeping, number) * tokens
    host = 0
    if keeping.offload:
        inputs = number * shape.hidden * tokens
        treated = -(-shape.layers // keeping.every)
        kept -= (treated - 2) * inputs  # one in use, one on its way
        host = max(treated - 1, 0) * (1 << (max(inputs, 1) - 1).bit_length())  # pinned memory comes in powers of two
    weights, trained = _parameters(facts, shape)
    return Need(weights, trained, int(max(kept, 0)), int(_working(facts, shape, keeping, number) * tokens),
                _loss(facts, shape, number, tokens), host)


def _kept(facts: Facts, shape: Shape, keeping: Keeping, number: int) -> float:
    """Bytes a token, all layers together."""
    treated = -(-shape.layers // keeping.every) if keeping.policy != "none" else shape.layers
    everything = _everything(facts, shape, number, keeping.tiles)
    narrow = number * (2 * shape.hidden + 2 * shape.q + 2 * shape.k) + 4 * shape.heads + _adapters(facts, number)
    narrow += 0 if _compiled(facts) else number * shape.hidden
    whole = number * shape.hidden
    each = {"none": everything, "full": whole, "budget": whole + keeping.budget * (everything - whole), "narrow": narrow,
            "selective": narrow + number * 2 * shape.inner, "attention": whole + number * shape.q + 4 * shape.heads,
            }[keeping.policy]
    return treated * min(each, everything) + (shape.layers - treated) * everything


def _everything(facts: Facts, shape: Shape, number: int, tiles: int = 1) -> float:
    """Bytes a token that one layer keeps without checkpointing."""
    h, q, i = shape.hidden, shape.q, shape.inner if tiles == 1 else 0  # tiles keep nothing of the MLP but its input
    k = shape.k if _grouped(facts) else shape.q
    small = 4 * shape.heads + _adapters(facts, number)
    if _compiled(facts):
        return number * (4 * h + 2 * q + 2 * k + 3 * i) + small
    norms = number * 2 * h if _on(facts, "rms_norm") else 8 * h  # Liger's kernels keep their inputs alone
    return norms + number * (5 * h + 3 * q + 2 * k + (3 if _on(facts, "swiglu") else 4) * i) + small


def _working(facts: Facts, shape: Shape, keeping: Keeping, number: int) -> float:
    """Bytes a token that one layer holds in its backward pass beyond what it kept."""
    h, q, k, i, tiles = shape.hidden, shape.q, shape.k, shape.inner, keeping.tiles
    attention = number * (3 * h + 4 * q + 4 * k) + 4 * q + 8 * k
    if not _compiled(facts):
        inside = _everything(facts, shape, number, tiles) if keeping.policy != "none" else 0
        return inside + number * (3 * i / tiles + 4 * h)
    adapted = "lora" in facts.techniques
    if tiles > 1:
        mlp = (11 if adapted else 6) * i / tiles + (9 if adapted else 8) * h + 2 * q + 2 * k
    elif keeping.policy == "none":
        mlp = (5 if adapted else 3) * i + 2 * h
    elif keeping.policy == "selective":
        mlp = (9 if adapted else 4) * i + 2 * h
    elif keeping.policy == "narrow":
        mlp = (11 if adapted else 6) * i + (3 if adapted else 2) * h
    else:
        mlp = (11 if adapted else 6) * i + (6 if adapted else 5) * h + 2 * q + 2 * k
    return max(number * mlp, attention)


def _adapters(facts: Facts, number: int) -> int:
    lora = facts.techniques.get("lora")
    return number * 7 * int(lora["r"]) if lora else 0


def _compiled(facts: Facts) -> bool:
    return "compile" in facts.techniques


def _grouped(facts: Facts) -> bool:
    """Whether attention takes fewer key-value heads than query heads as they are."""
    return facts.device == "cuda" and facts.techniques.get("attention", {}).get("backend") != "eager"


def _on(facts: Facts, kernel: str) -> bool:
    """Whether techniques.liger has this kernel on."""
    switch = facts.techniques.get("liger", {}).get(kernel, "off")
    return getattr(switch, "value", switch) == "on"


def _parameters(facts: Facts, shape: Shape) -> tuple[int, int]:
    """Bytes of weights, and of gradients and moments."""
    number, lora = BYTES.get(facts.dtype, 4), facts.techniques.get("lora")
    moments = MOMENTS.get(facts.optimizer.replace("_", ""), 2.0)
    total = shape.in_linears + shape.around
    if not lora:
        copies = 2 * total if facts.dtype == "float32" and facts.compute_dtype != "float32" else 0
        return number * total + copies, int(number * total * (1 + moments))
    wanted = [str(name) for name in lora["target_modules"]]
    adapted = [sizes for name, sizes in shape.linears.items() if name in wanted or "all-linear" in wanted]
    adapters = shape.layers * int(lora["r"]) * sum(inward + outward for inward, outward in adapted)
    base = shape.in_linears * _linear_bytes(facts, number) + _around_bytes(facts, shape, number)
    return int(base) + 4 * adapters, int(4 * adapters * (1 + moments))


def _around_bytes(facts: Facts, shape: Shape, number: int) -> float:
    """Bytes of the embedding, the head and the norms; in fp8 those two are a byte a weight, and one where they are tied."""
    asked = facts.techniques.get("quantize") or {}
    head, embeddings = bool(asked.get("head")), bool(asked.get("embeddings"))
    end = shape.vocabulary * shape.hidden
    if shape.tied:
        return shape.around * number + end * ((1 - number) if embeddings else 1 if head else 0)
    return shape.around * number - end * (number - 1) * (head + embeddings)


def _linear_bytes(facts: Facts, number: int) -> float:
    """Bytes a parameter of the frozen linears: quantised ones with their scales."""
    asked = facts.techniques.get("quantize")
    return bytes_per_weight(asked) if asked else number


def _loss(facts: Facts, shape: Shape, number: int, tokens: int) -> int:
    """The loss's largest moment: the last hidden states, their norm and its gradient, and logits with what becomes of them."""
    states, numbers = tokens * shape.hidden * number * 3, tokens * shape.vocabulary
    if not _on(facts, "fused_linear_cross_entropy"):
        return states + numbers * (2 * number + 8)
    rows = facts.techniques["liger"].get("chunk_rows")
    held = rows * shape.vocabulary * number if rows else BUFFER
    head = 0 if "lora" in facts.techniques else 4 * shape.vocabulary * shape.hidden  # its gradient is summed in float32
    return states + min(numbers * number, held) + 4 * min(numbers, PART) + head
