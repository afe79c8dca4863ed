"""Documents with one image each for bench_peers.py, and the vision models that read them.

The processor is Qwen2.5-VL's or Qwen3-VL's, with the built-in tokenizer and Qwen's image tokens. This module does not import fxtune,
because the processes of the peers import this module.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ablate

PATCHES = {"qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_5": 16}
"""Model type -> pixels on each side of a patch. An image token is a square of two by two patches."""
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", "qwen3_5": "Qwen3VLProcessor"}
TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Option of the config -> the token whose id it is."""
IDS = {name: 1024 + number for number, name in enumerate(TOKENS)}
"""The built-in tokenizer has 1,024 tokens."""


def _qwen2_5_vl(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    shared = dict(tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    patches = dict(patch_size=14, spatial_merge_size=2, temporal_patch_size=2, window_size=112)
    return dict(
        model_type="qwen2_5_vl",
        **IDS,
        tie_word_embeddings=False,
        text_config=dict(model_type="qwen2_5_vl_text", **shared, **text),
        vision_config=dict(model_type="qwen2_5_vl", out_hidden_size=text["hidden_size"], **patches, **vision),
    )


def _qwen3(model_type: str, text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    """Qwen3-VL and Qwen3.5, with the vision encoder of their sizes around 8B."""
    shared = dict(tie_word_embeddings=False, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    patches = dict(patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304)
    sizes = dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16)
    return dict(
        model_type=model_type,
        **IDS,
        tie_word_embeddings=False,
        text_config=dict(model_type=f"{model_type}_text", **shared, **text),
        vision_config=dict(model_type=model_type, out_hidden_size=text["hidden_size"], **patches, **sizes, **vision),
    )


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_vl_8b": _qwen3(
        "qwen3_vl",
        dict(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=262144,
            rope_parameters=dict(
                rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True
            ),
        ),
        deepstack_visual_indexes=[8, 16, 24],
    ),
    "qwen3_5_vl_9b": _qwen3("qwen3_5", {k: v for k, v in ablate.SHAPES["qwen3_5_9b"].items() if k != "model_type"}),
    "qwen2_5_vl_7b": _qwen2_5_vl(
        dict(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            max_position_embeddings=128000,
            rms_norm_eps=1e-6,
            use_sliding_window=False,
            rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]),
        ),
        dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, fullatt_block_indexes=[7, 15, 23, 31]),
    ),
    "qwen2_5_vl_tiny": _qwen2_5_vl(
        dict(
            vocab_size=1040,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]),
        ),
        dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, fullatt_block_indexes=[1]),
    ),
}
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QUESTION = 0.1
"""Share of the text that the question has. The answer has the rest."""


def side(shape: dict[str, Any]) -> int:
    """Pixels on each side of the square of an image token."""
    return 2 * PATCHES[shape["model_type"]]


def write_processor(tokenizer: Path, folder: Path, shape: dict[str, Any]) -> Path:
    """Write the files of a tokenizer and a processor for `shape` unless they exist. Returns `folder`."""
    name, patch, area = PROCESSORS[shape["model_type"]], PATCHES[shape["model_type"]], side(shape) ** 2
    if (folder / "preprocessor_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    words = json.loads((tokenizer / "tokenizer.json").read_text())
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    words["added_tokens"] += [dict(id=IDS[key], content=token, **special) for key, token in TOKENS.items()]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] += TOKENS.values()
    settings |= dict(model_max_length=131072, processor_class=name)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    sizes = dict(patch_size=patch, merge_size=2, temporal_patch_size=2, min_pixels=4 * area, max_pixels=16384 * area)
    sizes |= dict(
        size=dict(shortest_edge=4 * area, longest_edge=16384 * area),
        processor_class=name,
        image_mean=[0.48145466, 0.4578275, 0.40821073],
        image_std=[0.26862954, 0.26130258, 0.27577711],
    )
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(dict(sizes, video_processor_type="Qwen2VLVideoProcessor"))
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps(dict(sizes, image_processor_type="Qwen2VLImageProcessor"))
    )
    return folder


def write_documents(
    folder: Path, count: int, tokens: int, text: int, images: tuple[int, int], tokenizer: Path, side: int
) -> Path:
    """Write a JSONL file of chats with one JPEG each, unless the file exists. Returns the file.

    Args:
        folder: for the file and the images.
        count: the least number of documents.
        tokens: the least number of tokens in all documents.
        text: tokens of a document without its image: template, question and answer.
        images: least and most tokens of an image. Sizes are log-uniform, with aspect ratios up to 2.
        tokenizer: the folder of the built-in tokenizer.
        side: pixels on each side of the square of an image token.
    """
    file = folder / "documents.jsonl"
    if file.exists():
        return file
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "images").mkdir(parents=True)
    draw, say = random.Random(0), writer(tokenizer, text)
    lines, total = [], 0
    while len(lines) < count or total < tokens:
        rows, columns = grid(draw, *images)
        name = f"images/{len(lines)}.jpg"
        # Sides are not whole numbers of tokens: each tool must resize the image, like a user's image.
        draw_image(draw, rows * side + draw.randint(-9, 9), columns * side + draw.randint(-9, 9)).save(
            folder / name, quality=90
        )
        question, answer = say(draw)
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        answered = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        lines.append(json.dumps({"messages": [asked, answered], "images": [name]}) + "\n")
        total += rows * columns + text
    staging = file.with_suffix(".part")
    staging.write_text("".join(lines))
    staging.rename(file)
    return file


def grid(draw: random.Random, least: int, most: int) -> tuple[int, int]:
    """Rows and columns, in tokens, of an image."""
    if least == most:
        return math.isqrt(least), math.isqrt(least)
    count = math.exp(draw.uniform(math.log(least), math.log(most)))
    rows = max(1, round(math.sqrt(count) * 2 ** draw.uniform(-0.5, 0.5)))
    return rows, max(1, round(count / rows))


def draw_image(draw: random.Random, height: int, width: int) -> Any:
    """Low-frequency noise with a little high-frequency noise. Its JPEG is as large as a photograph's."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(draw.randrange(2**32))
    coarse = noise.integers(0, 256, (height // 32 + 2, width // 32 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    fine = noise.integers(-8, 9, (height, width, 1), dtype=np.int16)
    return Image.fromarray((smooth + fine).clip(0, 255).astype(np.uint8))


def writer(tokenizer: Path, tokens: int) -> Callable[[random.Random], tuple[str, str]]:
    """A function that makes a question and an answer with `tokens` tokens in all, the template's included."""
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode

    def length(text: str) -> int:
        return len(encode(text).ids)

    # The template's own tokens, and the two tokens around an image.
    frame = length("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n") + 2
    room = tokens - frame
    asked = round(QUESTION * room)

    def words(draw: random.Random, size: int) -> str:
        text = ""
        while True:
            word = " " * bool(text) + "".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 6)))
            if length(text + word) > size:
                break
            text += word
        while length(text) < size:
            text += " a"
        assert length(text) == size
        return text

    return lambda draw: (words(draw, asked), words(draw, room - asked))
