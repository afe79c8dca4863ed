"""The parameters that a rank holds, trains and exchanges, and the bytes of their weights, gradients and moments.

Replicas add up their gradients in a buffer as large as all gradients, in float32 unless the group `parallel` says
otherwise. Ranks that share a copy of the weights hold their part of weights, gradients and moments. They also hold,
whole and in the dtype of matmuls, the head and two layers (one is fetched while the other computes), and in the
backward pass the gradients of one layer, which are added up in float32. Adapters are whole on each rank. Experts that
are divided by expert are never whole. Instead, ranks hold the hidden states of all ranks' tokens (memory.py).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.experts import divisible_experts
from fxtune.models.kinds.beside import Beside
from fxtune.models.kinds.known import kind_of
from fxtune.models.structure import skeleton

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def number_bytes(facts: Facts) -> int:
    """Bytes of a number in matmuls."""
    return BYTES.get(facts.compute_dtype, 4)


def linear_bytes(facts: Facts) -> float:
    """Bytes of each weight in the layers' linears, in the format in which weights are multiplied and sent."""
    quantized = facts.execution.quantized
    return quantized.bytes if quantized else number_bytes(facts)


def shape_of(facts: Facts) -> Shape:
    """The decoder's sizes. A head that scores documents has one row, so only the embedding is a table of tokens."""
    shape = Shape.of(facts.model)
    return shape if facts.head == "lm" else replace(shape, tied=True)


def beside_of(facts: Facts) -> Beside:
    """The cost of the parts beside the decoder and its head."""
    if not any(name.endswith("_config") and name != "text_config" for name in facts.model):
        return Beside()
    model = skeleton(facts.model)
    found = Beside() if model is None else _beside(model)
    # A vision encoder whose features are stored is in host memory.
    return replace(found, parameters=found.parameters - found.trainable) if facts.stores_images else found


@functools.lru_cache(maxsize=4)
def _beside(model: Any) -> Beside:
    return kind_of(model.config).beside(model)


def trained_parameters(facts: Facts) -> int:
    """The number of parameters that the optimizer updates."""
    if adapters := facts.execution.adapters:
        return adapters.all
    shape = shape_of(facts)
    return shape.linear_parameters + shape.other_parameters + beside_of(facts).trained(facts)


def gathered_parameters(facts: Facts, shape: Shape) -> int:
    """The number of parameters, in linears of all layers, that ranks with divided weights gather."""
    return shape.linear_parameters - shape.expert_parameters * divides_experts(facts)


def scattered_parameters(facts: Facts) -> int:
    """The number of trained parameters whose gradients ranks with divided weights add up. Experts that are divided by
    expert are left out: each rank has their whole gradient."""
    experts = 0 if facts.execution.adapters else shape_of(facts).expert_parameters
    return trained_parameters(facts) - experts * divides_experts(facts)


def divides_experts(facts: Facts) -> bool:
    """Whether the experts of a mixture are divided by expert over the ranks, and tokens travel to them."""
    if facts.degrees.shard == 1 or shape_of(facts).expert_count == 1:
        return False
    model = skeleton(facts.model)
    return model is not None and _divides(model, facts.degrees.shard * facts.degrees.context)


@functools.lru_cache(maxsize=64)
def _divides(model: nn.Module, ranks: int) -> bool:
    return bool(divisible_experts(model, ranks))


@dataclass(frozen=True)
class Trained:
    """Bytes of gradients and moments on one rank."""

    moments: int
    gradients: int
    """Bytes of the gradients of all trained weights."""
    layers: tuple[int, ...]
    """Bytes of the gradients of one layer, for each kind of layer in `Shape.kinds`."""
    end: int
    """Bytes of the gradient of the embedding or of the head."""

    @property
    def layer(self) -> int:
        """Bytes of the gradients of the largest layer."""
        return max(self.layers)

    def copies(self, gradients: int) -> int:
        """Bytes of a copy of some weights, their gradients and their moments. `gradients`: bytes of these
        gradients."""
        return int(gradients * (2 + self.moments / max(self.gradients, 1)))


def bytes_of_rank(facts: Facts, shape: Shape) -> tuple[int, Trained]:
    """Bytes of weights, and of gradients and moments, on one rank. Adapters and the parts for images are whole on each
    rank."""
    weights, trained = _parameter_bytes(facts, shape)
    parts = facts.degrees.shard
    if parts == 1:
        return weights, trained
    beside = beside_of(facts)
    whole = BYTES.get(facts.dtype, 4) * beside.parameters
    if adapters := facts.execution.adapters:
        whole += 4 * adapters.all
        return -(-(weights - whole) // parts) + whole, trained
    share = 1 / parts + (1 - 1 / parts) * beside.trained(facts) / trained_parameters(facts)
    moments, gradients = (math.ceil(size * share) for size in (trained.moments, trained.gradients))
    layers = tuple(-(-size // parts) for size in trained.layers)
    return -(-(weights - whole) // parts) + whole, Trained(moments, gradients, layers, -(-trained.end // parts))


def _parameter_bytes(facts: Facts, shape: Shape) -> tuple[int, Trained]:
    """Bytes of weights, and of gradients and moments, if nothing is divided over ranks."""
    number, run, kept = BYTES.get(facts.dtype, 4), facts.execution, facts.optimizer
    moment = kept.size or number
    total, beside, adapters = shape.linear_parameters + shape.other_parameters, beside_of(facts), run.adapters
    if adapters is None:
        total += beside.trained(facts)
        frozen = beside.parameters - beside.trained(facts)
        # Divided weights are gathered in autocast's dtype, so autocast makes no copies.
        cast = facts.dtype == "float32" and facts.compute_dtype != "float32" and facts.degrees.shard == 1
        copies = 2 * total if cast else 0
        # Only full fine-tuning has parameters outside of hidden matrices: adapters of linears are matrices.
        others = kept.moments if kept.others is None else kept.others
        extra = (shape.other_parameters + shape.expert_parameters) * (others - kept.moments) * moment
        layers = tuple(number * kind.parameters for kind in shape.kinds)
        end = number * shape.largest_table
        trained = Trained(int(total * kept.moments * moment + extra), number * total, layers, end)
        return number * (total + frozen) + copies, trained
    # Fused adapters have copies in the dtype of matmuls beside the frozen weights, or with quantized weights beside
    # the experts only.
    copied = adapters.experts if run.quantized else adapters.all - adapters.images
    packed = number * copied if run.fused else 0
    size = 4 * adapters.all
    trained = Trained(int(size * kept.moments), size, (size // shape.layers,) * len(shape.kinds), 0)
    return frozen_bytes(facts, shape) + packed + size, trained


def frozen_bytes(facts: Facts, shape: Shape) -> int:
    """Bytes of the weights of a frozen model or base."""
    number, quantized = BYTES.get(facts.dtype, 4), facts.execution.quantized
    linear, around, end = float(number), shape.other_parameters * number, shape.vocabulary * shape.hidden
    if quantized:
        linear = quantized.bytes
        if not quantized.experts:
            around += int(shape.expert_parameters * (number - linear))
        elif not quantized.linears:
            around += int((shape.linear_parameters - shape.expert_parameters) * (number - linear))
        if not shape.tied:
            around -= end * (number - 1) * (quantized.head + quantized.embeddings)
        else:  # one byte a weight replaces the shared tensor, or a head in fp8 becomes a second tensor
            around += end * ((1 - number) if quantized.embeddings else int(quantized.head))
    around += beside_of(facts).parameters * number
    return int(shape.linear_parameters * linear + around)


def exchange_bytes(facts: Facts) -> tuple[int, int]:
    """Bytes that a rank holds to exchange weights and gradients with other ranks: in the whole step, and in addition
    in the layers' backward pass. See the module's docstring."""
    shape, degrees = shape_of(facts), facts.degrees
    if degrees.ranks == 1:
        return 0, 0
    if degrees.shard == 1:
        return facts.sum_bytes * trained_parameters(facts), 0
    # The embedding is whole only in its own forward pass, when memory is far below its peak. The head's weight may be
    # the same tensor. It is whole from the end of the forward pass until its gradient is computed.
    # A layer is whole while it runs, and the next layer is in a buffer. Copy engines keep two buffers.
    head, layer = shape.vocabulary * shape.hidden, gathered_parameters(facts, shape) / shape.layers
    held = 3 if facts.device == "cuda" else 2
    whole = int(number_bytes(facts) * head + held * layer * linear_bytes(facts))
    if facts.execution.adapters:  # adapters' gradients are added up as replicas do it
        return whole + facts.sum_bytes * trained_parameters(facts), 0
    return whole, int(layer * (number_bytes(facts) + 4))


def share_in_slots(facts: Facts) -> float:
    """The share of the moments for which the device has slots: of weights of each size, OptimizerState.slots."""
    if (model := skeleton(facts.model)) is None:
        return 1.0
    counts = Counter(weight.numel() for weight in model.parameters())
    held = sum(min(count, facts.optimizer.slots) * size for size, count in counts.items())
    return held / sum(count * size for size, count in counts.items())
