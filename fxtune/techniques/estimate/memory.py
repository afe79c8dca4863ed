"""A forecast of the memory that a training step needs, computed from the model's shape before a weight is loaded.

In the code h is the hidden size, q and k are the widths of all query heads and of all key heads, and i is the width of
the MLP (of all experts that a token visits). A number has 2 or 4 bytes in matmuls. `LayerBytes` counts, per token, the
bytes that a layer keeps from its forward to its backward pass (kept) and the bytes that its backward pass adds
(working). A compiled layer keeps the inputs of matmuls and attention. An eager layer also keeps float32 copies of its
norms' inputs and a copy of the input for each adapter. Trained linears with products in fp8 keep their inputs as
codes, a byte a number, even if attention keeps the same tensor in 16 bits.

A mixture also keeps its router's results. The backward pass of its experts holds two tensors with a hidden state
for each expert of each token, and adapters of experts have a copy in 16 bits.

Fused adapters never keep the MLP's product, act(gate) * up. The backward pass of a fused MLP holds these buffers:

- for one tile at a time, the gradients of the product (i) and of gate and up (2i); for fp8 a quantized copy (i); a few
  numbers for each of the adapters' ranks; and gate and up again (2i) at levels that keep less than `wide`;
- for all tokens, the gradients of its output and its input, its input, and what the norm before it read (4h).

Layers with low levels come first (`RecomputePlan.levels`), and the memory of the last layers is free again when the
first ones recompute. So the forecast looks for the peak layer by layer. Offloaded tensors leave the device, except
the tensors of two layers. Outside the layers there are weights, for each trained parameter its gradient and the
optimizer's moments in its own dtype, with autocast copies of float32 weights, and the loss, which ends before the
layers' backward pass begins. The images of a micro-batch add their pixels and features, and their vision encoder runs
before the decoder (tower.py).

Gradients do not exist together with all kept tensors: the backward pass frees a layer's tensors and leaves
its gradients. So the peak is the largest of these moments: the loss; each layer's backward pass, with the gradients of
the head and of the layers behind it; the end of the backward pass; and the optimizer's step. Steps of several
micro-batches and CUDA graphs hold all gradients all the time. If weights are updated in the backward pass
(`Facts.in_backward`), only the gradients of one layer, of the embedding or of the head exist at a time, and a tied
embedding has two. Optimizers that cannot skip a bad step on the device copy weights, gradients and moments before
their step (`Facts.undo_limit`).

The forecast is for one rank. Replicas add up their gradients in a buffer as large as all gradients, in float32 unless
the group `parallel` says otherwise. Ranks that share a copy of the weights hold their part of weights, gradients and
moments. They also hold, whole and in the dtype of matmuls: the head, two layers (one is fetched while the other
computes), and the gradients of one layer, which are added up in float32. Adapters are whole on each rank. Experts that
are divided by expert are never whole; in their place ranks hold the hidden states of all ranks' tokens. Ranks that
share rows hold their part of the activations. On two H100 the forecast of divided weights is 3 to 4 % too high
(benchmarks/baselines/h100_two_cards.json).

Measured on an H200 by tests/gpu/test_checkpointing.py: at most 15 % too low and, where much is offloaded, 20 % too
high.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxtune.facts.options import LoraOptions, QuantizeOptions, Switch
from fxtune.facts.run import Facts
from fxtune.kernels.frozen_base import padded_rank
from fxtune.kernels.linear_cross_entropy import BLOCK, BUFFER
from fxtune.models.dims import Layer, Shape, built
from fxtune.models.structure import skeleton
from fxtune.techniques.attention.backends.registry import backend_of
from fxtune.techniques.estimate.recomputation import RecomputePlan, pinned_bytes
from fxtune.techniques.estimate.tower import ImageParts, has_gradients, image_memory, image_numbers
from fxtune.techniques.lora.experts import divisible_experts
from fxtune.techniques.lora.targets import gate_up_parts, select
from fxtune.techniques.quantize.quantized_experts import leaves_linears
from fxtune.techniques.quantized_modules import bytes_per_weight

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MOMENTS = {"adamw": 2.0, "sgd": 1.0, "lion": 1.0, "muon": 1.0, "adafactor": 0.01, "adamw8bit": 0.5}
"""Numbers that an optimizer keeps for each parameter, in the parameter's dtype; with stochastic rounding in
`Facts.moments`, in float32 for 8-bit optimizers. Muon's number counts for hidden matrices; AdamW updates the other
parameters (see optim/optimizer.py)."""
SPARE = 0.04
"""Share of the need that fragmentation takes."""
UNEVEN = 1.1
"""How many rows the experts of one rank may have, as a multiple of the mean over ranks, where experts are divided: an
assumption."""
WORKSPACES = 3 << 28
"""Bytes for libraries' workspaces."""
PEAKS = {
    # The gradients of the product, gate and up; peft adds each adapter's part and a scaled copy of each.
    "everything": ((5, 2, 0), (3, 2, 0)),
    # Also the recomputed product, and the adapters' parts of gate and up.
    "wide": ((9, 2, 0), (4, 2, 0)),
    # Also the recomputed gate and up.
    "narrow": ((11, 3, 0), (6, 2, 0)),
    # Also the rest of the recomputed layer, held for attention.
    "rest": ((11, 6, 2), (6, 5, 2)),
    # The tensors of one tile, and parts of the input's gradient.
    "tiles": ((11, 9, 2), (6, 8, 2)),
}
"""The peak of a compiled layer's MLP by level, with and without adapters: multiples of i, of h, and of q + k."""


@dataclass(frozen=True)
class Need:
    """Bytes by purpose."""

    weights: int
    trained: int
    """Gradients and the optimizer's moments."""
    kept: int
    """Activations that all layers keep for the backward pass, on the device."""
    backward: int
    """Bytes that the layers' backward pass adds to `kept` at its peak, with the gradients that exist then."""
    loss: int
    host: int = 0
    """Pinned host memory."""
    exchange: int = 0
    """Buffers for exchanging weights and gradients with other ranks."""
    gradients: int = 0
    """Gradients in `trained` that exist only after the loss: all, unless gradients are held from step to step."""
    update: int = 0
    """Bytes that the end of the backward pass or the optimizer's step adds to the gradients."""
    images: int = 0
    """Pixels and features of images, and what a vision encoder with gradients keeps."""
    tower: int = 0
    """Bytes that a vision encoder adds to `images` while it runs, with the gradients that exist then."""

    @property
    def passing(self) -> int:
        """The peak of activations and of the gradients that each step makes and frees."""
        decoder = self.kept + max(self.backward, self.loss)
        return self.images + max(decoder, self.gradients + self.update, self.tower)

    @property
    def allocated(self) -> int:
        """The peak of allocated memory (`torch.cuda.max_memory_allocated()`)."""
        return self.weights + self.trained - self.gradients + self.exchange + self.passing

    @property
    def device(self) -> int:
        """The memory that must be free: the peak, with fragmentation and workspaces."""
        return int(self.allocated * (1 + SPARE)) + WORKSPACES

    @property
    def parts(self) -> dict[str, int]:
        """`device` by purpose, for people."""
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


@dataclass(frozen=True)
class Trained:
    """Bytes of gradients and moments on one rank."""

    moments: int
    gradients: int
    """Gradients of all trained weights."""
    layers: tuple[int, ...]
    """Gradients of a layer of each of `Shape.kinds`."""
    end: int
    """The gradient of the embedding or of the head."""

    @property
    def layer(self) -> int:
        """Gradients of the largest layer."""
        return max(self.layers)

    def copies(self, gradients: int) -> int:
        """Bytes of copies of the weights whose gradients have `gradients` bytes, these gradients and the moments."""
        return int(gradients * (2 + self.moments / max(self.gradients, 1)))


def forecast(facts: Facts, plan: RecomputePlan) -> Need:
    """The bytes that a step needs under `facts` with the recomputation of `plan`; see the module's docstring."""
    shape, number, tokens = shape_of(facts), number_bytes(facts), facts.tokens
    levels = plan.levels(shape.layers)
    layers = [LayerBytes(facts, plan, kind) for kind in shape.kinds]
    bytes_of = {
        (index, level): tuple(count(level) * tokens for count in (layer.kept, layer.working, layer.sent))
        for index, layer in enumerate(layers)
        for level in set(levels)
    }
    weights, trained = _bytes_of_rank(facts, shape)
    if facts.keeps_start:
        weights += 4 * trained_parameters(facts)  # adapters are float32, and whole on each rank
    held_on = facts.accumulates or facts.techniques.compile.keep_gradients
    freed, undone = facts.in_backward, _undone_bytes(facts, trained)
    staying = held = most = below = 0.0
    host = 0
    behind = 0 if held_on or freed else trained.end + sum(trained.layers[kind] for kind in shape.order)
    for kind, level, sends in zip(shape.order, levels, plan.sending(shape.layers), strict=True):
        kept, working, sent = bytes_of[kind, level]
        away = sent if sends else 0.0
        staying += kept - away
        held = staying + away + below  # this layer's tensors are on the device, the layer below's are in transfer
        behind -= 0 if held_on or freed else trained.layers[kind]
        most, below = max(most, held + working + trained.layers[kind] + behind), away
        host += pinned_bytes(int(away))
    if freed:  # the head's weight is updated before the layers' backward pass
        most = max(most, held + trained.end + undone)
    if is_fused(facts) and quantized_type(facts) in ("nf4", "int8"):
        most += number * max(kind.wide for kind in shape.kinds)  # gate and up in 16 bits
    most += unpacked_bytes(facts, shape)
    gradients = max(trained.end * (1 + shape.tied), trained.layer) if freed else trained.gradients
    # A tied weight has two gradients, which are added up.
    update = max(undone, trained.end if shape.tied and not freed else 0)
    images = image_memory(facts, plan, number, shape.hidden)
    # A vision encoder without gradients runs before the decoder; the backward pass of another one comes last.
    before = gradients if has_gradients(facts) and not held_on else 0
    return Need(
        weights,
        trained.moments + gradients,
        int(held),
        int(max(most - held, 0)),
        _loss_bytes(facts, shape),
        host,
        exchange_bytes(facts),
        0 if held_on else gradients,
        update,
        images.held,
        images.peak + before,
    )


def _undone_bytes(facts: Facts, trained: Trained) -> int:
    """Bytes of the copies from which an optimizer undoes a bad step: copies of all weights, or of the largest part if
    weights are updated in the backward pass. 0 if the weights that are updated together exceed `Facts.undo_limit`."""
    whole = trained.gradients if not facts.in_backward else max(trained.end, trained.layer)
    if whole > facts.undo_limit:
        return 0
    return trained.copies(whole)


class LayerBytes:
    """Bytes per token of one layer, by level. The module's docstring derives them."""

    def __init__(self, facts: Facts, plan: RecomputePlan, layer: Layer) -> None:
        attention, self.hidden = facts.techniques.attention, shape_of(facts).hidden
        self.facts, self.plan, self.shape = facts, plan, layer
        self.stream = self.hidden * ((layer.q > 0) + (layer.inner > 0)) // 2
        """The hidden size; half of it in a layer that is a mixer alone, or an MLP."""
        self.lse = 4 * sum(each.heads for each in layer.attentions)
        self.number, self.fused, self.compiled = number_bytes(facts), is_fused(facts), facts.techniques.compile.enabled
        backend = backend_of(attention.backend) if attention.enabled else None
        self.grouped = facts.device == "cuda" and (backend is None or backend.fused)
        """Whether attention takes keys and values without repeating them for each query head."""
        self.keys = self.shape.k * (1 + facts.shares_prompts)
        """Width of a token's keys: a shared prompt has a copy of them (attention/packed.py), at most one a token."""
        divides = layer.experts > 1 and divides_experts(facts)
        self.everyone = facts.degrees.shard * facts.degrees.context if divides else 0
        """How many ranks' tokens reach the experts of this rank; 0: experts are not divided."""
        self.inner = int(self.shape.inner * (UNEVEN if self.everyone else 1))
        float8 = facts.techniques.float8
        self.float8 = float8.enabled and float8.weight_gradient == "float8" and layer.experts == 1
        """Whether linears keep their inputs in fp8 for the gradients of their weights."""

    def kept(self, level: str) -> float:
        """Bytes that a layer keeps, on the device or the host."""
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
        """Bytes that a layer sends to the host, if it sends."""
        if self.plan.sent != "kept" or level == "input":
            return float(self.number * self.hidden)
        return self.kept("narrow" if level in ("wide", "everything") else level)

    def working(self, level: str) -> float:
        """Bytes that a layer holds in its backward pass beyond what it kept."""
        # All ranks' tokens: as sent, as received, and what this rank's experts add to their gradients.
        return self._working(level) + 3 * self.number * self.everyone * self.hidden

    def _working(self, level: str) -> float:
        """working() but for tokens of other ranks."""
        h, q, k, i, tiles = self.hidden, self.shape.q, self.keys, self.inner, self.plan.tiles
        kept_before = self._everything() if level != "everything" else 0
        # Ranks that share rows hold queries, keys and values as sent and as received.
        exchanged = 2 * (q + 2 * k) if self.facts.degrees.context > 1 else 0
        if self.fused:
            recomputes = tiles > 1 or level not in ("wide", "everything")
            fp8 = quantized_type(self.facts) == "fp8"
            inside = (3 + 2 * recomputes + fp8) * i + (2 + 4 * recomputes) * self.facts.techniques.lora.r
            mlp = inside / tiles + (3 if level == "everything" else 4) * h
            if self.shape.experts > 1:
                # The gradient of each row, and what adapters add to it; or before them w h.
                mlp += max(2 * self.shape.used * h, i)
            if not self.compiled:
                return kept_before + self.number * (mlp - 2 * i * (recomputes and tiles == 1))
            attention = 2 * h + 3 * q + 3 * k + exchanged
            if level in ("input", "attention", "budget"):
                mlp, attention = mlp + h + 3 * q + 3 * k, attention + 2 * q + 2 * k
            return max(self.number * mlp, self.number * attention + 4 * q + 8 * k)
        if not self.compiled:
            return kept_before + self.number * (3 * i / tiles + 4 * h)
        peaks = PEAKS.get("tiles" if tiles > 1 else level, PEAKS["rest"])
        inner, hidden, projected = peaks[not self.facts.techniques.lora.enabled]
        mlp = inner * i / tiles + hidden * h + projected * (q + k)
        return max(self.number * mlp, self.number * (3 * h + 4 * q + 4 * k + exchanged) + 4 * q + 8 * k)

    def _everything(self) -> float:
        """Bytes that a layer keeps without checkpointing. A tiled MLP keeps only its input."""
        h, q, i = self.stream, self.shape.q, self.inner if self.plan.tiles == 1 else 0
        k = self.keys if self.grouped else max(q, self.keys)
        small = self.lse + self._adapters(*self.shape.linears) + self._routing()
        small += self.number * self.everyone * self.hidden
        if self.shape.normalizes:  # queries and keys before their norms and after
            small += self.number * (q + self.shape.k)
        if self.float8:  # inputs of linears take a byte in place of two; attention keeps its output, too
            small += q - 2 * h - i
        if self.compiled:  # 4h: x, both norms' outputs, the stream between attention and MLP
            return self.number * (4 * h + 2 * q + 2 * k + (2 if self.fused else 3) * i) + small
        norms = self.number * 2 * h if self.facts.techniques.liger.runs("rms_norm") else 8 * h
        if self.fused:
            return norms + self.number * (2 * h + 2 * q + 2 * k + 2 * i) + small
        products = (3 if self.facts.techniques.liger.runs("swiglu") else 4) * i
        return norms + self.number * (5 * h + 3 * q + 2 * k + products) + small

    def _routing(self) -> int:
        """Bytes that a mixture's router keeps: logits and their softmax in float32, and the order of rows; and the
        products of each row with adapters' A."""
        s, lora = self.shape, self.facts.techniques.lora
        if s.experts == 1:
            return 0
        adapters = 2 * lora.r * s.used * self.number if lora.enabled else 0
        return 4 * 2 * s.experts + 8 * (2 + self.everyone) * s.used + adapters

    def _adapters(self, *groups: tuple[str, ...]) -> int:
        """Bytes of x A^T for the adapters of these groups of linears."""
        lora = self.facts.techniques.lora
        if not lora.enabled:
            return 0
        ranks = [sum(rank_of(lora, f"model.layers.0.{name}") for name in group) for group in groups]
        return self.number * sum(padded_rank([rank]) if self.fused else rank for rank in ranks)


def number_bytes(facts: Facts) -> int:
    """Bytes of a number in matmuls."""
    return BYTES.get(facts.compute_dtype, 4)


def is_fused(facts: Facts) -> bool:
    """Whether fused operators run the adapters and the MLPs (techniques.lora.fused, resolved)."""
    return facts.techniques.lora.enabled and facts.techniques.lora.fused is Switch.on


def quantized_type(facts: Facts) -> str:
    """The storage of the frozen linears: nf4, int8 or fp8; empty for model.dtype."""
    quantize = facts.techniques.quantize
    return quantize.type.value if quantize.enabled else ""


def quantizes_experts(facts: Facts) -> bool:
    """Whether the experts of a mixture are quantized; otherwise they are in model.dtype."""
    return facts.techniques.quantize.enabled and facts.techniques.quantize.experts is Switch.on


def unpacked_bytes(facts: Facts, shape: Shape) -> int:
    """Bytes in 16 bits of one layer's experts, gate and up, which are dequantized for each use."""
    if not quantizes_experts(facts) or quantized_type(facts) == "fp8":
        return 0
    widths = (kind.experts * kind.expert_inner for kind in shape.kinds)
    return number_bytes(facts) * 2 * shape.hidden * max(widths)


def linears_stay(facts: Facts) -> bool:
    """Whether the linears of attention and of a dense MLP stay in 16 bits beside quantized experts."""
    largest = Shape.of(facts.model).largest_linear
    return leaves_linears(facts.techniques.quantize, quantizes_experts(facts), largest)


def linears_in_fp8(facts: Facts) -> bool:
    """Whether the linears of attention and of a dense MLP are stored in fp8."""
    return quantized_type(facts) == "fp8" and not linears_stay(facts)


def _bytes_of_rank(facts: Facts, shape: Shape) -> tuple[int, Trained]:
    """Bytes of weights, and of gradients and moments, on one rank. Adapters and the parts for images are whole on
    each."""
    weights, trained = _parameter_bytes(facts, shape)
    parts = facts.degrees.shard
    if parts == 1:
        return weights, trained
    parameters = image_numbers(facts)
    whole = BYTES.get(facts.dtype, 4) * (parameters.beside if parameters else 0)
    if facts.techniques.lora.enabled:
        whole += 4 * trained_parameters(facts)
        return -(-(weights - whole) // parts) + whole, trained
    images = parameters.images if parameters and facts.trains_images else 0
    share = 1 / parts + (1 - 1 / parts) * images / trained_parameters(facts)
    moments, gradients = (math.ceil(size * share) for size in (trained.moments, trained.gradients))
    layers = tuple(-(-size // parts) for size in trained.layers)
    return -(-(weights - whole) // parts) + whole, Trained(moments, gradients, layers, -(-trained.end // parts))


def _parameter_bytes(facts: Facts, shape: Shape) -> tuple[int, Trained]:
    """Bytes of weights, and of gradients and moments."""
    number, lora, quantize = BYTES.get(facts.dtype, 4), facts.techniques.lora, facts.techniques.quantize
    moments = MOMENTS.get(facts.optimizer.replace("_", ""), 2.0)
    moment = BYTES[facts.moments] if facts.stochastic_rounding else number
    moment = 4 if "8bit" in facts.optimizer else moment
    total, end = shape.linear_parameters + shape.other_parameters, shape.vocabulary * shape.hidden
    beside = parameters.beside if (parameters := image_numbers(facts)) else 0
    if not lora.enabled:
        frozen = beside
        if parameters and facts.trains_images:
            total, frozen = total + parameters.images, beside - parameters.images
        # Divided weights are gathered in autocast's dtype, so nothing is copied.
        cast = facts.dtype == "float32" and facts.compute_dtype != "float32" and facts.degrees.shard == 1
        copies = 2 * total if cast else 0
        # Muon leaves norms, embeddings, the head and experts (one tensor a layer) to AdamW, but no adapters of
        # linears.
        rest = shape.other_parameters + shape.expert_parameters if facts.optimizer == "muon" else 0
        extra = rest * (MOMENTS["adamw"] - moments) * moment
        layers = tuple(number * kind.parameters for kind in shape.kinds)
        end = number * shape.largest_table
        trained = Trained(int(total * moments * moment + extra), number * total, layers, end)
        return number * (total + frozen) + copies, trained
    adapted = adapter_numbers(facts)
    linear, around = float(number), shape.other_parameters * number
    if quantize.enabled:
        linear = _quantized_bytes(quantize)
        if quantizes_experts(facts):
            others = shape.linear_parameters - shape.expert_parameters
            around += int(others * (number - linear)) if linears_stay(facts) else 0
        else:
            around += int(shape.expert_parameters * (number - linear))
        if not shape.tied:
            around -= end * (number - 1) * (quantize.head + quantize.embeddings)
        else:  # a byte a weight replaces the tensor that both share, or the head becomes a second one
            around += end * ((1 - number) if quantize.embeddings else int(quantize.head))
    around += beside * number
    # Beside the frozen weights; quantized experts keep theirs.
    copied = adapted.experts if quantize.enabled else adapted.all - adapted.images
    packed = number * copied if is_fused(facts) else 0
    size = 4 * adapted.all
    trained = Trained(int(size * moments), size, (size // shape.layers,) * len(shape.kinds), 0)
    return int(shape.linear_parameters * linear + around + packed) + size, trained


def shape_of(facts: Facts) -> Shape:
    """The decoder's sizes. A head that scores documents is one row, so the embedding is the only table."""
    shape = Shape.of(facts.model)
    return shape if facts.head == "lm" else replace(shape, tied=True)


def exchange_bytes(facts: Facts) -> int:
    """Bytes that a rank holds to exchange weights and gradients with the others; see the module's docstring."""
    shape, degrees = shape_of(facts), facts.degrees
    if degrees.ranks == 1:
        return 0
    if degrees.shard == 1:
        return facts.sum_bytes * trained_parameters(facts)
    # The embedding is whole in its own forward pass only, far from any peak. The head's weight, which may be the same
    # tensor, is whole from the end of the forward pass to its gradient.
    head, layer = shape.vocabulary * shape.hidden, gathered_parameters(facts, shape) / shape.layers
    gradients = layer * (number_bytes(facts) + 4)
    if facts.techniques.lora.enabled:  # as replicas do
        gradients = facts.sum_bytes * trained_parameters(facts)
    return int(number_bytes(facts) * head + 2 * layer * linear_bytes(facts) + gradients)


def divides_experts(facts: Facts) -> bool:
    """Whether the experts of a mixture are divided by expert over the ranks, and tokens travel to them."""
    if facts.degrees.shard == 1 or shape_of(facts).expert_count == 1:
        return False
    model = skeleton(facts.model)
    return model is not None and _divides(model, facts.degrees.shard * facts.degrees.context)


@functools.lru_cache(maxsize=64)
def _divides(model: nn.Module, ranks: int) -> bool:
    return bool(divisible_experts(model, ranks))


def gathered_parameters(facts: Facts, shape: Shape) -> int:
    """Parameters of the linears of all layers that ranks with divided weights gather."""
    return shape.linear_parameters - shape.expert_parameters * divides_experts(facts)


def scattered_parameters(facts: Facts) -> int:
    """Trained parameters without experts that are divided by expert: a rank has the whole gradient of its experts, so
    ranks with divided weights do not add it up."""
    experts = 0 if facts.techniques.lora.enabled else shape_of(facts).expert_parameters
    return trained_parameters(facts) - experts * divides_experts(facts)


def trained_parameters(facts: Facts) -> int:
    """How many numbers the optimizer updates."""
    shape, lora = shape_of(facts), facts.techniques.lora
    if not lora.enabled:
        whole = image_numbers(facts) if facts.trains_images else None
        return shape.linear_parameters + shape.other_parameters + (whole.images if whole else 0)
    return adapter_numbers(facts).all


@dataclass(frozen=True)
class AdapterNumbers:
    """Parameters of adapters."""

    all: int
    experts: int
    images: int
    """Of the vision encoder and its projector."""


def adapter_numbers(facts: Facts) -> AdapterNumbers:
    """The adapters of techniques.lora, on what it selects of the model."""
    lora = facts.techniques.lora
    names = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform")
    options: dict[str, Any] = {name: tuple(getattr(lora, name)) for name in names}
    options |= {name: getattr(lora, name) for name in ("r", "vision", "projector")}
    return _adapter_numbers(built(facts.model), tuple(options.items()), tuple(lora.rank_pattern.items()))


@functools.lru_cache(maxsize=64)
def _adapter_numbers(model: Any, options: tuple[Any, ...], ranks: tuple[tuple[str, int], ...]) -> AdapterNumbers:
    values: dict[str, Any] = {name: [*value] if isinstance(value, tuple) else value for name, value in options}
    lora = LoraOptions(rank_pattern=dict(ranks), **values)
    chosen, beside = select(model, lora), {id(module) for module in ImageParts.of(model) or ()}
    modules = [(path, model.get_submodule(path)) for path in chosen.modules]
    counts = [(rank_of(lora, path) * sum(module.weight.shape), id(module) in beside) for path, module in modules]
    # peft may give the adapter of gate and up, which are one product, a multiple of the rank.
    joined = lora.r * gate_up_parts(str(getattr(model.config, "model_type", "")))
    tensors = [(path, model.get_parameter(path).shape) for path in chosen.experts]
    experts = sum(
        rank_of(lora, path, joined if path.endswith("gate_up_proj") else lora.r) * count * (inward + outward)
        for path, (count, inward, outward) in tensors
    )
    images = sum(count for count, is_beside in counts if is_beside)
    return AdapterNumbers(sum(count for count, _ in counts) + experts, experts, images)


def rank_of(lora: LoraOptions, path: str, rank: int | None = None) -> int:
    """The rank of the adapter of the module `path`: the entry of rank_pattern, whose patterns peft compares with the
    end of the full name, or else `rank` (None: techniques.lora.r)."""
    ranks = (value for pattern, value in lora.rank_pattern.items() if re.match(rf"(.*\.)?({pattern})$", path))
    return next(ranks, lora.r if rank is None else rank)


def linear_bytes(facts: Facts) -> float:
    """Bytes of each weight of the layers' linears as the weights are multiplied and sent."""
    quantize = facts.techniques.quantize
    return _quantized_bytes(quantize) if quantize.enabled else number_bytes(facts)


def _quantized_bytes(quantize: QuantizeOptions) -> float:
    """Bytes of each quantized weight, scales included."""
    return bytes_per_weight(quantize.type.value, quantize.keeps_transposes)


def _loss_bytes(facts: Facts, shape: Shape) -> int:
    """The loss's peak: the last hidden states, their norm and its gradient, the logits and their softmax and gradient.
    Without Liger's kernel the norm keeps a float32 copy, and its backward pass, after the logits are freed, needs
    four more."""
    number, tokens, lora = number_bytes(facts), facts.tokens, facts.techniques.lora
    copies = 0 if facts.techniques.liger.runs("rms_norm") or number == 4 else 4 * tokens * shape.hidden
    states, logits = tokens * shape.hidden * number * 3 + copies, tokens * shape.vocabulary
    if facts.head != "lm":
        return max(states, 5 * copies)
    if not facts.techniques.liger.runs("fused_linear_cross_entropy"):
        return max(states + logits * (2 * number + 8), 5 * copies)
    rows = facts.techniques.liger.chunk_rows
    chunk = rows * shape.vocabulary * number if rows else BUFFER
    # The gradient is summed in float32 and then copied to the weight's dtype.
    size = BYTES.get(facts.dtype, 4)
    head = 0 if lora.enabled else (4 + size * (size < 4)) * shape.vocabulary * shape.hidden
    return max(states + min(logits * number, chunk) + 4 * min(logits, BLOCK) + head, 5 * copies)
