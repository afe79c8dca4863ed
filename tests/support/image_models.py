"""Tiny vision-language models with random weights, and batches of documents with random images for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate

import torch
from support.cases import slow_but
from support.decoder_sizes import decoder_sizes
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.load import DType, Init, ModelConfig
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.attention import recurrent

IMAGE_TOKEN = 90
VOCABULARY = 96
TEXT = dict(
    **decoder_sizes(32, 48, layers=2, heads=4, key_heads=2, head_dim=8),
    vocab_size=VOCABULARY,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN_TOKENS = dict(image_token_id=IMAGE_TOKEN, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
QWEN_TOWER = dict(
    depth=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=32,
)
QWEN3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
QWEN3_5_TOWER = {**QWEN_TOWER, "num_position_embeddings": 16}
QWEN3_5_TEXT = {
    **TEXT,
    "head_dim": 32,
    "rope_parameters": {
        **M_ROPE,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SIGLIP = dict(
    model_type="siglip_vision_model",
    **decoder_sizes(16, 24, layers=2, heads=2),
    image_size=28,
    patch_size=14,
    vision_use_head=False,
)
LLAMA = {**TEXT, "model_type": "llama"}
IDEFICS = dict(
    text_config=LLAMA,
    vision_config=dict(
        **decoder_sizes(16, 24, layers=2, heads=2),
        image_size=28,
        patch_size=7,
    ),
    scale_factor=2,
    image_token_id=IMAGE_TOKEN,
    tie_word_embeddings=False,
)
PIXTRAL = dict(
    model_type="pixtral",
    **decoder_sizes(16, 24, layers=2, heads=2),
    image_size=56,
    patch_size=7,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)

CONFIGS = {
    "qwen2_vl": (
        "qwen2_vl",
        dict(
            text_config={**TEXT, "rope_parameters": M_ROPE},
            vision_config=dict(
                depth=2,
                embed_dim=16,
                hidden_size=32,
                num_heads=2,
                mlp_ratio=2,
                patch_size=4,
                spatial_merge_size=2,
                temporal_patch_size=2,
            ),
            **QWEN_TOKENS,
        ),
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        dict(
            text_config={**TEXT, "rope_parameters": M_ROPE},
            vision_config={**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
            **QWEN_TOKENS,
        ),
    ),
    "qwen3_vl": (
        "qwen3_vl",
        dict(text_config={**TEXT, "rope_parameters": M_ROPE}, vision_config=QWEN3_TOWER, **QWEN_TOKENS),
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        dict(text_config={**TEXT, **MOE, "rope_parameters": M_ROPE}, vision_config=QWEN3_TOWER, **QWEN_TOKENS),
    ),
    "qwen3_5": (
        "qwen3_5",
        dict(text_config=QWEN3_5_TEXT, vision_config=QWEN3_5_TOWER, **QWEN_TOKENS),
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        dict(
            text_config={**QWEN3_5_TEXT, **MOE, "shared_expert_intermediate_size": 16},
            vision_config=QWEN3_5_TOWER,
            **QWEN_TOKENS,
        ),
    ),
    "gemma3": (
        "gemma3",
        dict(
            text_config={**TEXT, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
            vision_config=SIGLIP,
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKEN,
            boi_token_index=91,
            eoi_token_index=92,
        ),
    ),
    "gemma4": (
        "gemma4",
        dict(
            text_config={
                **TEXT,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
            },
            vision_config=dict(
                **decoder_sizes(16, 24, layers=2, heads=2, key_heads=2, head_dim=8),
                patch_size=4,
                pooling_kernel_size=2,
                position_embedding_size=64,
            ),
            audio_config=None,
            image_token_id=IMAGE_TOKEN,
            video_token_id=91,
            audio_token_id=92,
        ),
    ),
    "internvl": (
        "internvl",
        dict(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config=dict(
                **decoder_sizes(16, 24, layers=2, heads=2),
                image_size=[28, 28],
                patch_size=[7, 7],
            ),
            image_token_id=IMAGE_TOKEN,
        ),
    ),
    "llava": (
        "llava",
        dict(
            text_config=LLAMA,
            vision_config={
                **{key: value for key, value in SIGLIP.items() if key != "vision_use_head"},
                "model_type": "clip_vision_model",
            },
            image_token_index=IMAGE_TOKEN,
        ),
    ),
    "pixtral": (
        "llava",
        dict(
            text_config={**LLAMA, "model_type": "mistral", "sliding_window": None},
            vision_config=PIXTRAL,
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
    ),
    "mistral3": (
        "mistral3",
        dict(
            text_config={**LLAMA, "model_type": "mistral", "sliding_window": None},
            vision_config=PIXTRAL,
            image_token_index=IMAGE_TOKEN,
            spatial_merge_size=2,
        ),
    ),
    "llava_onevision": (
        "llava_onevision",
        dict(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config=SIGLIP,
            image_token_index=IMAGE_TOKEN,
            video_token_index=91,
            image_grid_pinpoints=[[28, 28], [28, 56], [56, 28]],
        ),
    ),
    "smolvlm": ("smolvlm", IDEFICS),
    "idefics3": ("idefics3", IDEFICS),
}
FAMILIES = slow_but(CONFIGS, "qwen2_5_vl", "qwen3_5", "gemma3", "llava")
"""Of the families, four are tried by `make test` and the others by `make test-all`."""
SHAPES = [
    [4, (1, 2), 5],
    [6],
    [3, (2, 2), 3, (1, 3), 6],
    [2, (3, 1), 7],
    [9],
]
"""Documents: tokens of text, and images of several sizes."""


def config(family: str, vocabulary: int = VOCABULARY):
    model_type, values = CONFIGS[family]
    values = copy.deepcopy(values)
    values["text_config"]["vocab_size"] = vocabulary
    return CONFIG_MAPPING[model_type](**values)


@torch.no_grad()
def draw(built, seed: int = 0) -> None:
    """Draw weights that are large enough for attention to be far from uniform. New weights of some families are 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in built.named_parameters():
        if weight.dim() > 1 and "lora_" not in name:
            spread = 0.5 if "embed" in name else 0.6 * weight[0].numel() ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
        if name.endswith("A_log"):  # transformers' chunks lose digits where states decay strongly
            weight.copy_(-torch.rand(weight.shape, generator=generator))


@torch.no_grad()
def draw_for_answers(built) -> None:
    """Draw weights with which a token depends on the whole prompt: layers add much to the embedded tokens."""
    draw(built)
    built.get_input_embeddings().weight.mul_(0.1)
    for layer in decoder_layers(built):
        for weight in layer.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)


def model(family: str, vocabulary: int = VOCABULARY):
    """A float32 model."""
    torch.manual_seed(0)
    built = AutoModelForImageTextToText.from_config(config(family, vocabulary), dtype=torch.float32).eval()
    draw(built)
    return built


def recipe(family: str) -> ModelConfig:
    """The `model` of a recipe that draws this family's model."""
    return ModelConfig(path=None, init=Init.random, architecture=config(family).to_dict(), dtype=DType.float32)


def language_model(built, **given) -> LanguageModel:
    """The model with the operators of recurrent layers, as a run has it. `given`: fields of PreparedModel."""
    recurrent.separate(built)
    return LanguageModel(PreparedModel(built, **given))


@dataclass
class Document:
    ids: torch.Tensor
    images: dict[str, torch.Tensor]
    """Empty: it has no images."""


def image(family: str, config, size: tuple[int, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of one image. `size`: rows and columns, in features; for families with images of one size unused."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    vision, (rows, columns) = config.vision_config, size
    if family.startswith("qwen"):
        rows, columns = rows * vision.spatial_merge_size, columns * vision.spatial_merge_size
        pixels = random(rows * columns, 3 * vision.temporal_patch_size * vision.patch_size**2)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}
    if family in ("pixtral", "mistral3"):
        side = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        sizes = [rows * side, columns * side]
        return {"pixel_values": random(1, 3, *sizes), "image_sizes": torch.tensor([sizes])}
    if family == "gemma4":
        side, room = vision.pooling_kernel_size, 9 * vision.pooling_kernel_size**2
        at = torch.cartesian_prod(torch.arange(rows * side), torch.arange(columns * side)).flip(-1)
        places = F.pad(at, (0, 0, 0, room - len(at)), value=-1)
        pixels = random(1, room, 3 * vision.patch_size**2) * (places[None, :, :1] >= 0)
        return {"pixel_values": pixels, "image_position_ids": places[None]}
    if family == "llava_onevision":
        sizes = [28 * min(rows, 2), 28 if rows > 1 else 28 * min(columns, 2)]
        tiles = sizes[0] * sizes[1] // 28**2 + 1
        return {"pixel_values": random(1, tiles, 3, 28, 28), "image_sizes": torch.tensor([sizes])}
    if family in ("smolvlm", "idefics3"):
        return {
            "pixel_values": random(1, 1, 3, 28, 28),
            "pixel_attention_mask": torch.ones(1, 1, 28, 28, dtype=torch.bool),
        }
    return {"pixel_values": random(1, 3, 28, 28)}


def document(family: str, built, parts: list[int | tuple[int, int]], seed: int) -> Document:
    """A document of parts: a number of random tokens of text, or the size of a random image (see image())."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[torch.Tensor] = []
    images: list[dict[str, torch.Tensor]] = []
    several = sum(isinstance(part, tuple) for part in parts) > 1
    merge = images_of(built.config).merge(built.config)
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(3, 80, (part,), generator=generator))
            continue
        tensors = image(family, built.config, part, generator)
        if family == "llava_onevision":
            if several:  # transformers then takes each whole image as one tile
                tensors["pixel_values"] = tensors["pixel_values"][:, :1]
            tensors["batch_num_images"] = torch.tensor([2 if several else 1])
        with torch.no_grad():
            alone = {**tensors, "batch_num_images": torch.tensor([1])} if "batch_num_images" in tensors else tensors
            if several and family == "llava_onevision":
                alone["batch_num_images"] = torch.tensor([2])
                alone = merge([alone, alone])
                alone["batch_num_images"] = alone["batch_num_images"][:1]
            found = built.model.get_image_features(**alone, return_dict=True).pooler_output
        numbers = found.numel() if isinstance(found, torch.Tensor) else sum(features.numel() for features in found)
        numbers //= 2 if several and family == "llava_onevision" else 1
        ids.append(torch.full((numbers // built.config.get_text_config().hidden_size,), IMAGE_TOKEN))
        images.append(tensors)
    merged = merge(images) if images else {}
    if "batch_num_images" in merged:
        merged["batch_num_images"] = torch.tensor([len(images)])
    return Document(torch.cat(ids), merged)


def batch(built, rows: list[list[Document]], packed: bool = True) -> Batch:
    """A batch of these documents, in which each token of text but a document's first is supervised. Not `packed`: one
    document a row, with padding."""
    config, kind = built.config, kind_of(built.config)
    width = max(sum(len(document.ids) for document in row) for row in rows)
    shape = (len(rows), width)
    ids, targets = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORE_INDEX)
    positions = torch.zeros(shape, dtype=torch.long)
    on_axes = torch.zeros((3, *shape), dtype=torch.long)
    starts, filled, tensors = [], [], []
    rope = kind.images.rope_positions(config)
    for number, row in enumerate(rows):
        at = 0
        lengths = [len(document.ids) for document in row]
        for document, begin in zip(row, [0, *accumulate(lengths)], strict=False):
            end = begin + len(document.ids)
            starts.append(number * width + begin)
            ids[number, begin:end] = document.ids
            later = document.ids[1:]
            targets[number, begin : end - 1] = torch.where(later == IMAGE_TOKEN, IGNORE_INDEX, later)
            positions[number, begin:end] = torch.arange(end - begin)
            if rope is not None:
                on_axes[:, number, begin:end] = rope(document.ids, document.images)
            if document.images:
                tensors.append(document.images)
            at = end
        filled.append(at)
        if at < width:
            rest = torch.arange(width - at) if packed else torch.arange(at, width)
            positions[number, at:], on_axes[:, number, at:] = rest, rest
            starts += [number * width + at] if packed else []
    supervised = (targets.flatten() != IGNORE_INDEX).nonzero().flatten()
    return Batch(
        input_ids=ids,
        targets=targets,
        position_ids=positions,
        cu_seqlens=torch.tensor([*starts, ids.numel()], dtype=torch.int32),
        supervised_at=supervised,
        labels=targets.flatten()[supervised],
        tokens=sum(filled),
        filled=torch.tensor(filled) if min(filled) < width else None,
        images=kind.images.merge(config)(tensors) if tensors else None,
        rope_positions=on_axes if rope is not None and tensors else None,
    )


def type_ids(built, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the families' processors say about the tokens beside their ids."""
    types = (ids == IMAGE_TOKEN).long()
    names = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
    family = built.config.model_type
    name = "mm_token_type_ids" if family.startswith("qwen") else names.get(family)
    return {name: types} if name else {}


def plain_loss(built, documents: list[Document]) -> torch.Tensor:
    """Summed cross-entropy of the tokens of text by plain transformers, one document at a time."""
    total = torch.zeros(())
    for document in documents:
        ids = document.ids[None]
        logits = built(input_ids=ids, **document.images, **type_ids(built, ids), use_cache=False).logits[0, :-1]
        later = document.ids[1:]
        total = total + F.cross_entropy(
            logits, torch.where(later == IMAGE_TOKEN, IGNORE_INDEX, later), reduction="sum", ignore_index=IGNORE_INDEX
        )
    return total


def documents(family: str, model) -> list[Document]:
    """A document of each of SHAPES."""
    return [document(family, model, parts, seed) for seed, parts in enumerate(SHAPES)]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_alike(found, expected):
    """A key's bias adds one number to all scores of a query, so its gradient is 0 but for rounding: it is compared with
    the gradient of the key's weight."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = expected[name.replace("k_proj.bias", "k_proj.weight")].norm()
        assert (gradient - expected[name]).norm() < 1e-5 * scale, name
