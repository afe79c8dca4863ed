"""Weights that are divided over ranks (`parallel.shard`): what cannot be combined with them, and the call that divides
a built model. How they are divided: distributed/sharding.py; how each rank reads its part: models/shards.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fxtune.distributed.chunks import is_divided, local
from fxtune.distributed.sharding import Sharding, shard
from fxtune.distributed.world import World
from fxtune.facts.options import Scope, WeightFormat
from fxtune.facts.run import Facts
from fxtune.models.structure import decoder_layers, for_images, output_head, skeleton
from fxtune.techniques.base import Evidence
from fxtune.techniques.lora.targets import select
from fxtune.techniques.precision import Precision
from fxtune.techniques.quantize.check import OLDEST, WITHOUT_FP8


def refusals(facts: Facts) -> Iterator[str]:
    """Each reason why weights cannot be divided under `facts`, with what to change."""
    techniques, whole = facts.techniques, "or parallel.shard=1"
    lora, compile = techniques.lora, techniques.compile
    if techniques.quantize.enabled and techniques.quantize.type is not WeightFormat.fp8:
        runs_fp8 = facts.device == "cuda" and (facts.capability or OLDEST["fp8"]) >= OLDEST["fp8"]
        change = f"techniques.quantize.type=fp8, techniques.quantize.enabled=false, {whole}"
        yield (
            f"weights in {techniques.quantize.type.value} are packed, and not cut by rows. Set "
            f"{change if runs_fp8 else WITHOUT_FP8}."
        )
    if lora.enabled and (lora.factored or lora.dora):
        kind = "DoRA" if lora.dora else lora.init.value
        change = "techniques.lora.dora=false" if lora.dora else "techniques.lora.init=default"
        yield f"{kind} computes adapters from whole weights, which no rank has. Set {change}, {whole}."
    if lora.enabled and lora.modules_to_save:
        yield f"techniques.lora.modules_to_save copies whole weights, which no rank has. Remove it, {whole}."
    if lora.enabled and lora.train_tokens:
        yield f"techniques.lora.train_tokens copies rows of whole weights, which no rank has. Set it to null, {whole}."
    if lora.enabled and (model := skeleton(facts.model)) is not None and select(model, lora).experts:
        yield (
            "peft adds adapters of experts to whole weights in each pass. Set "
            f"techniques.lora.exclude_modules=[experts], {whole}."
        )
    if compile.enabled and compile.scope is Scope.model:
        yield (
            "with one graph for all layers there is no point between layers at which to gather weights. Set "
            f"techniques.compile.scope=layers, {whole}."
        )


def divide(model: Any, world: World, precision: Precision) -> Sharding:
    """Divide the weights of a built model over the ranks, in place. Vectors, adapters and image parts stay whole on
    each rank: a rank whose micro-batch has no image skips the image parts, so it could not take part in gathers."""
    embedding, head = model.get_input_embeddings(), output_head(model)
    shared = {id(parameter) for parameter in embedding.parameters()}
    tied = head is None or any(id(parameter) in shared for parameter in head.parameters())
    images = {*for_images(model)}
    whole = [
        parameter
        for parameter in model.parameters()
        if parameter.dim() < 2 or not parameter.is_meta or parameter in images
    ]
    if any(parameter.requires_grad for parameter in images):
        embedding.register_forward_hook(_with_gradient)
    autocast = getattr(torch, precision.autocast.value) if precision.casts else None
    return shard(model, decoder_layers(model), None if tied else embedding, whole, world, autocast)


def _with_gradient(_: nn.Module, __: Any, embedded: torch.Tensor) -> torch.Tensor:
    """Require a gradient of the embeddings. Then the backward pass of a rank without images goes through all layers,
    as on ranks whose image features have a gradient: all ranks gather each layer together."""
    return embedded.requires_grad_() if torch.is_grad_enabled() and embedded.is_leaf else embedded


def observe(model: nn.Module, world: World) -> Evidence:
    """How many bytes of the model each rank holds between two passes. All ranks call it together."""
    parts = world.weights_mesh.size(-1)
    divided = [parameter for parameter in model.parameters() if is_divided(parameter)]
    held = sum(local(parameter).nbytes for parameter in divided)
    total = sum(parameter.nbytes for parameter in divided)
    whole = sum(parameter.nbytes for parameter in model.parameters() if not is_divided(parameter))
    # Rows are not halved: the first ranks may hold one row more than the last.
    spare = sum(parameter.nbytes // len(parameter) for parameter in divided)
    most = max(world.gather(held, "comparing what ranks hold"))
    return Evidence(
        "parallel",
        f"weights divided over {parts} ranks",
        f"at most {most:,} of {total:,} bytes of {len(divided)} matrices on a rank, and {whole:,} bytes of "
        "undivided weights on each",
        bool(divided) and most <= total / parts + spare,
    )
