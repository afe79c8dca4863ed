"""How much memory a training step will need: arithmetic on the model's shape, before a weight is loaded.

Bytes a token and layer, for hidden size h, heads x head size q, key-value heads x head size k, intermediate size i (of all
experts that a token visits), e bytes a number in matmuls. What a layer keeps from its forward to its backward pass, by level:

    compiled, everything   e (4h + 2q + 2k' + 3i)   x and both norms' output, the middle of the residual; q, attention's
                                                    output; k', v'; gate, up and their product (they feed matmuls)
    compiled, wide         e (2h + 2q + 2k + 2i)    products and attention's output; norms and SwiGLU are repeated
      narrow: less gate, up   e (2h + 2q + 2k)
      attention alone      e (h + q)
    eager, everything      8h + e (5h + 3q + 2k' + 4i)   norms keep float32 copies, each adapter its own of its input
    ... with Liger's kernels   e (7h + 3q + 2k' + 3i)
    eager, wide            e (3h + 2q + 2k + 2i)    as compiled, and the MLP's output, which eager cannot tell is unused
    input                  e h                      of a layer that is checkpointed whole

k' is q where the attention backend wants keys and values repeated for each query head (on a GPU only eager does). To these
come 4 bytes a head of attention's log-sum-exp (where attention's output is kept) and e r for each adapter of rank r. Fused
adapters (kernels/fused_lora.py) never keep the MLP's product, so i less of everything; eager, they need no copies of inputs.
A compiler's budget b keeps e h + b (everything - e h).

What is sent to host memory leaves the device but for two layers' share: the one at work and the one under way.

In its backward pass a compiled layer also holds, a token, the larger of what its MLP and its attention need at their fullest.
The MLP's part, in numbers of e bytes (what the code has alive that Inductor generates; without adapters in brackets):

    everything    5i + 2h (3i + 2h)    gradients of the product, of gate and of up; peft adds each adapter's share of them
                                       and, for its `* scaling`, keeps a scaled copy of each
    wide          9i + 2h (4i + 2h)    the product again, and what adapters add to gate and up
    narrow        11i + 3h (6i + 2h)   gate and up again
    the rest      11i + 6h + 2q + 2k (6i + 5h + 2q + 2k)   all of the layer again, which waits for attention's turn
    in t tiles    11i/t + 9h + 2q + 2k (6i/t + 8h + 2q + 2k)   a tile's, and parts of the input's gradient

Fused, the operator's own buffers: the product's gradient (i), those of gate and up (2i), for fp8 a quantised copy of them (i),
8 ranks, a padded copy of its gradient (h), all in t tiles, and whole its gradient, its input and theirs (4h); below wide gate and
up again (2i). A base in 4 bits or int8 is dequantised, gate and up at once.

attention's part: e (3h + 4q + 4k) + 4q + 8k, with float32 sums. A layer that runs operator by operator holds, besides
e (3i + 4h), all that it keeps without checkpointing.

Layers that keep little come first and layers that keep much last (`Keeping.levels`): the last ones' share is free again when
the first ones compute anew. So the peak is sought layer by layer.

Around the layers: weights; for each trained parameter its gradient and the optimizer's moments in its own dtype; with
autocast, copies of float32 weights; the loss, which has all logits, or those of some rows at a time where Liger's is on, and is
done before the layers' backward pass begins.

Checked on an H200 by tests/gpu/test_checkpointing.py: at most 15 % too little and, where much is sent away, 20 % too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fxtune.kernels.frozen_base import padded_rank
from fxtune.kernels.linear_cross_entropy import BUFFER, PART
from fxtune.kernels.quantized import bytes_per_weight
from fxtune.models.dims import Shape
from fxtune.techniques.base import Switch
from fxtune.techniques.checkpointing.offload import pinned
from fxtune.techniques.checkpointing.plan import RecomputePlan

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS = {"adamw": 2.0, "sgd": 1.0, "lion": 1.0, "muon": 1.0, "adafactor": 0.01, "adamw8bit": 0.5}
"""Numbers of the parameter's dtype that an optimizer keeps for each one; of float32 where it rounds by chance, and of 8-bit ones.
Muon's are for the hidden matrices that it updates; all the rest is AdamW's (see optimizer.py)."""
SPARE = 0.04
"""Share of the need that goes to fragments between blocks."""
CONTEXT = 3 << 28
"""Bytes for libraries' workspaces."""


@dataclass(frozen=True)
class Need:
    """Bytes, by what they are for."""

    weights: int
    trained: int
    """Gradients and the optimizer's moments."""
    kept: int
    """What all layers keep for the backward pass, on the device."""
    layer: int
    """What the layers' backward pass holds besides at its fullest."""
    loss: int
    host: int = 0
    """Pinned host memory."""

    @property
    def device(self) -> int:
        """The peak, fragments and workspaces included."""
        return int((self.weights + self.trained + self.kept + max(self.layer, self.loss)) * (1 + SPARE)) + CONTEXT


def forecast(facts: Facts, keeping: RecomputePlan) -> Need:
    """The bytes that a step needs under `facts` if its layers keep what `keeping` says. See the module's docstring."""
    shape = Shape.of(facts.text)
    tokens = facts.tokens
    levels, sending = keeping.levels(shape.layers), keeping.sending(shape.layers)
    sizes = {level: kept_bytes(facts, keeping, level) * tokens for level in set(levels)}
    working = {level: _working(facts, shape, keeping, level) * tokens for level in set(levels)}
    shares = {level: sent_bytes(facts, keeping, level) * tokens for level in set(levels)}
    staying = held = most = below = 0.0
    host = 0
    for level, sends in zip(levels, sending, strict=True):
        away = shares[level] if sends else 0.0
        staying += sizes[level] - away
        held = staying + away + below  # this layer's own share is here, and that of the one below is on its way
        most, below = max(most, held + working[level]), away
        host += pinned(int(away))
    weights, trained = _parameters(facts, shape)
    if is_fused(facts) and kind_of(facts) in ("nf4", "int8"):
        most += number_of(facts) * 2 * shape.hidden * shape.inner  # gate and up in 16 bits
    return Need(weights, trained, int(held), int(max(most - held, 0)), _loss(facts, shape, tokens), host)


def sent_bytes(facts: Facts, keeping: RecomputePlan, level: str) -> float:
    """Bytes a token of what a layer of that level sends to the host, if it sends."""
    if keeping.sent != "kept" or level == "input":
        return float(number_of(facts) * Shape.of(facts.text).hidden)
    return kept_bytes(facts, keeping, "narrow" if level in ("wide", "everything") else level)


def kept_bytes(facts: Facts, keeping: RecomputePlan, level: str) -> float:
    """Bytes a token that a layer of that level keeps, wherever they are."""
    shape, number = Shape.of(facts.text), number_of(facts)
    everything = _everything(facts, shape, number, keeping.tiles)
    whole, lse = number * shape.hidden, 4 * shape.heads
    narrow = number * (2 * shape.hidden + 2 * shape.q + 2 * shape.k) + lse + _adapters(facts, number, ("qkv", "o"))
    narrow += 0 if _compiled(facts) else whole
    each = {
        "everything": everything,
        "wide": narrow + number * 2 * shape.inner + _adapters(facts, number, ("gate_up", "down")),
        "narrow": narrow if is_fused(facts) else narrow + _adapters(facts, number, ("gate_up", "down")),
        "attention": whole + number * shape.q + lse,
        "input": whole,
        "budget": whole + keeping.budget * (everything - whole),
    }
    return float(min(each[level], everything))


def _everything(facts: Facts, shape: Shape, number: int, tiles: int = 1) -> float:
    """Bytes a token that one layer keeps without checkpointing."""
    h, q, i = shape.hidden, shape.q, shape.inner if tiles == 1 else 0  # tiles keep nothing of the MLP but its input
    k = shape.k if _grouped(facts) else shape.q
    small = 4 * shape.heads + _adapters(facts, number, tuple(GROUPS))
    if _compiled(facts):
        return number * (4 * h + 2 * q + 2 * k + (2 if is_fused(facts) else 3) * i) + small
    norms = number * 2 * h if _on(facts, "rms_norm") else 8 * h  # Liger's kernels keep their inputs alone
    if is_fused(facts):
        return norms + number * (2 * h + 2 * q + 2 * k + 2 * i) + small
    return norms + number * (5 * h + 3 * q + 2 * k + (3 if _on(facts, "swiglu") else 4) * i) + small


def _working(facts: Facts, shape: Shape, keeping: RecomputePlan, level: str) -> float:
    """Bytes a token that one layer holds in its backward pass beyond what it kept."""
    if is_fused(facts):
        return _working_fused(facts, shape, keeping, level)
    h, q, k, i, tiles, number = shape.hidden, shape.q, shape.k, shape.inner, keeping.tiles, number_of(facts)
    attention = number * (3 * h + 4 * q + 4 * k) + 4 * q + 8 * k
    adapted = facts.techniques.lora.enabled
    if not _compiled(facts):
        inside = _everything(facts, shape, number, tiles) if level != "everything" else 0
        return inside + number * (3 * i / tiles + 4 * h)
    if tiles > 1:
        mlp = (11 if adapted else 6) * i / tiles + (9 if adapted else 8) * h + 2 * q + 2 * k
    elif level == "everything":
        mlp = (5 if adapted else 3) * i + 2 * h
    elif level == "wide":
        mlp = (9 if adapted else 4) * i + 2 * h
    elif level == "narrow":
        mlp = (11 if adapted else 6) * i + (3 if adapted else 2) * h
    else:
        mlp = (11 if adapted else 6) * i + (6 if adapted else 5) * h + 2 * q + 2 * k
    return max(number * mlp, attention)


def _working_fused(facts: Facts, shape: Shape, keeping: RecomputePlan, level: str) -> float:
    """_working() where adapters and MLP are operators of our own."""
    h, q, k, i, tiles, number = shape.hidden, shape.q, shape.k, shape.inner, keeping.tiles, number_of(facts)
    again = tiles > 1 or level not in ("wide", "everything")
    inside = (3 + 2 * again + (kind_of(facts) == "fp8")) * i + (2 + 4 * again) * facts.techniques.lora.r
    mlp = inside / tiles + (3 if level == "everything" else 4) * h
    if not _compiled(facts):
        whole = _everything(facts, shape, number, 1 if tiles == 1 else 2) if level != "everything" else 0
        return whole + number * (mlp - 2 * i * (again and tiles == 1))
    attention = 2 * h + 3 * q + 3 * k
    if level in ("input", "attention", "budget"):
        mlp, attention = mlp + h + 3 * q + 3 * k, attention + 2 * q + 2 * k
    return max(number * mlp, number * attention + 4 * q + 8 * k)


def number_of(facts: Facts) -> int:
    """Bytes a number in matmuls."""
    return BYTES.get(facts.compute_dtype, 4)


def is_fused(facts: Facts) -> bool:
    """Whether adapters and MLP are operators of our own (techniques.lora.fused, resolved)."""
    lora = facts.techniques.lora
    return lora.enabled and lora.fused == "on"


def kind_of(facts: Facts) -> str:
    """How the frozen linears are stored: nf4, int8, fp8, or empty for model.dtype."""
    quantize = facts.techniques.quantize
    return quantize.type.value if quantize.enabled else ""


GROUPS = {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}
"""Linears that read the same input, and how many of them."""


def _adapters(facts: Facts, number: int, groups: tuple[str, ...]) -> int:
    """Bytes a token of these groups' x A^T."""
    lora = facts.techniques.lora
    if not lora.enabled:
        return 0
    ranks = [GROUPS[name] * lora.r for name in groups]
    return number * sum(padded_rank([rank]) if is_fused(facts) else rank for rank in ranks)


def _compiled(facts: Facts) -> bool:
    return facts.techniques.compile.enabled


def _grouped(facts: Facts) -> bool:
    """Whether attention takes fewer key-value heads than query heads as they are."""
    attention = facts.techniques.attention
    return facts.device == "cuda" and not (attention.enabled and attention.backend == "eager")


def _on(facts: Facts, kernel: str) -> bool:
    """Whether techniques.liger has this kernel on."""
    liger = facts.techniques.liger
    return liger.enabled and getattr(liger, kernel) is Switch.on


def _parameters(facts: Facts, shape: Shape) -> tuple[int, int]:
    """Bytes of weights, and of gradients and moments."""
    number, lora = BYTES.get(facts.dtype, 4), facts.techniques.lora
    moments = MOMENTS.get(facts.optimizer.replace("_", ""), 2.0)
    each = 4 if facts.stochastic_rounding or "8bit" in facts.optimizer else number
    total = shape.in_linears + shape.around
    if not lora.enabled:
        copies = 2 * total if facts.dtype == "float32" and facts.compute_dtype != "float32" else 0
        rest = _not_muons(shape) if facts.optimizer == "muon" else 0
        return number * total + copies, int(
            total * (number + moments * each) + rest * (MOMENTS["adamw"] - moments) * each
        )
    wanted = lora.target_modules
    adapted = [sizes for name, sizes in shape.linears.items() if name in wanted or "all-linear" in wanted]
    adapters = shape.layers * lora.r * sum(inward + outward for inward, outward in adapted)
    base = shape.in_linears * _linear_bytes(facts, number) + _around_bytes(facts, shape, number)
    packed = number * adapters if is_fused(facts) and not kind_of(facts) else 0  # beside the frozen weights
    return int(base + packed) + 4 * adapters, int(4 * adapters * (1 + moments))


def _not_muons(shape: Shape) -> int:
    """Parameters of the whole model that Muon leaves to AdamW: no matrix (norms; experts, which are one tensor a layer) or a
    table (embedding and head). Adapters on linears are matrices."""
    experts = shape.experts * shape.layers * 3 * shape.hidden * shape.inner if shape.experts > 1 else 0
    return shape.around + int(experts)


def _around_bytes(facts: Facts, shape: Shape, number: int) -> float:
    """Bytes of the embedding, the head and the norms; in fp8 those two are a byte a weight, and one where they are tied."""
    quantize = facts.techniques.quantize
    head, embeddings = quantize.enabled and quantize.head, quantize.enabled and quantize.embeddings
    end = shape.vocabulary * shape.hidden
    if shape.tied:
        return shape.around * number + end * ((1 - number) if embeddings else 1 if head else 0)
    return shape.around * number - end * (number - 1) * (head + embeddings)


def _linear_bytes(facts: Facts, number: int) -> float:
    """Bytes a parameter of the frozen linears: quantised ones with their scales."""
    quantize = facts.techniques.quantize
    return bytes_per_weight(quantize.type.value, quantize.double) if quantize.enabled else number


def _loss(facts: Facts, shape: Shape, tokens: int) -> int:
    """The loss's largest moment: the last hidden states, their norm and its gradient, and logits with what becomes of them.

    The last norm stands outside of the layers. Without Liger's kernel it runs in float32, operator by operator: it keeps one
    such copy, and its backward pass, which comes when the logits are gone, holds four more.
    """
    number = number_of(facts)
    copies = 0 if _on(facts, "rms_norm") or number == 4 else 4 * tokens * shape.hidden
    states, numbers = tokens * shape.hidden * number * 3 + copies, tokens * shape.vocabulary
    if not _on(facts, "fused_linear_cross_entropy"):
        return max(states + numbers * (2 * number + 8), 5 * copies)
    rows = facts.techniques.liger.chunk_rows
    held = rows * shape.vocabulary * number if rows else BUFFER
    head = (
        0 if facts.techniques.lora.enabled else 4 * shape.vocabulary * shape.hidden
    )  # its gradient is summed in float32
    return max(states + min(numbers * number, held) + 4 * min(numbers, PART) + head, 5 * copies)
