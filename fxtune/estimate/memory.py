"""A forecast of the memory that a training step needs, computed from the model's shape before a weight is loaded.

In the code h is the hidden size. q is the width of all query heads together, and k of all key heads. i is the width of
the MLP, or in a mixture of all experts that a token visits. A number in matmuls has 2 or 4 bytes. `LayerBytes` counts,
per token, the bytes that a layer keeps from its forward to its backward pass (kept), and the bytes that its backward
pass adds (working). A compiled layer keeps the inputs of matmuls and attention. An eager layer also keeps float32
copies of its norms' inputs, and a copy of the input for each adapter. Trained linears with products in fp8 keep their
inputs as codes, a byte a number, even if attention keeps the same tensor in 16 bits.

A recurrent layer (kernels/linear_attention.py) keeps its convolution's result, queries and keys after their norms, its
own result before and after its norm, its decays and their sums in a chunk, and one or two matrices [CHUNK, CHUNK] a
chunk and head. Its backward pass holds the states of all chunks. For Qwen3.5 9B in rows of 4 x 4,096 the forecast is
2 % below what an H200 measured (docs/hybrids.md).

A mixture also keeps its router's results. The backward pass of its experts holds two tensors with a hidden state
for each expert of each token. Adapters of experts have a copy in 16 bits.

Fused adapters never keep the MLP's product, act(gate) * up. The backward pass of a fused MLP holds these buffers:

- for one tile at a time: the gradients of the product (i) and of gate and up (2i); for fp8 a quantized copy (i); a few
  numbers for each of the adapters' ranks; and recomputed gate and up (2i) at levels below `wide`;
- for all tokens (4h): the MLP's input, the input of the norm before it, and the gradients of the MLP's input and
  output.

Layers with low levels come first (`RecomputePlan.levels`). When they recompute, the memory of the last layers is free
again. So the forecast looks for the peak layer by layer. Offloaded tensors leave the device, except the tensors of two
layers. Outside of the layers there are the weights, with autocast copies of float32 weights. Each trained parameter
has a gradient and the optimizer's moments, in the parameter's dtype. The loss ends before the layers' backward pass
begins. The images of a micro-batch add their pixels and features, and their vision encoder runs before the decoder
(models/kinds/beside.py).

Gradients do not exist together with all kept tensors: the backward pass frees a layer's tensors and leaves the layer's
gradients. So the peak is the largest of these moments: the loss; each layer's backward pass, with the gradients of
the head and of all later layers; the end of the backward pass; and the optimizer's step. Steps of several
micro-batches and CUDA graphs hold all gradients all the time. If weights are updated in the backward pass
(`Facts.in_backward`), only the gradients of one layer, of the embedding or of the head exist at a time. A tied
embedding has two gradients. Optimizers that cannot skip a bad step on the device copy weights, gradients and moments
before their step (`OptimizerState.undo_limit`).

The forecast is for one rank. weights.py counts the weights, gradients and moments that it holds. Ranks that share rows
hold their part of the activations. Forecasts for divided weights are 2 % too high for an 8B model and up to 8 % for
mixtures (scripts/study/plan_accuracy.py).

tests/gpu/test_checkpointing.py compares forecasts with an H200: they are at most 15 % too low, and at most 20 % too
high if much is offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxtune.estimate.weights import (
    BYTES,
    beside_of,
    bytes_of_rank,
    divides_experts,
    exchange_bytes,
    frozen_bytes,
    number_bytes,
    shape_of,
    share_in_slots,
    trained_parameters,
)
from fxtune.facts.recomputation import RecomputePlan, pinned_bytes
from fxtune.facts.run import Facts
from fxtune.kernels.divergence import SHARE_OF_BUFFER
from fxtune.kernels.frozen_base import padded_rank
from fxtune.kernels.linear_attention import CHUNK
from fxtune.kernels.linear_cross_entropy import BLOCK, BUFFER
from fxtune.models.dims import Layer, Recurrence, Shape

SPARE = 0.04
"""The memory that fragmentation takes, as a share of the need."""
UNEVEN = 1.1
"""Rows that divided experts of one rank may have, as a multiple of the mean over ranks. This number is an assumption,
not a measurement."""
HOST_SHARE = 0.8
"""The share of the host's memory that pinned tensors may fill."""
WORKSPACES = 3 << 28
"""Bytes for libraries' workspaces."""
PEAKS = {
    # The gradients of the product, gate and up. peft adds each adapter's part and a scaled copy of this part.
    "everything": ((5, 2, 0), (3, 2, 0)),
    # In addition: the recomputed product, and the adapters' parts of gate and up.
    "wide": ((9, 2, 0), (4, 2, 0)),
    # In addition: the recomputed gate and up.
    "narrow": ((11, 3, 0), (6, 2, 0)),
    # In addition: the rest of the recomputed layer, which is held for attention.
    "rest": ((11, 6, 2), (6, 5, 2)),
    # The tensors of one tile, and parts of the input's gradient.
    "tiles": ((11, 9, 2), (6, 8, 2)),
}
"""The peak of a compiled layer's MLP at each level: first with adapters, then without. Each peak has three numbers,
which are multiplied by i, by h and by q + k."""


@dataclass(frozen=True)
class Need:
    """The bytes that a step needs, by purpose."""

    weights: int
    trained: int
    """Bytes of gradients and the optimizer's moments."""
    kept: int
    """Bytes of the activations that all layers keep on the device for the backward pass."""
    backward: int
    """Bytes that the layers' backward pass adds to `kept` at its peak, including the gradients at that time."""
    loss: int
    host: int = 0
    """Bytes of activations in pinned host memory."""
    exchange: int = 0
    """Bytes of buffers for the exchange of weights and gradients with other ranks."""
    gradients: int = 0
    """The part of `trained` that is gradients and exists only after the loss; 0 if gradients are held from step to
    step."""
    update: int = 0
    """Bytes that the end of the backward pass or the optimizer's step adds to the gradients."""
    images: int = 0
    """Bytes that a whole step holds for images (BesideMemory.held)."""
    images_peak: int = 0
    """Bytes that the parts for images add to `images` while they run, including the gradients at that time."""
    host_moments: int = 0
    """Bytes of the optimizer's moments in pinned host memory."""

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory."""
        return self.host + self.host_moments

    @property
    def passing(self) -> int:
        """The peak of activations, together with gradients that each step makes and frees."""
        decoder = self.kept + max(self.backward, self.loss)
        return self.images + max(decoder, self.gradients + self.update, self.images_peak)

    @property
    def allocated(self) -> int:
        """The peak of allocated memory (`torch.cuda.max_memory_allocated()`)."""
        return self.weights + self.trained - self.gradients + self.exchange + self.passing

    @property
    def device(self) -> int:
        """The memory that must be free: `allocated`, fragmentation and workspaces."""
        return int(self.allocated * (1 + SPARE)) + WORKSPACES

    @property
    def parts(self) -> dict[str, int]:
        """`device` divided by purpose, with names for users to read."""
        held = "optimizer" if self.gradients else "gradients and optimizer"
        parts = {
            "weights": self.weights,
            held: self.trained - self.gradients,
            "for other ranks": self.exchange,
            "images": self.images,
            "gradients and activations" if self.gradients else "activations": self.passing - self.images,
            "workspaces and fragmentation": self.device - self.allocated,
        }
        return {name: size for name, size in parts.items() if size}


def forecast(facts: Facts, plan: RecomputePlan) -> Need:
    """The bytes that a step needs under `facts` with the recomputation of `plan`. The module's docstring explains
    them."""
    shape, number, tokens, run = shape_of(facts), number_bytes(facts), facts.tokens, facts.execution
    levels = plan.levels(shape.layers)
    layers = [LayerBytes(facts, plan, kind) for kind in shape.kinds]
    bytes_of = {
        (index, level): tuple(count(level) * tokens for count in (layer.kept, layer.working, layer.sent))
        for index, layer in enumerate(layers)
        for level in set(levels)
    }
    weights, trained = bytes_of_rank(facts, shape)
    exchange, summed = exchange_bytes(facts)
    host, host_moments, moments = 0, 0, trained.moments
    if facts.optimizer.slots:
        host_moments, moments = moments, int(moments * share_in_slots(facts))
    if facts.keeps_start:
        weights += 4 * trained_parameters(facts)  # adapters are in float32 and whole on each rank
    if facts.frozen:
        weights += frozen_bytes(facts.frozen, Shape.of(facts.frozen.model))
    held_on = facts.accumulates or run.holds_gradients
    freed = facts.in_backward
    # The copies from which the optimizer undoes a bad step: of all weights, or of the largest part that it updates in
    # the backward pass.
    copied = max(trained.end, trained.layer) if freed else trained.gradients
    undone = trained.copies(copied) if copied <= facts.optimizer.undo_limit else 0
    staying = held = most = below = 0.0
    behind = 0 if held_on or freed else trained.end + sum(trained.layers[kind] for kind in shape.order)
    for kind, level, sends in zip(shape.order, levels, plan.sending(shape.layers), strict=True):
        kept, working, sent = bytes_of[kind, level]
        away = sent if sends else 0.0
        staying += kept - away
        held = staying + away + below  # this layer is back on the device, the layer below is in transfer
        behind -= 0 if held_on or freed else trained.layers[kind]
        most, below = max(most, held + working + trained.layers[kind] + behind), away
        host += pinned_bytes(int(away))
    if freed:  # the head's weight is updated before the layers' backward pass
        most = max(most, held + trained.end + undone)
    if run.fused and run.quantized and run.quantized.linears and not run.quantized.multiplies:
        most += number * max(kind.wide for kind in shape.kinds)  # gate and up in 16 bits
    most += unpacked_bytes(facts, shape)
    gradients = max(trained.end * (1 + shape.tied), trained.layer) if freed else trained.gradients
    # A tied weight has two gradients, which the end of the backward pass adds up.
    update = max(undone, trained.end if shape.tied and not freed else 0)
    beside = beside_of(facts)
    images = beside.memory(facts, plan, number, shape.hidden)
    # Parts for images run before the decoder, and their backward pass comes last. Only parts that have a backward pass
    # meet all other gradients.
    before = gradients if beside.has_gradients(facts) and not held_on else 0
    return Need(
        weights,
        moments + gradients,
        int(held),
        int(max(most - held, 0)) + summed,
        _loss_bytes(facts, shape),
        host,
        exchange,
        0 if held_on else gradients,
        update,
        images.held,
        images.peak + before,
        host_moments,
    )


def host_for_activations(facts: Facts) -> float:
    """Bytes of pinned host memory that moments leave to activations."""
    return max(HOST_SHARE * facts.host_memory - forecast(facts, RecomputePlan()).host_moments, 0.0)


class LayerBytes:
    """Bytes per token of one layer at each level. The module's docstring derives them."""

    def __init__(self, facts: Facts, plan: RecomputePlan, layer: Layer) -> None:
        self.facts, self.plan, self.shape, self.hidden = facts, plan, layer, shape_of(facts).hidden
        self.run = facts.execution
        self.stream = self.hidden * ((layer.q > 0) + (layer.inner > 0)) // 2
        """The hidden size. A layer that has only attention or only an MLP counts half of it."""
        self.number, self.fused, self.compiled = number_bytes(facts), self.run.fused, self.run.compiled
        matrices = sum(4 * each.decays + self.number * each.matrices for each in layer.recurrences)
        self.lse = 4 * sum(each.heads for each in layer.attentions) + matrices * (facts.device == "cuda")
        """Bytes that attention and recurrences keep beside their results."""
        self.states = sum(map(self._states, layer.recurrences))
        """Bytes that the backward pass of recurrences holds."""
        self.keys = self.shape.k * (1 + facts.shares_prompts)
        """The width of a token's keys. A shared prompt has a copy of its keys (attention/packed.py), so the width
        doubles at most."""
        divides = layer.experts > 1 and divides_experts(facts)
        self.everyone = facts.degrees.shard * facts.degrees.context if divides else 0
        """The number of ranks whose tokens reach this rank's experts; 0: experts are not divided."""
        self.inner = int(self.shape.inner * (UNEVEN if self.everyone else 1))
        self.float8 = self.run.fp8_products == 1 and layer.experts == 1
        """Whether linears keep their inputs in fp8 for the gradients of their weights."""

    def _states(self, recurrence: Recurrence) -> float:
        """Kernels hold the state of each chunk and its gradient, and for each head four tensors like its keys and four
        like its values. On a CPU the state of each token is held, in float32."""
        keys, values = recurrence.width, recurrence.value_width
        if self.facts.device != "cuda":
            return 4.0 * recurrence.heads * keys * values
        return self.number * recurrence.heads * (2 * keys * values / CHUNK + 4 * (keys + values))

    def kept(self, level: str) -> float:
        """Bytes that a layer keeps, on the device or on the host."""
        s, number = self.shape, self.number
        everything, h, lse = self._everything(), number * self.hidden, self.lse
        narrow = number * (2 * self.stream + 2 * s.q + 2 * self.keys) + lse + self._adapters(*s.linears[:2])
        narrow += 0 if self.compiled else h
        narrow += self._routing() + s.normalizes * number * (s.q + s.k)
        mlp_adapters = self._adapters(*s.linears[2:])
        sizes = {
            "everything": everything,
            "wide": narrow + number * 2 * self.inner + mlp_adapters,
            "narrow": narrow if self.fused else narrow + mlp_adapters,
            "attention": h + number * s.q + lse,
            "input": h,
            "budget": h + self.plan.budget * (everything - h),
        }
        return float(min(sizes[level], everything))

    def sent(self, level: str) -> float:
        """Bytes that a layer sends to the host, if it is a layer that sends."""
        if self.plan.sent != "kept" or level == "input":
            return float(self.number * self.hidden)
        return self.kept("narrow" if level in ("wide", "everything") else level)

    def working(self, level: str) -> float:
        """Bytes that a layer's backward pass holds in addition to the kept bytes."""
        # Three tensors for all ranks' tokens: sent, received, and what this rank's experts add to the gradients.
        return self._working(level) + 3 * self.number * self.everyone * self.hidden

    def _working(self, level: str) -> float:
        """working() without the tensors for other ranks' tokens."""
        h, q, k, i, tiles = self.hidden, self.shape.q, self.keys, self.inner, self.plan.tiles
        kept_before = self._everything() if level != "everything" else 0
        # Ranks that share rows hold two copies of queries, keys and values: sent and received.
        exchanged = 2 * (q + 2 * k) if self.facts.degrees.context > 1 else 0
        if self.fused:
            recomputes = tiles > 1 or level not in ("wide", "everything")
            fp8 = self.run.quantized is not None and self.run.quantized.multiplies
            rank = self.run.adapters.rank if self.run.adapters else 0
            inside = (3 + 2 * recomputes + fp8) * i + (2 + 4 * recomputes) * rank
            mlp = inside / tiles + (3 if level == "everything" else 4) * h
            if self.shape.experts > 1:
                # The gradient of each row and what adapters add to it; or, at an earlier time, the activation times
                # its routing weight.
                mlp += max(2 * self.shape.used * h, i)
            if not self.compiled:
                return kept_before + max(self.number * (mlp - 2 * i * (recomputes and tiles == 1)), self.states)
            attention = 2 * h + 3 * q + 3 * k + exchanged
            if level in ("input", "attention", "budget"):
                mlp, attention = mlp + h + 3 * q + 3 * k, attention + 2 * q + 2 * k
            return max(self.number * mlp, self.number * attention + 4 * q + 8 * k + self.states)
        if not self.compiled:
            return kept_before + max(self.number * (3 * i / tiles + 4 * h), self.states)
        peaks = PEAKS.get("tiles" if tiles > 1 else level, PEAKS["rest"])
        inner, hidden, projected = peaks[self.run.adapters is None]
        mlp = inner * i / tiles + hidden * h + projected * (q + k)
        attention = self.number * (3 * h + 4 * q + 4 * k + exchanged) + 4 * q + 8 * k
        return max(self.number * mlp, attention + self.states)

    def _everything(self) -> float:
        """Bytes that a layer keeps if nothing is recomputed. A tiled MLP keeps only its input."""
        h, q, i = self.stream, self.shape.q, self.inner if self.plan.tiles == 1 else 0
        k = max(q, self.keys) if self.run.repeats_keys else self.keys
        small = self.lse + self._adapters(*self.shape.linears) + self._routing()
        small += self.number * self.everyone * self.hidden
        # A convolution's result; without a recurrence behind it (LFM2) its input is no projection, and is kept, too.
        small += self.number * self.shape.convolved * (1 if self.shape.recurrences else 2)
        small += sum(4 * each.decays + self.number * each.beside for each in self.shape.recurrences)
        if self.shape.normalizes:  # queries and keys are kept both before and after their norms
            small += self.number * (q + self.shape.k)
        if self.float8:  # inputs of linears take one byte and not two; attention also keeps its output in 16 bits
            small += q - 2 * h - i
        if self.compiled:  # 4h: x, the outputs of both norms, and the stream between attention and MLP
            return self.number * (4 * h + 2 * q + 2 * k + (2 if self.fused else 3) * i) + small
        norms = self.number * 2 * h if self.run.fused_norms else 8 * h
        if self.fused:
            return norms + self.number * (2 * h + 2 * q + 2 * k + 2 * i) + small
        products = (3 if self.run.fused_gate else 4) * i
        return norms + self.number * (5 * h + 3 * q + 2 * k + products) + small

    def _routing(self) -> int:
        """Bytes that a mixture keeps for routing: logits and their softmax in float32, the order of rows, and the
        product of each row with the adapters' A."""
        s, adapters = self.shape, 0
        if s.experts == 1:
            return 0
        if self.run.adapters:
            adapters = 2 * self.run.adapters.rank * s.used * self.number
        return 4 * 2 * s.experts + 8 * (2 + self.everyone) * s.used + adapters

    def _adapters(self, *groups: tuple[str, ...]) -> int:
        """Bytes of the products x A^T of the adapters in these groups of linears."""
        if self.run.adapters is None:
            return 0
        ranks = [sum(self.run.adapters.rank_of(f"model.layers.0.{name}") for name in group) for group in groups]
        return self.number * sum(padded_rank([rank]) if self.fused else rank for rank in ranks)


def unpacked_bytes(facts: Facts, shape: Shape) -> int:
    """Bytes of gate and up of one layer's experts in 16 bits. They are dequantized for each use."""
    quantized = facts.execution.quantized
    if quantized is None or quantized.multiplies or not quantized.experts:
        return 0
    widths = (kind.experts * kind.expert_inner for kind in shape.kinds)
    return number_bytes(facts) * 2 * shape.hidden * max(widths)


def _loss_bytes(facts: Facts, shape: Shape) -> int:
    """Bytes at the loss's peak: the last hidden states, their norm and the norm's gradient; the logits, their softmax
    and their gradient. Without a fused kernel the norm keeps a float32 copy. Its backward pass needs four more copies,
    after the logits are freed."""
    number, tokens, run = number_bytes(facts), facts.tokens, facts.execution
    copies = 0 if run.fused_norms or number == 4 else 4 * tokens * shape.hidden
    states, logits = tokens * shape.hidden * number * 3 + copies, tokens * shape.vocabulary
    if facts.frozen:
        states += tokens * Shape.of(facts.frozen.model).hidden * number
    if facts.head != "lm":
        return max(states, 5 * copies)
    if not run.fused_loss and not facts.logit_tensors:
        return max(states + logits * (2 * number + 8), 5 * copies)
    # The gradient is summed in float32 and then copied to the weight's dtype.
    size = BYTES.get(facts.dtype, 4)
    head = 0 if run.adapters else (4 + size * (size < 4)) * shape.vocabulary * shape.hidden
    if facts.logit_tensors:
        return max(states + facts.logit_tensors * min(4 * logits, BUFFER // SHARE_OF_BUFFER) + head, 5 * copies)
    return max(states + min(logits * number, BUFFER) + 4 * min(logits, BLOCK) + head, 5 * copies)
