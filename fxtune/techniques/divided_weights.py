"""Weights that are divided over ranks (`parallel.shard`): what cannot be combined with them, and the call that divides
a built model. distributed/sharding.py divides the weights, and models/shards.py reads each rank's part.

If transformers describes the experts of a mixture, they are divided by expert and stay on their ranks: tokens travel
to them (kernels/token_exchange.py). All other weights are gathered for each layer.
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
from fxtune.kernels.token_exchange import Exchange, set_tokens
from fxtune.models.experts import divisible_experts
from fxtune.models.kinds.image_decoder.parts import for_images
from fxtune.models.mixers import precise_parameters
from fxtune.models.structure import backbone, decoder_layers, observing, output_head, skeleton
from fxtune.system.process.profiler import OperatorCounter
from fxtune.techniques.base import Evidence
from fxtune.techniques.experts.run import EXCHANGE, exchange_of
from fxtune.techniques.lora.targets import select
from fxtune.techniques.precision import Precision
from fxtune.techniques.quantize.check import OLDEST, WITHOUT_FP8
from fxtune.techniques.quantize.selection import takes_experts
from fxtune.upstream import torch as upstream

GATHER, SUM = "fxtune.gather_tokens", "fxtune.sum_tokens"
"""GATHER sends hidden states and routing weights to the experts. SUM sends the experts' outputs back."""


def refusals(facts: Facts) -> Iterator[str]:
    """Yield each reason why weights cannot be divided under `facts`, with what to change."""
    techniques, whole = facts.techniques, "or parallel.shard=1"
    lora, compile, quantize = techniques.lora, techniques.compile, techniques.quantize
    keeps_shipped = quantize.type is WeightFormat.mxfp4 and facts.ships_mxfp4
    if quantize.enabled and quantize.type is not WeightFormat.fp8 and not keeps_shipped:
        runs_fp8 = facts.device == "cuda" and (facts.capability or OLDEST["fp8"]) >= OLDEST["fp8"]
        change = f"techniques.quantize.type=fp8, techniques.quantize.enabled=false, {whole}"
        yield (
            f"weights in {quantize.type.value} are packed, and not cut by rows. Set "
            f"{change if runs_fp8 else WITHOUT_FP8}."
        )
    if facts.adds_tokens:
        yield f"weights with rows for model.add_tokens cannot grow where they are divided. Remove it, {whole}."
    keeps_mxfp4 = lora.enabled and quantize.enabled and quantize.type is WeightFormat.mxfp4
    if facts.ships_mxfp4 and not (keeps_mxfp4 and takes_experts(quantize, facts)):
        yield (
            "ranks read the weights row by row, and this checkpoint has its experts in MXFP4, which are unpacked as "
            "whole matrices. Set techniques.quantize.enabled=true and techniques.quantize.type=mxfp4, or save the "
            f"model in 16 bits with transformers first, {whole}."
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
        ranks, without = facts.degrees.shard * facts.degrees.context, "techniques.lora.exclude_modules=[experts]"
        if not divisible_experts(model, ranks):
            yield (
                f"experts with adapters are divided by expert, and {ranks} ranks cannot have equally many experts "
                f"(or transformers does not describe them). Set another number of ranks, {without}, {whole}."
            )
    if compile.enabled and compile.scope is Scope.model:
        yield (
            "with one graph for all layers there is no point between layers at which to gather weights. Set "
            f"techniques.compile.scope=layers, {whole}."
        )


def divide(model: Any, world: World, precision: Precision) -> Sharding:
    """Divide the weights of a built model over the ranks, in place. Vectors, adapters and parts for images stay whole
    on each rank. A rank whose micro-batch has no image skips the parts for images and could not help gather them."""
    embedding, head = model.get_input_embeddings(), output_head(model)
    shared = {id(parameter) for parameter in embedding.parameters()}
    tied = head is None or any(id(parameter) in shared for parameter in head.parameters())
    images = {*for_images(model)}
    undivided = {*images, *precise_parameters(model)}  # torch divides parameters of one dtype together
    whole = [
        parameter
        for parameter in model.parameters()
        if parameter.dim() < 2 or not parameter.is_meta or parameter in undivided
    ]
    if any(parameter.requires_grad for parameter in images):
        embedding.register_forward_hook(_with_gradient)
    autocast = getattr(torch, precision.autocast.value) if precision.casts else None
    experts = divisible_experts(model, world.weights_mesh.size(-1))
    made = shard(model, decoder_layers(model), None if tied else embedding, whole, world, autocast, experts)
    if experts:
        _exchange_tokens(model, experts, world)
    return made


def _exchange_tokens(model: Any, experts: list[Any], world: World) -> None:
    """Let tokens travel to the divided `experts` in each forward pass of `model`."""
    group = world.weights_group
    members = torch.distributed.get_process_group_ranks(group)

    def count_tokens(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        rows, tokens = next(tensor.shape[:2] for tensor in given if tensor is not None)
        counts = world.exchange([rows * tokens], "counting tokens")
        set_tokens(group.group_name, [int(counts[member][0]) for member in members])

    upstream.keep_operator_order()
    for module in experts:
        count = module.num_experts // group.size()
        setattr(module, EXCHANGE, Exchange(group.group_name, group.rank() * count, count))
    backbone(model).register_forward_pre_hook(count_tokens, with_kwargs=True)


def _with_gradient(_: nn.Module, __: Any, embedded: torch.Tensor) -> torch.Tensor:
    """A hook that makes the embeddings require a gradient. Ranks whose image features have a gradient run the backward
    pass of all layers. With the hook ranks without images do the same, so all ranks gather each layer together."""
    return embedded.requires_grad_() if torch.is_grad_enabled() and embedded.is_leaf else embedded


def observe(model: nn.Module, probe: dict[str, Any], sharding: Sharding) -> Iterator[Evidence]:
    """Yield how many bytes of the model each rank holds between two passes, and whether tokens travel to divided
    experts. All ranks call this together, under training's autocast. `probe`: a small row."""
    world = sharding.world
    parts = world.weights_mesh.size(-1)
    divided = [parameter for parameter in model.parameters() if is_divided(parameter)]
    held = sum(local(parameter).nbytes for parameter in divided)
    total = sum(parameter.nbytes for parameter in divided)
    whole = sum(parameter.nbytes for parameter in model.parameters() if not is_divided(parameter))
    # Weights are cut between rows, so the first ranks may hold one row more than the last.
    spare = sum(parameter.nbytes // len(parameter) for parameter in divided)
    most = max(world.gather(held, "comparing what ranks hold"))
    yield Evidence(
        "parallel",
        f"weights divided over {parts} ranks",
        f"at most {most:,} of {total:,} bytes of {len(divided)} matrices on a rank, and {whole:,} bytes of "
        f"undivided weights on each; layers are to be gathered by {sharding.gathered_by}",
        bool(divided) and most <= total / parts + spare,
    )
    if experts := [module for module in model.modules() if exchange_of(module) is not None]:
        yield _observe_experts(model, experts, probe)


def _observe_experts(model: nn.Module, experts: list[nn.Module], probe: dict[str, Any]) -> Evidence:
    """Observe whether this rank holds its part of the experts, and whether tokens travel to each of `experts`."""
    weights = [weight for module in experts for weight in module.parameters(recurse=False) if is_divided(weight)]
    held, total = sum(local(weight).nbytes for weight in weights), sum(weight.nbytes for weight in weights)
    counter = OperatorCounter(lambda name, _: name if name in (GATHER, SUM) else None)
    with observing(model), counter:
        model(**probe)
    gathers, sums = counter.counts[GATHER], counter.counts[SUM]
    exchange, parts = exchange_of(experts[0]), total // held
    assert exchange is not None
    return Evidence(
        "parallel",
        f"experts divided over {parts} ranks, tokens travel to them",
        f"{exchange.experts} of {exchange.experts * parts} experts of a layer on a rank, {held:,} of {total:,} bytes; "
        f"{gathers} exchanges to the experts of {len(experts)} layers and {sums} back in a forward pass",
        (gathers, sums) == (2 * len(experts), len(experts)),
    )
