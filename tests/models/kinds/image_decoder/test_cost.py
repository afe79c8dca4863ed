"""The FLOPs of vision encoders and projectors against torch's count, and the parts of their memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import image_models
from support.forecasts import allocated
from support.image_models import FAMILIES, IMAGE_TOKEN
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from fxtune.distributed.parallel import Degrees
from fxtune.estimate.memory import forecast
from fxtune.estimate.weights import beside_of, trained_parameters
from fxtune.facts.options import LoraOptions
from fxtune.facts.recomputation import RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.kinds.image_decoder.cost import BATCHES, ImageParts
from fxtune.models.kinds.image_decoder.parts import for_images, image_modules, projectors
from fxtune.models.kinds.image_decoder.patch_embedding import replace_patch_embeddings
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.structure import beside_text, is_adapter
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.lora.targets import select
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.pipeline import Pipeline
from fxtune.tracking.throughput import training_cost

SIZES = {"gemma4": (3, 3), "llava_onevision": (1, 2)}
"""Rows and columns of an image in features: gemma4's has no padding, and Qwen2.5's has whole windows."""


def parts_of(model):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return ImageParts.of(images_of(base.config), base)


def image_cost(model, forward_passes=0):
    return parts_of(model).training_cost(forward_passes)


def image_memory(facts, plan, number, hidden):
    return beside_of(facts).memory(facts, plan, number, hidden)


def model_of(family):
    model = image_models.model(family)
    model.set_attn_implementation("eager")
    if family == "llava":
        model.config.vision_feature_layer = -1  # by default no gradient reaches the last layer
    return model.requires_grad_(False)


def two_images(family, model):
    """(arguments of get_image_features, arguments of EncoderShape.work) for two images; one for Pixtral, whose eager
    attention also computes pairs of two images, and masks them."""
    seeds = (0,) if family in ("pixtral", "mistral3") else (0, 1)
    shown = [image_models.document(family, model, [2, SIZES.get(family, (2, 4)), 3], seed) for seed in seeds]
    tensors = [document.images for document in shown]
    features = np.array([int((document.ids == IMAGE_TOKEN).sum()) for document in shown])
    sizes = [images.get("image_sizes", torch.zeros(1, 2))[0].long().tolist() for images in tensors]
    return images_of(model.config).merge(model.config)(tensors), (features, *np.array(sizes).T)


ANGLES = 1e-3
"""The oldest transformers computes the angles of RoPE in a matmul, which torch counts."""


def counted(model, images, backward):
    """FLOPs of the vision encoder and the projector, by torch, without Gemma 4's averages of patches."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    counter = FlopCounterMode(display=False)
    with counter:
        found = base.model.get_image_features(**images, return_dict=True)
        if backward:
            parts = [found.pooler_output, getattr(found, "deepstack_features", None) or []]
            sum(part.sum() for part in _flat(parts)).backward()
    averages = 0
    if base.config.model_type == "gemma4":
        many, patches = images["pixel_values"].shape[:2]
        vision = base.config.vision_config
        averages = 2 * many * patches * (patches // vision.pooling_kernel_size**2) * vision.hidden_size
    return counter.get_total_flops() - averages * (1 + backward)


def _flat(parts):
    for part in parts:
        yield from [part] if isinstance(part, torch.Tensor) else _flat(part)


def require_gradients_behind_the_embedding(model):
    for module in parts_of(model).embedding:
        module.register_forward_hook(lambda _, inputs, output: output.requires_grad_())


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_of_a_frozen_vision_encoder_are_those_of_a_forward_pass(family):
    model = model_of(family)
    images, sizes = two_images(family, model)
    cost = image_cost(model)
    work = cost.shape.work(*sizes)
    assert cost.flops(work) == pytest.approx(counted(model, images, backward=False), rel=ANGLES)
    assert image_cost(model, forward_passes=1).flops(work) == 2 * cost.flops(work)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_flops_of_a_trained_vision_encoder(family, lora):
    model = model_of(family)
    images, sizes = two_images(family, model)
    parts = image_modules(model)
    if lora:
        names = [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module in parts
            if not any(module is own for own in parts_of(model).embedding)
        ]
        model = get_peft_model(model, LoraConfig(r=3, target_modules=names))
        require_gradients_behind_the_embedding(model)
    else:
        for part in parts:
            part.requires_grad_(True)
    cost = image_cost(model)
    # Eager attention has a backward pass of 2, not of 2.5: it does not compute the scores again.
    work = cost.shape.work(*sizes)
    work_done = cost.flops(work) - 0.5 / 3.5 * cost.per_pair * work.pairs
    assert work_done == pytest.approx(counted(model, images, backward=True), rel=ANGLES)


@pytest.mark.parametrize("family", FAMILIES)
def test_patch_embeddings_as_products_cost_the_same(family):
    model = model_of(family)
    before = image_cost(model)
    replace_patch_embeddings(model)
    after = image_cost(model)
    assert after.per_patch == before.per_patch > 0
    assert after.per_position == before.per_position


def test_a_projector_that_is_trained_alone_sends_no_gradient_into_the_vision_encoder():
    model = model_of("qwen3_vl")
    frozen = image_cost(model)
    for part in projectors(model):
        part.requires_grad_(True)
    cost = image_cost(model)
    assert cost.per_feature == 3 * frozen.per_feature
    assert (cost.per_position, cost.per_patch, cost.per_pair) == (
        frozen.per_position,
        frozen.per_patch,
        frozen.per_pair,
    )


def test_a_decoder_does_not_count_the_linears_of_its_vision_encoder_for_tokens():
    model = model_of("qwen2_5_vl")
    alone = training_cost(model)
    model.model.visual = torch.nn.ModuleDict({"merger": torch.nn.Identity()})
    assert training_cost(model).per_token == alone.per_token
    assert alone.image_cost.per_position > 0


def facts_of(family, *, lora=None, compile=None, **more):
    options = Compile(**({"enabled": False} if compile is None else compile))
    techniques = Pipeline(lora=Lora(**({"enabled": False} if lora is None else lora)), compile=options)
    known = dict(sequence_length=64, rows=(64,), dtype="bfloat16", techniques=techniques)
    return Facts(device="cuda", **{"model": image_models.config(family).to_dict(), **known, **more})


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family):
    model, numbers = image_models.model(family), beside_of(facts_of(family))
    assert numbers.parameters == sum(weight.numel() for weight in beside_text(model))
    assert numbers.trainable == sum(weight.numel() for weight in for_images(model))
    images, sizes = two_images(family, model)
    work = numbers.shape.work(*sizes)
    assert numbers.pixels * work.patches == images["pixel_values"].numel()
    frozen, trained = (facts_of(family, trains_images=trains) for trains in (False, True))
    assert trained_parameters(trained) - trained_parameters(frozen) == numbers.trainable
    weights = [forecast(facts, RecomputePlan()).weights for facts in (frozen, trained)]
    assert weights == [2 * sum(weight.numel() for weight in model.parameters())] * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [("vision",), ("projector",)])
def test_adapters_are_those_of_the_model(family, parts):
    options = dict(enabled=True, r=3, **dict.fromkeys(parts, True))
    model = image_models.model(family)
    alone = {id(module) for module in image_modules(model)}
    paths = [path for path in select(model, LoraOptions(**options)).modules if id(model.get_submodule(path)) in alone]
    if not paths:
        assert facts_of(family, lora=options).execution.adapters.images == 0
        return
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=paths))
    made = sum(weight.numel() for name, weight in adapted.named_parameters() if is_adapter(name))
    facts = facts_of(family, lora=options)
    assert facts.execution.adapters.images == made
    plain = facts_of(family, lora={"enabled": True, "r": 3})
    assert trained_parameters(facts) - trained_parameters(plain) == made
    assert forecast(facts, RecomputePlan()).weights - forecast(plain, RecomputePlan()).weights == 4 * made


def test_memory_of_a_frozen_vision_encoder_is_its_pixels_features_and_one_layer():
    """Qwen2.5-VL with 16 features, 64 patches of 96 numbers; h = q = 16, i = 24."""
    facts = facts_of("qwen2_5_vl", image_features=16)
    found = image_memory(facts, RecomputePlan(), 2, hidden=32)
    assert found.held == 64 * 96 * 2 * BATCHES + 16 * 32 * 2
    assert found.peak == 64 * (2 * 7 * 16 + 4 * 6 * 16)
    compiled = facts_of("qwen2_5_vl", image_features=16, compile={"enabled": True})
    assert image_memory(compiled, RecomputePlan(), 2, 32).peak == 64 * 2 * max(9 * 16, 4 * 16 + 3 * 24)
    # Rows are as full as the fullest, and no fuller than rows.
    assert (
        image_memory(facts_of("qwen2_5_vl", image_features=16, micro_batch_size=2), RecomputePlan(), 2, 32).peak
        == 2 * found.peak
    )
    assert image_memory(facts_of("qwen2_5_vl", image_features=100), RecomputePlan(), 2, 32).peak == 4 * found.peak
    assert image_memory(facts_of("qwen2_5_vl"), RecomputePlan(), 2, 32).held == 0
    # Qwen3's decoder gets features for its layers, too.
    deep = image_memory(facts_of("qwen3_vl", image_features=16), RecomputePlan(), 2, hidden=32)
    assert deep.held == found.held + 16 * 32 * 2


def test_a_vision_encoder_with_gradients_keeps_its_layers():
    frozen = image_memory(facts_of("qwen2_5_vl", image_features=16), RecomputePlan(), 2, 32)
    for facts in (
        facts_of("qwen2_5_vl", image_features=16, trains_images=True),
        facts_of("qwen2_5_vl", image_features=16, lora={"enabled": True, "vision": True}),
    ):
        assert image_memory(facts, RecomputePlan(), 2, 32).held == frozen.held + 2 * 64 * (
            2 * (10 * 16 + 4 * 24) + 4 * 2 * 16
        )
        assert image_memory(facts, RecomputePlan("input"), 2, 32).held == frozen.held + 2 * 64 * 2 * 16
        mixed = RecomputePlan(mix=(("wide", 1), ("everything", 1)))
        assert image_memory(facts, mixed, 2, 32).held == frozen.held + 2 * 64 * 2 * (7 * 16 + 2 * 24)
    projector = facts_of("qwen2_5_vl", image_features=16, lora={"enabled": True, "projector": True})
    assert image_memory(projector, RecomputePlan(), 2, 32) == frozen


def test_images_add_to_the_peak_of_a_step():
    plan = RecomputePlan()
    without, with_images = (forecast(facts_of("gemma3", image_features=count), plan) for count in (0, 64))
    assert with_images.weights == without.weights
    assert with_images.images > 0 == without.images
    assert with_images.passing == max(without.passing, with_images.images_peak) + with_images.images
    assert with_images.parts["images"] == with_images.images
    assert sum(with_images.parts.values()) == with_images.device


def test_parts_for_images_are_whole_on_each_rank():
    divided = Degrees(replicate=1, shard=2)
    for more in ({}, {"trains_images": True}):
        alone, shared, text = (
            forecast(facts_of("gemma3", **{**more, **other}), RecomputePlan())
            for other in ({}, {"degrees": divided}, {"degrees": divided, "trains_images": False})
        )
        beside = 2 * beside_of(facts_of("gemma3")).parameters
        assert shared.weights - beside == pytest.approx((alone.weights - beside) / 2, abs=2)
        if more:
            trained = beside_of(facts_of("gemma3")).trainable
            assert shared.trained - text.trained == pytest.approx(6 * trained, rel=0.01)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava"])
def test_memory_is_what_a_vision_encoder_allocates(family):
    """On a CPU, where a layer of Qwen's also joins the results of its images."""

    def built(layers):
        config = image_models.config(family)
        vision = config.vision_config
        vision.hidden_size, vision.intermediate_size = 256, 688
        names = ("depth", "num_heads") if family == "qwen2_5_vl" else ("num_hidden_layers", "num_attention_heads")
        for name, value in zip(names, (layers, 4), strict=True):
            setattr(vision, name, value)
        if family != "qwen2_5_vl":
            vision.image_size = 448
        if family == "gemma3":
            config.mm_tokens_per_image = 64
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)

    def memory(layers, trains):
        model = built(layers).requires_grad_(trains)
        kind, generator = kind_of(model.config), torch.Generator().manual_seed(0)
        images = [image_models.image(family, model.config, (16, 16), generator)]
        if family != "qwen2_5_vl":
            images = [{"pixel_values": torch.randn(1, 3, 448, 448)}]
        images = kind.images.merge(model.config)(images)
        seen = allocated(lambda: model.model.get_image_features(**images, return_dict=True).pooler_output)
        features = kind.images.shape(model.config).tile or 256
        facts = Facts(
            device="cpu",
            model=model.config.to_dict(),
            dtype="bfloat16",
            sequence_length=features,
            image_features=features,
            trains_images=trains,
            techniques=Pipeline(),
        )
        return seen, image_memory(facts, RecomputePlan(), 2, 32)

    (peak, _), found = memory(2, trains=False)
    assert found.peak == pytest.approx(peak, rel=0.05)
    (two, found_of_two), (four, found_of_four) = (memory(layers, trains=True) for layers in (2, 4))
    assert found_of_four.held - found_of_two.held == pytest.approx(four[1] - two[1], rel=0.05)
