"""Small processors of vision families, as transformers reads them from a folder, with tokenizers of single letters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image
from support import image_models
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from fxtune.upstream.transformers import read_processor

CHATML = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template; IMAGE stands for what a family writes for an image."""
QWEN3_5 = """{%- macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}\
{% if 'image' in part or part.type == 'image' %}IMAGE{% elif 'text' in part %}{{ part.text }}{% else %}\
{{ raise_exception('Unexpected item type in content.') }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- if last.query < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > last.query %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- shown(message.content) | trim + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""A template of the shape of Qwen3.5's: it needs a question, and the last answer alone has a place for thoughts."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": dict(
        tokens=["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
        written="<|vision_start|><|image_pad|><|vision_end|>",
        image_token="<|image_pad|>",
        files={
            "preprocessor_config.json": dict(
                image_processor_type="Qwen2VLImageProcessor", patch_size=14, merge_size=2, temporal_patch_size=2,
                size=dict(shortest_edge=4 * 784, longest_edge=16 * 784),
            )
        },
    ),
    "qwen3_vl": dict(
        tokens=["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"],
        written="<|vision_start|><|image_pad|><|vision_end|>",
        image_token="<|image_pad|>",
        files={
            "preprocessor_config.json": dict(
                image_processor_type="Qwen2VLImageProcessor", patch_size=16, merge_size=2, temporal_patch_size=2,
                size=dict(shortest_edge=4 * 1024, longest_edge=16 * 1024),
            )
        },
    ),
    "qwen3_5": dict(
        template=QWEN3_5,
        tokens=["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<think>", "</think>"],
        written="<|vision_start|><|image_pad|><|vision_end|>",
        image_token="<|image_pad|>",
        files={
            "preprocessor_config.json": dict(
                image_processor_type="Qwen2VLImageProcessorFast", processor_class="Qwen3VLProcessor",
                patch_size=16, merge_size=2, temporal_patch_size=2,
                size=dict(shortest_edge=4 * 1024, longest_edge=16 * 1024),
            )
        },
    ),
    "gemma3": dict(
        tokens=["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        extra=dict(
            image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
        ),
        written="<start_of_image>",
        image_token="<image_soft_token>",
        files={
            "preprocessor_config.json": dict(
                image_processor_type="Gemma3ImageProcessor", size=dict(height=28, width=28), image_seq_length=4,
            ),
            "processor_config.json": dict(image_seq_length=4, processor_class="Gemma3Processor"),
        },
    ),
    "internvl": dict(
        tokens=["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        extra=dict(
            start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
            video_token="<video>",
        ),
        written="<IMG_CONTEXT>",
        image_token="<IMG_CONTEXT>",
        files={
            "preprocessor_config.json": dict(
                image_processor_type="GotOcr2ImageProcessor", size=dict(height=28, width=28), crop_to_patches=True,
                min_patches=1, max_patches=4,
            ),
            "processor_config.json": dict(image_seq_length=4, processor_class="InternVLProcessor"),
        },
    ),
    "llava": dict(
        tokens=["<image>"],
        written="<image>",
        image_token="<image>",
        files={
            "preprocessor_config.json": dict(
                image_processor_type="CLIPImageProcessor", size=dict(shortest_edge=28),
                crop_size=dict(height=28, width=28),
            ),
            "processor_config.json": dict(
                patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
                processor_class="LlavaProcessor",
            ),
        },
    ),
    "idefics3": dict(
        tokens=["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
                *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))],
        written="<image>",
        image_token="<image>",
        files={
            "preprocessor_config.json": dict(
                image_processor_type="Idefics3ImageProcessor", size=dict(longest_edge=56),
                max_image_size=dict(longest_edge=28), do_image_splitting=True,
            ),
            "processor_config.json": dict(image_seq_len=4, processor_class="Idefics3Processor"),
        },
    ),
}  # fmt: skip
"""Family -> its special tokens, what its chat template writes for an image, and the files of its processor."""


def tokenizer(family: str) -> Any:
    """A tokenizer of single letters with the family's special tokens and chat template."""
    given = FAMILIES[family]
    special = ["<unk>", "<pad>", "<|im_start|>", "<|im_end|>", *given["tokens"]]
    words = [*special, "\n\n", "\n", *map(chr, range(32, 127)), "▁"]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("\n\n|[\\s\\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=special[2:], chat_template=given.get("template", CHATML).replace("IMAGE", given["written"]),
        **({"extra_special_tokens": given["extra"]} if "extra" in given else {}),
    )  # fmt: skip


def write_processor(family: str, folder: Path) -> Path:
    """Write tokenizer and processor files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer(family).save_pretrained(folder)
    for name, content in FAMILIES[family]["files"].items():
        (folder / name).write_text(json.dumps(content))
    return folder


def write_model(family: str, folder: Path) -> Path:
    """Write a tiny random model of a family with its tokenizer and processor into a folder."""
    import torch
    from transformers import AutoModelForImageTextToText

    write_processor(family, folder)
    words = tokenizer(family)
    config = image_models.config(family)
    named = {"image_token_id": FAMILIES[family]["image_token"]}
    if family.startswith("qwen"):
        named["video_token_id"] = "<|video_pad|>"
        named |= {f"vision_{place}_token_id": f"<|vision_{place}|>" for place in ("start", "end")}
        file = folder / "preprocessor_config.json"
        side = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        size = dict(shortest_edge=4 * side**2, longest_edge=16 * side**2)
        changed = dict(patch_size=config.vision_config.patch_size, size=size)
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    for key, token in named.items():
        setattr(config, key, words.convert_tokens_to_ids(token))
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = len(words), words.pad_token_id
    text.bos_token_id, text.eos_token_id = None, words.eos_token_id
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_picture_rows(folder: Path, rows: int = 36) -> Path:
    """Write rows with none to two images of different sizes, and the images, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    path = folder / "rows.jsonl"
    with path.open("w") as out:
        for row in range(rows):
            names = [f"{row}-{number}.{draw.choice(('png', 'jpg'))}" for number in range(row % 3)]
            for name in names:
                color = tuple(draw.randrange(256) for _ in range(3))
                Image.new("RGB", (draw.randint(16, 60), draw.randint(16, 40)), color).save(folder / name)
            question = {"role": "user", "content": "<image>" * len(names) + f"What is {row}?"}
            answer = {"role": "assistant", "content": draw.choice(("red", "dark blue", "it is as green as grass"))}
            out.write(json.dumps({"messages": [question, answer], "images": names}) + "\n")
    return path


def write_picture_pairs(folder: Path, rows: int = 12, images: bool = True) -> Path:
    """Write pairs of answers to questions, each with an image, and the images, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.jsonl"
    with path.open("w") as out:
        for row in range(rows):
            size = (20 + 3 * row, 40 - row)
            Image.new("RGB", size, (20 * row, 200 - 10 * row, 5 * row)).save(folder / f"{row}.png")
            mark, names = ("<image>", [f"{row}.png"]) if images else ("", [])
            question = {"role": "user", "content": f"{mark}What is {row}?"}
            answers = {
                "chosen": [{"role": "assistant", "content": f"it is {row}"}],
                "rejected": [{"role": "assistant", "content": "a dark blue lamp"}],
            }
            out.write(json.dumps({"prompt": [question], **answers, **({"images": names} if images else {})}) + "\n")
    return path


def processor(family: str, folder: Path) -> Any:
    """transformers' processor of the family, read from files in `folder`."""
    write_processor(family, folder)
    return read_processor(folder, tokenizer(family), AutoConfig.for_model(family))


def image_ids(images: Any, height: int, width: int) -> list[int]:
    """The token ids that an ImageProcessor writes for an image of this size, without text around them."""
    return images.text(height, width, next(iter(images.placeholders))).ids
