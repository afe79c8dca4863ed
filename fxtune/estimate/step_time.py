"""Forecasts of time: of a step, and of the overhead of recomputation and offload. Times are FLOPs and bytes divided by
the card's rates (cards.py).

The time of linear attention on a CPU is not known: its reference there goes from token to token.

Overheads assume that each document fills its row. Packed documents are shorter, so keeping attention saves less than
forecast. The backward pass takes 2.5 times the time of attention's forward pass, and the time of the forward matmuls
once for frozen weights or twice for trained weights. A transfer to host memory costs the time by which it is longer
than the layer's computation.

`fastest` searches for the choice with the least overhead that fits. For each pair of levels it gives the higher level
to the largest number of layers that memory allows. The cheapest mix has the two levels around the memory limit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement

from fxtune.estimate.cards import rates
from fxtune.estimate.memory import LayerBytes, Need, forecast, unpacked_bytes
from fxtune.estimate.weights import beside_of, divides_experts, number_bytes, trained_parameters
from fxtune.facts.recomputation import LEVELS, RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.dims import Layer, Shape
from fxtune.models.kinds.image_decoder.encoder_shape import ImageWork

ROWS = 4096
"""The matmuls of an MLP tile with this number of rows are nearly as fast as the matmuls of all rows together."""
SLOWER = 0.02
"""The extra time of tiles of ROWS rows, as a share of the MLP's time. Tiles of twice this size take half of it."""
HALF_RATE = 1250
"""Attention reaches half its rate in documents of this many tokens (FlashAttention-4 on an H200: 460 TFLOP/s at 4,096
tokens, 589 at 65,536)."""
ENCODER_RATE = 0.8
"""The share of the decoder's rate of matmuls that the narrower layers of a vision encoder reach. On an H200 a step of
Qwen2.5-VL with 63 TFLOP of the encoder's products takes 154 ms longer than a step with stored features."""
RECURRENT_RATE = 1 / 7
"""The share of the rate of matmuls that linear attention reaches. Published with FlashQLA for flash-linear-attention
0.5.1 on an H200: 0.47 ms forward and 1.44 ms backward, for 8,192 tokens and 32 heads of 128."""
NARROW_HEADS = 0.85
"""The share of its rate that attention reaches if heads are 64 wide."""
GATED_PASSES = 10.6
"""Numbers that gated activations read and write per token, as a multiple of the MLP's width."""
ADAPTER_PASSES = 1.4
"""Numbers that adapters read and write per token, as a multiple of the sum of all linears' input and output widths."""
EXPERT_GATED_PASSES = 25.0
"""GATED_PASSES for the experts of a mixture. This and the next two constants were measured kernel by kernel, in a step
of a quarter of Qwen3-30B-A3B on one H200 (docs/performance.md). Grouped products of frozen weights reach the rate of
ordinary products."""
EXPERT_ADAPTER_PASSES = 2.2
"""ADAPTER_PASSES for experts, as a multiple of the numbers that adapters' 7 products and two sums read and write."""
ROW_PASSES = 5.0
"""Numbers that are read and written to gather the experts' rows and to add them up, as a multiple of the hidden states
that a token sends to its experts."""
ROUTER_PASSES = 40.0
"""Numbers that a router's softmax and choice read and write, as a multiple of the number of experts (calculated)."""
NORM_PASSES, CLIP_PASSES = 1, 2
"""The norm of the gradient reads each gradient once. Clipping, which is on by default, reads and writes each gradient
once more."""
UNEXPLAINED = 8.4e-3
"""Seconds that a layer's forward and backward pass takes with divided experts beyond the time for its bytes and FLOPs.
Measured were 7 to 9.5 ms, for a quarter of Qwen3-30B-A3B and for the whole model, on two and on four H200
(benchmarks/baselines/h200_mixture_two_cards.json, h200_four_cards.json). So the time hardly depends on the number of
tokens. The cards are not idle meanwhile: on two cards kernels run in 307 of a step's 316 ms. Tokens travel for 32 ms,
23 ms longer than their bytes take. Optimizer and clipping take 18 ms longer than their bytes (docs/distributed.md)."""
UNPACKING = 3.8
"""Bytes that are read and written to dequantize a layer's experts, forward and backward, as a multiple of the bytes of
gate and up in 16 bits. Calculated: 2 passes x 1.5 (with down), and a quarter more for the codes."""
FORWARD_MOVED = 1 / 3
"""The share of a step's elementwise reading and writing that happens in the forward pass (calculated)."""
LAUNCH = 0.4e-3
"""Seconds of a layer's forward and backward pass if it has so few tokens that a GPU waits for the host."""
WORTH = 0.005
"""The share of a step's time that a mix of levels must save, because a second level is one more graph to compile."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer's forward pass for a micro-batch."""

    attention: float
    recurrence: float
    narrow: float
    """Seconds of the products q, k, v and o."""
    wide: float
    """Seconds of the products gate and up."""
    down: float
    rest: float
    """Seconds of norms, RoPE and activations. A fused MLP's act(gate) * up does not count, because it is recomputed at
    any level."""

    @property
    def forward(self) -> float:
        return self.attention + self.recurrence + self.narrow + self.wide + self.down + self.rest

    def backward(self, trained: bool) -> float:
        """Seconds of the layer's backward pass. `trained`: whether the layer's weights have gradients."""
        mixing = 2.5 * self.attention + 3 * self.recurrence
        return mixing + (1 + trained) * (self.narrow + self.wide + self.down) + self.rest

    def recompute(self, level: str) -> float:
        """Seconds to recompute what a layer of `level` does not keep. down's product is never recomputed, because the
        backward pass does not read it."""
        dropped = [self.rest, self.wide, self.narrow, self.attention + self.recurrence]
        return sum(dropped[: LEVELS[::-1].index(level)])


@dataclass(frozen=True)
class Choice:
    plan: RecomputePlan
    need: Need
    overhead: float
    """Seconds that the plan adds to a micro-batch."""
    step: float
    """Seconds that the layers would take for a micro-batch if they kept everything."""


def layer_time(facts: Facts, length: float | None = None, starts: float = 0.0) -> LayerTime:
    """The mean time of a layer. `length`: tokens of a document; None: a document fills its row. `starts`: see
    _attention_seconds()."""
    shape = Shape.of(facts.model)
    length = facts.row_length if length is None else min(length, facts.row_length)
    times = [(_time_of(facts, kind, shape.hidden, length, starts), count) for kind, count in shape.counts]
    names = ("attention", "recurrence", "narrow", "wide", "down", "rest")
    return LayerTime(*(sum(getattr(time, name) * count for time, count in times) / shape.layers for name in names))


def _time_of(facts: Facts, layer: Layer, h: int, length: float, starts: float) -> LayerTime:
    card, tokens, q, k, i = rates(facts), facts.tokens, layer.q, layer.k, layer.inner
    run = facts.execution
    quantized = run.quantized if run.quantized and run.quantized.multiplies else None
    product = mlp_product = tokens * 2 / (card.fp8 if quantized and quantized.linears else card.matmul)
    if layer.experts > 1:
        mlp_product = tokens * 2 / (card.fp8 if quantized and quantized.experts else card.matmul)
    elif run.fp8_products:
        product = mlp_product = tokens * 2 * (run.fp8_products / card.fp8 + (1 - run.fp8_products) / card.matmul)
    numbers = 4 * h + 2 * q + 2 * k + 2 * layer.convolved + (0 if run.fused else 3 * i)
    moved = number_bytes(facts) * tokens * numbers / card.memory
    recurrence = tokens * sum(each.flops[0] for each in layer.recurrences) / (RECURRENT_RATE * card.matmul)
    attention = _attention_seconds(facts, layer, length, starts)
    products = product * layer.narrow, mlp_product * layer.wide, mlp_product * layer.down
    return LayerTime(attention, recurrence, *products, moved)


def _attention_seconds(facts: Facts, layer: Layer, length: float, starts: float) -> float:
    """Seconds of attention in documents of `length` tokens. `starts`: tokens by which a document counts as longer,
    because attention is slower in short documents; 0: no correction. A token attends to half of its document on
    average, and with a window to at most the window's tokens."""
    total = 0.0
    for each in layer.attentions:
        span = min(length, 2.0 * (each.window or length)) + starts
        total += span * each.products / (NARROW_HEADS if starts and each.width <= 64 else 1)
    return facts.tokens * 2 * total / rates(facts).attention


def micro_batch_seconds(
    facts: Facts,
    plan: RecomputePlan,
    supervised: float = 1.0,
    attended: float | None = None,
    forward_passes: int = 0,
    images: ImageWork | None = None,
) -> float:
    """Seconds of one micro-batch of full rows, forward and backward, without the optimizer (see update_seconds()).

    `supervised`: the share of tokens with a target, because only these tokens need the head. `attended`: the length of
    a token's document, averaged over tokens; None: the length of the row. `forward_passes`: the number of further
    passes without gradient, such as a reference's. `images`: the work for the micro-batch's images.
    scripts/study/plan_accuracy.py compares this forecast with measurements on an H200.
    """
    trained = _trained(facts)
    layer, head = _seen(facts, attended), _head_seconds(facts, supervised)
    layers = Shape.of(facts.model).layers
    both = layers * (layer.forward + layer.backward(trained)) + _elementwise(facts) + (2 + trained) * head
    unexplained = layers * UNEXPLAINED if facts.device == "cuda" and divides_experts(facts) else 0.0
    training = max(both + overhead(facts, plan, layer), layers * LAUNCH) + unexplained + image_seconds(facts, images)
    if beside_of(facts).recomputes(facts, plan):
        training += image_seconds(facts, images, trains=False)
    reference = forward_seconds(facts, supervised, attended, images) if forward_passes else 0.0
    if facts.frozen:
        frozen = replace(facts, model=facts.frozen.model, techniques=facts.frozen.techniques, frozen=None)
        training += forward_seconds(frozen, supervised, attended)
    return training + forward_passes * reference


def forward_seconds(
    facts: Facts, supervised: float = 1.0, attended: float | None = None, images: ImageWork | None = None
) -> float:
    """Seconds of a pass without gradient over one micro-batch of full rows. For the arguments see
    micro_batch_seconds()."""
    layer, layers = _seen(facts, attended), Shape.of(facts.model).layers
    pass_ = layers * layer.forward + FORWARD_MOVED * _elementwise(facts) + _head_seconds(facts, supervised)
    return max(pass_, layers * LAUNCH * FORWARD_MOVED) + image_seconds(facts, images, trains=False)


def attention_backward_share(facts: Facts) -> float:
    """The share of a step's time that attention's backward pass takes, if each row is one document."""
    plan = facts.execution.recompute
    return Shape.of(facts.model).layers * 2.5 * _seen(facts, None).attention / micro_batch_seconds(facts, plan)


def image_seconds(facts: Facts, images: ImageWork | None, trains: bool = True) -> float:
    """Seconds of the parts for images; 0 without images. Counts the forward pass, and with `trains` also the backward
    pass of parts that have one."""
    if images is None or facts.stores_images or (work := beside_of(facts).work(facts, images, trains)) is None:
        return 0.0
    card, backward = rates(facts), work.backward
    activations = (FORWARD_MOVED + backward * (1 - FORWARD_MOVED)) * GATED_PASSES * work.inner
    moved = number_bytes(facts) * ((1 + backward) * work.numbers + activations)
    products = work.products / (ENCODER_RATE * card.matmul) + work.attention / card.attention
    return max(products + moved / card.memory, work.layers * LAUNCH * (1 if backward else FORWARD_MOVED))


def _head_seconds(facts: Facts, supervised: float) -> float:
    """Seconds of the output head's forward pass. A head that scores documents has one row and counts as 0."""
    if facts.head != "lm":
        return 0.0
    shape, card = Shape.of(facts.model), rates(facts)
    quantized = facts.execution.quantized
    in_fp8 = quantized is not None and quantized.multiplies and quantized.head
    return 2 * facts.tokens * supervised * shape.hidden * shape.vocabulary / (card.fp8 if in_fp8 else card.matmul)


def _seen(facts: Facts, attended: float | None) -> LayerTime:
    """The time of a layer for documents of `attended` tokens. None: a document fills its row."""
    return layer_time(facts, attended, HALF_RATE)


def update_seconds(facts: Facts) -> float:
    """Seconds of the optimizer's update on one rank. The update reads and writes weights and moments, and reads
    gradients. The norm of the gradient and clipping also read gradients. Moments in host memory are copied."""
    need = forecast(replace(facts, optimizer=replace(facts.optimizer, slots=0)), RecomputePlan())
    copied = forecast(facts, RecomputePlan()).host_moments / rates(facts).link
    weights = trained_parameters(facts) / facts.degrees.shard
    moved = 2 * need.trained + 2 * number_bytes(facts) * weights
    if facts.optimizer.update_bytes:
        moved = facts.optimizer.update_bytes * weights
    passes = NORM_PASSES + (0 if facts.in_backward else CLIP_PASSES)
    seconds = (moved + passes * number_bytes(facts) * weights) / rates(facts).memory
    # Copies of moments in both directions overlap with each other, and with in_backward with the backward pass.
    hidden = 2 * forward_seconds(facts) if copied and facts.in_backward else 0.0
    return max(seconds, copied - hidden)


def _elementwise(facts: Facts) -> float:
    """Seconds in which all layers read and write, forward and backward, beyond matmuls, attention and
    `LayerTime.rest`. Counted are gated activations and adapters, which read each linear's input and add to its output.
    For a mixture also the router, the rows of tokens, and dequantized experts. Trained experts gather the rows of two
    products once more for their weights' gradients. With divided experts, ranks copy the states of all ranks' tokens
    before they send them, and add up the sums that they receive, in both passes."""
    shape, lora = Shape.of(facts.model), facts.execution.adapters is not None
    passes = sum(count * _numbers_moved(facts, kind, shape.hidden, lora) for kind, count in shape.counts)
    mixtures = sum(count for kind, count in shape.counts if kind.experts > 1)
    moved = number_bytes(facts) * facts.tokens * passes
    return (moved + UNPACKING * mixtures * unpacked_bytes(facts, shape)) / rates(facts).memory


def _numbers_moved(facts: Facts, layer: Layer, h: int, lora: bool) -> float:
    """How many numbers a layer reads and writes for a token, for _elementwise()."""
    q, k, i = layer.q, layer.k, layer.inner
    passes = ADAPTER_PASSES * lora * ((h + q) + (h + q + 2 * k))
    if layer.experts > 1:
        rows = layer.used * h
        passes += EXPERT_GATED_PASSES * i + EXPERT_ADAPTER_PASSES * lora * (8 * rows + 3 * i)
        passes += ROW_PASSES * rows + ROUTER_PASSES * layer.experts
        divided, ranks = divides_experts(facts), facts.degrees.shard * facts.degrees.context
        passes += 4 * (ranks + 1) * h * divided
        if not lora:
            passes += 2 * (rows + h)
    else:
        passes += GATED_PASSES * i + ADAPTER_PASSES * lora * ((h + i) + (h + 2 * i))
    return passes


def overhead(facts: Facts, plan: RecomputePlan, layer: LayerTime | None = None) -> float:
    """Seconds that `plan` adds to a micro-batch, compared with layers that keep everything on the device. `layer`: the
    time of a layer; None: its time if each row is one document."""
    shape, card, layer, tokens = Shape.of(facts.model), rates(facts), layer or layer_time(facts), facts.tokens
    backward, layers = layer.backward(_trained(facts)), [LayerBytes(facts, plan, kind) for kind in shape.kinds]

    @functools.cache
    def seconds(kind: int, level: str, sends: bool) -> float:
        again = layer.recompute("wide" if level == "budget" else level)
        if plan.tiles > 1:
            again = max(again, layer.recompute("narrow"))
            again += SLOWER * ROWS * plan.tiles / tokens * (layer.wide + layer.down)
        if not sends:
            return again
        size = layers[kind].sent(level) * tokens
        travel = size / card.link
        # Even hidden copies cost time, because they use the device's memory bandwidth.
        return again + max(travel - layer.forward, 0) + max(travel - backward - again, 0) + 2 * size / card.memory

    return sum(map(seconds, shape.order, plan.levels(shape.layers), plan.sending(shape.layers)), 0.0)


def fastest(facts: Facts, plans: Iterable[tuple[RecomputePlan, tuple[str, ...]]], host: float) -> Choice | None:
    """The choice with the least overhead that fits `facts.free_memory` and `host` bytes of pinned memory; None if no
    choice fits.

    `plans`: combinations of `sent` and `tiles` to try, each with the levels that it allows.
    """
    shape, layer = Shape.of(facts.model), layer_time(facts)
    step = shape.layers * (layer.forward + layer.backward(_trained(facts)))
    choices: list[tuple[float, int, Choice]] = []
    for plan, levels in plans:
        for low, high in combinations_with_replacement(sorted(levels, key=LEVELS.index), 2):
            choice = _mix(facts, plan, low, high, shape.layers, host, step)
            if choice is not None:
                price = choice.overhead + (WORTH * step if choice.plan.mix else 0.0)
                choices.append((price, choice.need.host, choice))
                if choices[-1][:2] == (0, 0):  # no later choice is cheaper
                    return choice
    return min(choices, key=lambda entry: entry[:2])[2] if choices else None


def limit_senders(facts: Facts, plan: RecomputePlan, host: float) -> tuple[RecomputePlan, Need]:
    """`plan`, limited to the sending layers that fit `host` bytes of pinned memory, and the memory that it needs."""
    need = forecast(facts, plan)
    if need.host > host:
        sending = plan.sending(Shape.of(facts.model).layers)
        plan = replace(plan, senders=int(host * sum(sending) // need.host))
        need = forecast(facts, plan)
    return plan, need


def _mix(
    facts: Facts, plan: RecomputePlan, low: str, high: str, layers: int, host: float, step: float
) -> Choice | None:
    """The choice with the most layers of level `high` that fits. Other layers have level `low`. None if the model does
    not fit with `low` for all layers."""

    def choice_of(count: int) -> Choice | None:
        mixed = replace(plan, mix=((low, layers - count), (high, count)))
        if count in (0, layers):
            mixed = replace(plan, level=high if count else low)
        mixed, need = limit_senders(facts, mixed, host)
        fits = need.device <= facts.free_memory and need.host <= host
        return Choice(mixed, need, overhead(facts, mixed), step) if fits else None

    least, most, best = 0, layers, choice_of(0)
    while best is not None and low != high and least < most:
        middle = (least + most + 1) // 2
        if (choice := choice_of(middle)) is None:
            most = middle - 1
        else:
            least, best = middle, choice
    return best


def _trained(facts: Facts) -> bool:
    return facts.execution.adapters is None
