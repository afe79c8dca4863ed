"""Documents with one image each for bench_peers.py, and the processors of the models that read them.

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

from shapes import IDS, TOKENS

PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", "qwen3_5": "Qwen3VLProcessor"}
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
    """Pixels on each side of the square of an image token: two by two patches."""
    return 2 * int(shape["vision_config"]["patch_size"])


def write_processor(tokenizer: Path, folder: Path, shape: dict[str, Any]) -> Path:
    """Write the files of a tokenizer and a processor for `shape` unless they exist. Returns `folder`."""
    name, area = PROCESSORS[shape["model_type"]], side(shape) ** 2
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
    sizes = dict(
        patch_size=side(shape) // 2, merge_size=2, temporal_patch_size=2, min_pixels=4 * area, max_pixels=16384 * area
    )
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
