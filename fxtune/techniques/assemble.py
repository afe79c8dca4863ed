"""Builds the model of a run in one function, from top to bottom: config, weights, modules, techniques, ranks.

Techniques are applied in the order of Pipeline's fields. Comments there give the reasons for the order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from fxtune.distributed.sharding import materialize
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.facts.options import AUTO, WeightFormat
from fxtune.models import load as models
from fxtune.models.kinds.image_decoder.parts import for_images
from fxtune.models.kinds.image_decoder.patch_embedding import replace_patch_embeddings
from fxtune.models.load import Init, ModelConfig
from fxtune.models.peft_adapter import merged
from fxtune.models.prepared import PreparedModel
from fxtune.models.routers import observe_routers
from fxtune.models.shards import pieces_of
from fxtune.models.structure import beside_text, skeleton
from fxtune.models.weights import fits_whole
from fxtune.techniques import divided_weights
from fxtune.techniques.attention import vision_encoder
from fxtune.techniques.experts.full import compute_experts
from fxtune.techniques.lora import targets, trained_tokens
from fxtune.techniques.pipeline import Pipeline, acting
from fxtune.techniques.quantize.selection import takes_rows
from fxtune.techniques.quantize.technique import Quantize


def assemble(
    techniques: Pipeline,
    model: ModelConfig,
    hf_config: Any,
    world: World,
    seed: int,
    special_tokens: Sequence[int] = (),
    trains_images: bool = False,
) -> PreparedModel:
    """Build the model of `hf_config` and apply each enabled technique of `techniques`, a resolved pipeline.

    `hf_config` comes from load_config() and is not changed. `seed` decides the random numbers of new weights and
    adapters. `special_tokens`: the ids of the data's special tokens, among which techniques.lora.train_tokens=auto
    chooses. `trains_images`: whether full fine-tuning trains the parts for images, too.
    """
    lora, quantize, divided = techniques.lora, techniques.quantize, world.degrees.shard > 1
    if model.adapter and not lora.enabled:
        raise ConfigError(
            f"model.adapter={model.adapter}, but techniques.lora.enabled=false. Set it to true, or remove the adapter."
        )

    # The adapters' trained tokens and the adapter to start from are checked before any weight is read.
    tokenizer = cache(partial(models.load_tokenizer, model))
    if lora.enabled:
        lora.find_tokens(tokenizer, model.adapter, model.add_tokens)
        shape = skeleton(hf_config.to_dict()) if model.add_tokens else None
        if shape is not None and (reasons := targets.refusals(shape, lora, lora.token_ids)):
            raise ConfigError("\n".join(f"techniques.lora.{reason}" for reason in reasons))
    if model.adapter:
        lora.check_start(model.adapter)

    # Techniques change the config before the constructors of modules read it.
    hf_config = copy.deepcopy(hf_config)
    for _, technique in techniques.enabled():
        technique.configure(hf_config)

    # The model of transformers. Weights that are divided, or quantized while they are read, have no memory yet.
    by_rows = not divided and _quantizes_rows(techniques, model, hf_config, world)
    if by_rows and lora.train_tokens == AUTO:
        raise ConfigError(
            "techniques.lora.train_tokens: auto looks at the rows of the base, which is quantized here while it is "
            "read. Name the tokens."
        )
    built = models.build(model, hf_config, world, seed, quantize.enabled, by_rows)
    source = models.WeightSource(model, hf_config, built, world, seed)

    # Replace modules by modules that compute the same in another way. transformers calls torch's grouped GEMM, which
    # does not run in float32 for weights without memory.
    if divided or not (lora.enabled or quantize.enabled):
        compute_experts(built.module, everywhere=divided)
    replace_patch_embeddings(built.module)
    vision_encoder.prepare(built.module)
    built.reads_sizes_on_host = True
    if lora.enabled:
        lora.choose_tokens(built.module, tokenizer, special_tokens)
    built.routers = observe_routers(built.module, world.device)
    if not lora.enabled:  # with adapters the whole base is frozen
        trained = {*for_images(built.module)} if trains_images else set()
        for parameter in beside_text(built.module):
            parameter.requires_grad_(parameter in trained)

    # Apply the techniques under training's autocast: here and in verify() adapters are compared with the base under
    # the same autocast.
    elsewhere: dict[str, tuple[int, ...]] = {}
    with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for name, technique in techniques.enabled():
            with techniques.precision.context(world.device), acting(name, f"Building the model: {name}"):
                if technique is quantize and by_rows and quantize.type is not WeightFormat.fp8:
                    elsewhere = quantize.apply_as_read(built, world, source.each)
                    continue
                technique.apply(built, world)
            if technique is lora and model.adapter:
                lora.start_from(built, model.adapter)

    # Give memory to weights that have none, divided over ranks or whole, and fill them with their values.
    if by_rows or divided:
        pieces = pieces_of(built.module)
        if by_rows:
            materialize(built.module, world.device)
        else:
            built.sharding = divided_weights.divide(built.module, world, techniques.precision)
        source.fill(pieces, elsewhere)
        if lora.enabled and not model.adapter:
            trained_tokens.read_rows(built.module)
    return built


def assemble_frozen(
    techniques: Pipeline, model: ModelConfig, hf_config: Any, world: World, seed: int
) -> PreparedModel:
    """assemble() for a model that is not trained, in evaluation mode. Its adapter is added to its weights before they
    are quantized."""
    quantize = techniques.quantize
    if model.adapter:
        techniques = replace(techniques, quantize=Quantize())
    built = assemble(techniques, replace(model, adapter=None), hf_config, world, seed)
    if model.adapter:
        built.module = merged(built.module, model.adapter, model.key)
        if quantize.enabled:
            quantize.apply(built, world)
    built.module.eval().requires_grad_(False)
    return built


def _quantizes_rows(techniques: Pipeline, model: ModelConfig, hf_config: Any, world: World) -> bool:
    """Whether weights are quantized while they are read or drawn: if the unquantized model does not fit on some rank
    (fits_whole()), or if the checkpoint's experts stay in MXFP4."""
    if models.ships_mxfp4(model, hf_config):
        return techniques.keeps_mxfp4(hf_config.to_dict())
    if not techniques.quantize.enabled or not takes_rows(techniques.lora, skeleton(hf_config.to_dict())):
        return False
    dtype = models.resolve_dtype(model, world.capability)
    large = not fits_whole(hf_config, dtype, world, model.trust_remote_code, model.init is Init.random)
    return any(world.gather(large, "choosing how weights are read"))
