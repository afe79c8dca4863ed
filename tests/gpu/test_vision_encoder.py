"""Towers for images on a GPU, of the shapes of the families' own heads: attention over images and windows, no wait for
the device, and one graph for all sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from support import image_models
from support.architectures import lora
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from fxtune.distributed.world import World
from fxtune.facts.options import Policy
from fxtune.models.kinds.image_decoder.parts import vision_encoders
from fxtune.models.kinds.image_decoder.patch_embedding import replace_patch_embeddings
from fxtune.models.load import DType, load_config
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.assemble import assemble
from fxtune.techniques.attention import vision_encoder
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.report import TOWER
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.pipeline import make_probe

CUDA = torch.device("cuda")
LENGTHS = (64, 64, 16, 4096, 60, 1024, 4)
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="FlashAttention-4 needs a Hopper card or a later one",
)


@pytest.mark.parametrize(
    ("core", "width"),
    [
        *((vision_encoder.flash2, width) for width in (64, 72, 80, 88)),
        # Vision encoders use flash2 alone. flash4 has wrong gradients for heads of 72 and 80 (backends/flash4.py).
        *(pytest.param(vision_encoder.flash4, width, marks=HOPPER) for width in (64, 88)),
    ],
)
def test_attention_both_ways_inside_images(core, width):
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), 3, 16, width, device=CUDA, dtype=torch.bfloat16).requires_grad_()
    bounds = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32, device=CUDA)
    weights = torch.linspace(0, 1, sum(LENGTHS))[:, None, None].to(torch.bfloat16)  # one gradient for both dtypes
    results = []
    for function, dtype in ((core, torch.bfloat16), (vision_encoder.flash4, torch.float32)):
        of_cpu = dtype is torch.float32
        given = qkv.detach().to("cpu" if of_cpu else CUDA, dtype).requires_grad_()
        out = function(*given.unbind(1), bounds.to(given.device), 4096, width**-0.5)
        out.backward(weights.to(given.device, dtype).expand_as(out).contiguous())
        results.append([out.detach().float().cpu(), given.grad.float().cpu()])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() < 2e-2 * expected.norm()


def qwen(dtype=torch.bfloat16):
    vision = dict(depth=4, hidden_size=320, intermediate_size=640, num_heads=4, out_hidden_size=64)
    config = CONFIG_MAPPING["qwen2_5_vl"](
        text_config={**image_models.TEXT, "hidden_size": 64, "head_dim": 16, "rope_parameters": image_models.M_ROPE},
        vision_config={**vision, "fullatt_block_indexes": [1, 3]},
        **image_models.QWEN_TOKENS,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    image_models.draw(model)
    return model.to(CUDA, dtype).eval()


def images(sizes):
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in sizes])
    generator = torch.Generator().manual_seed(1)
    return torch.randn(int(grid.prod(-1).sum()), 1176, generator=generator).to(CUDA, torch.bfloat16), grid


def changed(model):
    replace_patch_embeddings(model)
    vision_encoder.prepare(model)
    vision_encoder.attend_at_once(model, CUDA)
    model.requires_grad_(False)
    return model


def test_features_are_those_of_plain_transformers_and_the_host_never_waits():
    plain = vision_encoders(qwen(torch.float32))[0]
    part = vision_encoders(changed(qwen()))[0]
    assert vision_encoder.attends_at_once(part)
    for sizes in ([(8, 8), (9, 7), (32, 32)], [(4, 4)], [(64, 64), (5, 30)]):
        pixels, grid = images(sizes)
        expected = plain(pixels.float(), grid_thw=grid.to(CUDA)).pooler_output
        part(pixels, grid_thw=grid)  # a first call makes pinned memory
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = part(pixels, grid_thw=grid).pooler_output
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert (found.float() - expected).norm() < 3e-2 * expected.norm()


def test_one_compiled_graph_serves_images_of_all_sizes():
    model = changed(qwen())
    part, technique = vision_encoders(model)[0], Compile(enabled=True)
    sizes = [[(8, 8), (9, 7), (32, 32)], [(4, 4)], [(64, 64), (5, 30)], [(16, 16)] * 5]
    expected = [part(*images(some)[:1], grid_thw=images(some)[1]).pooler_output for some in sizes]
    technique.apply(PreparedModel(model), World(CUDA))
    graphs = []
    for some, features in zip(sizes, expected, strict=True):
        pixels, grid = images(some)
        found = part(pixels, grid_thw=grid).pooler_output
        assert (found - features).norm() < 2e-2 * features.norm()
        graphs.append(technique.report().lengths[TOWER])
    assert graphs[-1] <= 2
    assert technique.report().breaks == []


def test_each_technique_acts_on_a_trained_vision_encoder():
    pipeline, recipe = lora(vision=True), replace(image_models.recipe("qwen2_5_vl"), dtype=DType.bfloat16)
    pipeline.attention.backend = "sdpa"
    pipeline.checkpointing = Checkpointing(enabled=True, policy=Policy.selective)
    pipeline.compile = Compile(enabled=True)
    prepared = assemble(pipeline, recipe, load_config(recipe), World(CUDA), 0)
    evidence = pipeline.verify(prepared, make_probe(prepared.module))
    assert all(seen.acted for seen in evidence), evidence
    of_encoder = {seen.technique for seen in evidence if "vision encoder" in seen.asked}
    assert of_encoder == {"attention", "checkpointing", "compile"}
